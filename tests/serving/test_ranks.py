# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: each rank plans for itself, over its own heads, and the answers stay.

Data parallel attention cannot run here (SGLang pins memory for it, which takes a GPU's driver):
test_backend.py has its padded batches and idle ranks, tests/gpu_serving the servers.
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
