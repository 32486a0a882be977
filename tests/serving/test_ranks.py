# SPDX-License-Identifier: Apache-2.0
"""Tensor and pipeline parallelism: each rank plans for itself, over its own heads, and the answers
stay.

Data parallel attention cannot run here (SGLang pins memory for it, which takes a GPU's driver):
tests/srt/test_backend.py has its padded batches and idle ranks, tests/gpu_serving the servers.
"""

from __future__ import annotations

import pytest

from .compare import disagreements
from .conftest import Serve
from .server import Answer, Config
from .workloads import WORKLOADS

TWO_RANKS = Config(
    "tensor-parallel", args=("--tp-size", "2"), env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),)
)


@pytest.mark.parametrize("workload", ["multi_level", "ragged"])
def test_two_ranks_answer_as_one(
    workload: str, serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    server, work = serve(TWO_RANKS), WORKLOADS[workload]
    before = server.counters()
    for _ in range(2):  # cold and warm
        answers = server.generate(work.prompts, work.new_tokens)
        assert disagreements(answers, stock[workload]) == []
    counted = server.counters() - before
    assert counted.packed_steps > 0
    assert not counted.fallbacks
    # Each rank has half of the heads, and logs for itself.
    assert server.text().count("4 query heads, 1 KV heads") == 2


TWO_STAGES = Config(
    "pipeline-parallel",
    args=("--pp-size", "2", "--pp-max-micro-batch-size", "32"),
    env=(("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),),
)


def test_micro_batches_answer_as_one_and_keep_their_plans(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    """64 requests are two micro-batches of 32, which take turns."""
    server, work = serve(TWO_STAGES), WORKLOADS["crowd"]
    answers = server.generate(work.prompts, work.new_tokens)
    assert disagreements(answers, stock["crowd"]) == []
    before = server.counters()
    server.generate(work.prompts, 129)
    counted = server.counters() - before
    assert counted.packed_steps > 0.9 * counted.decode_steps
    assert counted.plans_reused > 4 * counted.plans_made, counted
    assert not counted.fallbacks
