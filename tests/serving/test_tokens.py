# SPDX-License-Identifier: Apache-2.0
"""The same tokens and log-probabilities as SGLang's own backend, however the server is set up."""

from __future__ import annotations

import pytest

from .compare import disagreements
from .conftest import Serve
from .server import Answer, Config
from .workloads import WORKLOADS

PYTHON_CORE = ("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")

CONFIGS = (
    Config("page1-overlap-rust"),
    Config(
        "page16-chunked-python-paper",
        args=("--page-size", "16", "--chunked-prefill-size", "128"),
        env=(PYTHON_CORE, ("SGLANG_PAT_POLICY", "paper"), ("SGLANG_PAT_SPLIT", "mean")),
    ),
    Config(
        "page16-no_overlap-rust",
        args=("--page-size", "16", "--disable-overlap-schedule"),
    ),
    Config(
        "page1-chunked-no_overlap-python-naive",
        args=("--chunked-prefill-size", "64", "--disable-overlap-schedule"),
        env=(PYTHON_CORE, ("SGLANG_PAT_POLICY", "naive")),
    ),
    Config("classic-radix-cache", args=("--radix-cache-backend", "classic"), plugins=True),
    Config("no-radix-cache", args=("--disable-radix-cache",)),
)
SHARING = CONFIGS[:-1]
EXPECTED_FALLBACKS = {"extend", "idle"}


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_answers_equal_the_stock_backends(
    config: Config, workload: str, serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    server = serve(config)
    work = WORKLOADS[workload]
    cold = server.generate(work.prompts, work.new_tokens)
    assert disagreements(cold, stock[workload]) == []
    warm = server.generate(work.prompts, work.new_tokens)
    assert disagreements(warm, stock[workload]) == []


@pytest.mark.parametrize("config", SHARING, ids=str)
def test_prefixes_are_packed(config: Config, serve: Serve) -> None:
    server = serve(config)
    before = server.counters()
    work = WORKLOADS["multi_level"]
    server.generate(work.prompts, work.new_tokens)
    counted = server.counters() - before
    assert counted.packed_steps >= max(work.new_tokens) - 3
    assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
    assert set(counted.fallbacks) <= EXPECTED_FALLBACKS


def test_nothing_is_packed_without_a_radix_cache(serve: Serve) -> None:
    server = serve(CONFIGS[-1])
    before = server.counters()
    work = WORKLOADS["identical"]
    server.generate(work.prompts, work.new_tokens)
    counted = server.counters() - before
    assert counted.decode_steps >= work.new_tokens[0] - 1
    assert counted.packed_steps == 0
    assert counted.kv_tokens_read == counted.kv_tokens_unpacked
    assert set(counted.fallbacks) <= EXPECTED_FALLBACKS
