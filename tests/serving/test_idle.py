# SPDX-License-Identifier: Apache-2.0
"""A server on which pat has nothing to gain says so, and answers all the same."""

from __future__ import annotations

import re
from urllib.request import urlopen

from .compare import disagreements
from .conftest import Serve
from .server import Answer, Config, ServingServer
from .workloads import WORKLOADS

WORK = "multi_level"
NO_CACHE = Config("no-radix-cache", args=("--disable-radix-cache",))
PREFILL_ONLY = Config(
    "prefill-only", backend="torch_native", args=("--prefill-attention-backend", "pat")
)
DECODE_ONLY = Config(
    "decode-only", backend="torch_native", args=("--decode-attention-backend", "pat")
)


def _warned(server: ServingServer) -> list[str]:
    return re.findall(
        r"sglang_pat: (pat (?:serves|packs) nothing on this server: .*)", server.text()
    )


def _serving(server: ServingServer) -> float:
    """The gauge ``sglang_pat_serving``."""
    with urlopen(f"{server.url}/metrics", timeout=10) as answer:
        (value,) = re.findall(r"^sglang_pat_serving\{.*\} (\S+)$", answer.read().decode(), re.M)
    return float(value)


def _check_answers(server: ServingServer, stock: dict[str, list[Answer]]) -> None:
    work = WORKLOADS[WORK]
    answers = server.generate(work.prompts, work.new_tokens, ignore_eos=work.ignore_eos)
    assert disagreements(answers, stock[WORK]) == []


def test_without_a_radix_cache_it_packs_nothing(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    server = serve(NO_CACHE)
    _check_answers(server, stock)
    (warning,) = _warned(server)
    assert warning.startswith("pat packs nothing") and "drop --disable-radix-cache" in warning
    assert server.counters().decode_steps > 0
    assert _serving(server) == 0


def test_as_the_backend_of_prefill_alone_it_serves_nothing(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    server = serve(PREFILL_ONLY)
    _check_answers(server, stock)
    (warning,) = _warned(server)
    assert warning.startswith("pat serves nothing") and "decode runs on" in warning
    assert "attention is SGLang's own, torch_native" in server.text()
    assert server.counters().decode_steps == 0
    assert _serving(server) == 0


def test_as_the_backend_of_decode_alone_it_packs(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    server = serve(DECODE_ONLY)
    _check_answers(server, stock)
    assert _warned(server) == []
    assert "decode runs on pat, prefill on SGLang's own attention (torch_native)" in server.text()
    assert server.counters().packed_steps > 0
    assert _serving(server) == 1
