# SPDX-License-Identifier: Apache-2.0
"""The counters of a real server add up, and a server on which pat has nothing to gain says so."""

from __future__ import annotations

import re
from urllib.request import urlopen

import pytest

from sglang_pat.demo.counters import Counters

from .conftest import Serve, Stock
from .server import Config, ServingServer, disagreements
from .workloads import WORKLOADS, random_prompt

# Without overlap every decode step is one that a request needs, and sees its prefill in the tree.
EXACT = Config("page1-no_overlap", args=("--disable-overlap-schedule",))
TWO_STAGES = Config(  # 64 requests are two micro-batches of 32, which take turns
    "pipeline-parallel",
    args=("--pp-size", "2", "--pp-max-micro-batch-size", "32"),
    env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),),
)
WITHOUT_CACHE = Config(
    "shares-nothing",
    args=("--disable-overlap-schedule", "--disable-radix-cache"),
    env=(("PAT_TEETH_STEPS_WITHOUT_SHARING", "20"),),
    plugins=True,
)


def test_one_request_is_counted_exactly(serve: Serve) -> None:
    server = serve(EXACT)
    _, counted = server.counted(server.generate, [random_prompt(seed=100, length=50)], 20)
    # The first token comes from the prefill, the others from steps of SGLang's attention.
    assert counted == Counters(base_forwards={"extend": 1, "small_batch": 19})


def test_steps_of_two_and_of_one_add_up(serve: Serve) -> None:
    """The second may come some steps after the first: then each is alone for as many."""
    server = serve(EXACT)
    prompts = [random_prompt(seed=105 + i, length=50) for i in range(2)]
    _, counted = server.counted(server.generate, prompts, 200)
    alone = counted.base_forwards.get("small_batch", 0)
    assert 2 * counted.decode_steps + alone == 2 * 199 and counted.decode_steps > 0
    assert counted.kv_tokens_unpacked <= 2 * sum(50 + i for i in range(1, 200))
    assert counted.kv_tokens_unpacked >= counted.decode_steps * 2 * 51
    assert counted.plans_made + counted.plans_reused == counted.decode_steps
    assert not counted.fallbacks


def test_a_healthy_server_warns_of_nothing(serve: Serve) -> None:
    server = serve(EXACT)
    prompt = random_prompt(seed=102, length=200)
    server.generate([prompt], 1)
    server.generate([prompt] * 4, 5)
    said = re.findall(r"sglang_pat: (.*)", server.text())
    assert len(said) == 4, said
    assert re.match(r"\d+ requests share \d+( to \d+)? tokens", said[-1])


@pytest.mark.parametrize(("config", "reused"), [(EXACT, 12), (TWO_STAGES, 4)], ids=str)
def test_steady_steps_reuse_plans(config: Config, reused: int, serve: Serve, stock: Stock) -> None:
    """``reused``: how often a plan, at least. One has room for 128 tokens of each request; while
    the batch fills there are a few more."""
    server, work = serve(config), WORKLOADS["crowd"]
    assert disagreements(server.ask(work), stock["crowd"]) == []
    _, counted = server.counted(server.generate, work.prompts, 150)
    assert counted.packed_steps > 0.9 * counted.decode_steps and counted.decode_steps >= 149
    assert counted.plans_reused > reused * counted.plans_made, counted
    assert not counted.fallbacks


def test_a_server_that_shares_nothing_says_why(serve: Serve, stock: Stock) -> None:
    """And answers as the stock server."""
    server = serve(WITHOUT_CACHE)
    (warning,) = warned(server)
    assert warning.startswith("pat packs nothing") and "drop --disable-radix-cache" in warning
    assert serving(server) == 0
    prompt = random_prompt(seed=103, length=50)
    server.generate([prompt] * 2, 19)
    assert "The likely reason" not in server.text()
    server.generate([prompt] * 2, 10)
    server.generate([prompt] * 2, 30)
    why = re.findall(r"(\d+) decode steps had several .* reason: (.*)\. `sglang-pat", server.text())
    assert [(steps, "without --disable-radix-cache" in reason) for steps, reason in why] == [
        ("20", True)
    ]
    for name in ("multi_level", "ragged", "disjoint"):
        answers, counted = server.counted(server.ask, WORKLOADS[name])
        assert disagreements(answers, stock[name]) == []
        assert counted.decode_steps > 0 == counted.packed_steps and not counted.fallbacks
        assert counted.kv_tokens_read == counted.kv_tokens_unpacked


def warned(server: ServingServer) -> list[str]:
    return re.findall(
        r"sglang_pat: (pat (?:serves|packs) nothing on this server: .*)", server.text()
    )


def serving(server: ServingServer) -> float:
    """The gauge ``sglang_pat_serving``."""
    with urlopen(f"{server.url}/metrics", timeout=10) as answer:
        (value,) = re.findall(r"^sglang_pat_serving\{.*\} (\S+)$", answer.read().decode(), re.M)
    return float(value)


def test_as_the_backend_of_decode_alone(serve: Serve, stock: Stock) -> None:
    """Of prefill alone it serves nothing: tests/srt/test_make_backend.py."""
    args = ("--decode-attention-backend", "pat")
    server = serve(Config("decode-only", backend="torch_native", args=args))
    assert disagreements(server.ask(WORKLOADS["multi_level"]), stock["multi_level"]) == []
    assert serving(server) == 1 and warned(server) == [] and server.counters().packed_steps > 0
    said = "decode runs on pat, prefill on SGLang's own attention (torch_native)"
    assert said in server.text()
