# SPDX-License-Identifier: Apache-2.0
"""The same tokens and log-probabilities as SGLang's own backend, however the server is set up."""

from __future__ import annotations

import pytest

from .compare import disagreements
from .conftest import Serve
from .server import Answer, Config
from .workloads import WORKLOADS, random_prompt

CHUNK = 128
CONFIGS = (
    Config("page1-overlap-rust", spawn=True),
    MIXED := Config(
        "page16-mixed_chunks-python-paper",
        args=("--page-size", "16", "--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk"),
        env=(
            ("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python"),
            ("SGLANG_PAT_POLICY", "pat"),
        ),
    ),
    BRANCHES := Config(
        "page16-no_overlap-rust-branches",
        args=("--page-size", "16", "--disable-overlap-schedule"),
        env=(("PAT_TEETH_CUT", "branches"), ("SGLANG_PAT_MIN_BATCH", "1")),
        plugins=True,
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


def test_a_request_alone_is_the_bases_unless_the_option_says_otherwise(
    config: Config, serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    server = serve(config)
    before = server.counters()
    prompt, tokens = WORKLOADS["disjoint"].prompts[-1], WORKLOADS["disjoint"].new_tokens[-1]
    assert disagreements(server.generate([prompt], tokens), stock["disjoint"][-1:]) == []
    counted = server.counters() - before
    ours, base = counted.decode_steps, counted.base_forwards.get("small_batch", 0)
    # The first token comes from a prefill; overlap may decode one token too many.
    assert tokens - 1 <= (ours if config is BRANCHES else base) <= tokens
    assert (ours > 0) == (base == 0) == (config is BRANCHES)
    assert counted.packed_steps == 0 and not counted.fallbacks


def test_mixed_steps_are_counted(config: Config, serve: Serve) -> None:
    """SGLang rewrites their mode before the backend sees it. A prompt of 16 chunks comes in one
    message with a short one, whose request decodes meanwhile. Requests that ask for
    log-probabilities are not mixed."""
    if config is not MIXED:
        pytest.skip("its steps are not mixed")
    server = serve(config)
    before = server.counters()
    prompts = [random_prompt(110, 10), random_prompt(111, 16 * CHUNK)]
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 40}
    body = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling}
    server.post("/generate", body)
    counted = server.counters() - before
    # The first chunk has the short prompt, in each of the others one token is of its answer.
    assert counted.base_forwards["extend"] == 1
    assert counted.fallbacks == {"mixed": 16}
