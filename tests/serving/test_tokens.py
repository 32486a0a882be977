# SPDX-License-Identifier: Apache-2.0
"""The same tokens and log-probabilities as SGLang's own backend, however the server is set up.

Data parallel attention cannot run here (SGLang pins memory for it, which takes a GPU's driver):
tests/srt/test_backend.py has its padded batches and idle ranks, tests/gpu_serving the servers.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import pytest
from kit.forks import search_path

from sglang_pat.demo.counters import Counters

from .conftest import Serve, Stock
from .server import Config, ServingServer, disagreements
from .workloads import WORKLOADS, Workload, random_prompt

APPLY = Path(__file__).parents[2] / "patches" / "apply.py"
CHUNK = 128
SHORT = tuple(name for name in WORKLOADS if name not in ("patient", "hungry"))  # test_life.py


@dataclass(frozen=True)
class Row:
    """``works``: whose answers are compared; ``branches``: whether plans have them; ``says``: what
    the log has, and how often."""

    config: Config
    works: tuple[str, ...] = SHORT
    branches: bool = False
    says: tuple[str, int] = ("", 0)

    def __str__(self) -> str:
        return self.config.name


MIXED = Config(
    "page16-mixed_chunks-python-paper",
    args=("--page-size", "16", "--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk"),
    env=(("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python"), ("SGLANG_PAT_POLICY", "pat")),
)
BRANCHES = Config(
    "page16-no_overlap-rust-branches",
    args=("--page-size", "16", "--disable-overlap-schedule"),
    env=(("PAT_TEETH_CUT", "branches"), ("SGLANG_PAT_MIN_BATCH", "1")),
    plugins=True,
)
CLASSIC = Config("classic", args=("--radix-cache-backend", "classic"), plugins=True)
TWO_RANKS = Config(  # each plans for itself, over its own heads
    "tensor-parallel", args=("--tp-size", "2"), env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),)
)
# On SGLang with our patch in it: no hook on its forward batches. All rows on such a copy: ``python
# patches/apply.py COPY``, then ``PYTHONPATH=COPY pytest`` of this file.
PATCHED = Config("patched", args=("--log-level", "debug"))
ROWS = (
    Row(Config("page1-overlap-rust")),
    Row(BRANCHES, branches=True),
    Row(CLASSIC, ("multi_level", "identical", "ragged")),
    Row(TWO_RANKS, ("multi_level", "ragged"), says=("4 query heads, 1 KV heads", 2)),
    Row(PATCHED, ("multi_level",), says=("takes the requests of a step from SGLang's", 1)),
    Row(MIXED),
)


def config_of(row: Row, folder: Path) -> Config:
    if row.config != PATCHED:
        return row.config
    if version("sglang") != "0.5.23":
        pytest.skip("the patch is for SGLang 0.5.23")
    subprocess.run([sys.executable, APPLY, folder], check=True, capture_output=True)
    return replace(PATCHED, env=tuple(search_path(folder).items()))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_answers_equal_the_stock_backends(
    row: Row, serve: Serve, stock: Stock, tmp_path: Path
) -> None:
    server = serve(config_of(row, tmp_path))
    for name in row.works:
        for temperature in ("cold", "warm"):
            found = disagreements(server.ask(WORKLOADS[name]), stock[name])
            assert not found, (name, temperature, found)
    said, times = row.says
    assert not said or server.text().count(said) == times
    _, counted = server.counted(server.ask, WORKLOADS["multi_level"])
    check_packing(row, counted)
    check_alone(row, server, stock)


def check_packing(row: Row, counted: Counters) -> None:
    steps = max(WORKLOADS["multi_level"].new_tokens) - 1
    assert counted.decode_steps >= steps
    assert not counted.fallbacks
    assert (counted.branched_steps > 0) == row.branches
    assert counted.packed_steps >= steps - 2  # the first may come before the prefill's nodes
    assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked


def check_alone(row: Row, server: ServingServer, stock: Stock) -> None:
    """A request alone is the base's unless the option says otherwise."""
    ours_too = ("SGLANG_PAT_MIN_BATCH", "1") in row.config.env
    prompt, tokens = WORKLOADS["disjoint"].prompts[-1], WORKLOADS["disjoint"].new_tokens[-1]
    answers, counted = server.counted(server.generate, [prompt], tokens)
    assert disagreements(answers, stock["disjoint"][-1:]) == []
    ours, base = counted.decode_steps, counted.base_forwards.get("small_batch", 0)
    # The first token comes from a prefill; overlap may decode one token too many.
    assert tokens - 1 <= (ours if ours_too else base) <= tokens
    assert (ours > 0) == (base == 0) == ours_too
    assert counted.packed_steps == 0 and not counted.fallbacks


def test_mixed_steps_are_counted(serve: Serve) -> None:
    """SGLang rewrites their mode before the backend sees it. A prompt of 16 chunks comes in one
    message with a short one, whose request decodes meanwhile. Requests that ask for
    log-probabilities are not mixed."""
    server = serve(MIXED)
    prompts = [random_prompt(110, 10), random_prompt(111, 16 * CHUNK)]
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 40}
    body = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling}
    _, counted = server.counted(server.post, "/generate", body)
    # The first chunk has the short prompt, in each of the others one token is of its answer.
    assert counted.base_forwards["extend"] == 1
    assert counted.fallbacks == {"mixed": 16}


def test_requests_together_answer_as_each_alone_with_kv_in_e4m3(serve: Serve) -> None:
    """Without scales; SGLang's own attention runs a request that is alone."""
    server = serve(Config("e4m3", args=("--kv-cache-dtype", "fp8_e4m3")))
    assert "all 2 attention layers, K/V in float8_e4m3fn" in server.text()
    work = Workload(WORKLOADS["multi_level"].prompts[:5], (24,) * 5)
    answers = [server.counted(server.generate, [prompt], 24) for prompt in work.prompts]
    assert not any(counted.decode_steps for _, counted in answers)
    together, counted = server.counted(server.ask, work)
    assert disagreements(together, [answer for (answer,), _ in answers]) == []
    assert counted.packed_steps > 0 and not counted.fallbacks and not counted.base_layers
