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
    Config("page1-overlap-rust", spawn=True),
    Config(
        "page16-chunked-python-paper",
        args=("--page-size", "16", "--chunked-prefill-size", "128"),
        env=(PYTHON_CORE, ("SGLANG_PAT_POLICY", "pat")),
    ),
    BRANCHES := Config(
        "page16-no_overlap-rust-branches",
        args=("--page-size", "16", "--disable-overlap-schedule"),
        env=(("PAT_TEETH_CUT", "branches"),),
        plugins=True,
    ),
    Config(
        "page1-chunked-no_overlap-python",
        args=("--chunked-prefill-size", "64", "--disable-overlap-schedule"),
        env=(PYTHON_CORE,),
    ),
    Config("classic-radix-cache", args=("--radix-cache-backend", "classic"), plugins=True),
    NO_CACHE := Config("no-radix-cache", args=("--disable-radix-cache",)),
)


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def config(request: pytest.FixtureRequest) -> Config:
    """All tests of a configuration run in a row, on one server."""
    return request.param


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_answers_equal_the_stock_backends(
    config: Config, workload: str, serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    server = serve(config)
    work = WORKLOADS[workload]
    cold = server.generate(work.prompts, work.new_tokens, ignore_eos=work.ignore_eos)
    assert disagreements(cold, stock[workload]) == []
    warm = server.generate(work.prompts, work.new_tokens, ignore_eos=work.ignore_eos)
    assert disagreements(warm, stock[workload]) == []


def test_prefixes_are_packed_where_there_is_a_cache(config: Config, serve: Serve) -> None:
    server = serve(config)
    before = server.counters()
    work = WORKLOADS["multi_level"]
    server.generate(work.prompts, work.new_tokens)
    counted = server.counters() - before
    steps = max(work.new_tokens) - 1
    assert counted.decode_steps >= steps
    assert not counted.fallbacks
    assert (counted.branched_steps > 0) == (config is BRANCHES)
    if config is NO_CACHE:
        assert counted.packed_steps == 0
        assert counted.kv_tokens_read == counted.kv_tokens_unpacked
    else:
        assert counted.packed_steps >= steps - 2  # the first may come before the prefill's nodes
        assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
