# SPDX-License-Identifier: Apache-2.0
"""Adapters, a cache of two levels, and a pair of servers for prefill and decode, each beside a
stock server."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from serving.disaggregation import serve_pair
from serving.server import Config
from serving.workloads import random_prompt

from .agreement import (
    NEW_TOKENS,
    Distance,
    Load,
    answers,
    beside,
    equal_share,
    forced_logprobs,
)
from .fleet import ADAPTERS, COMPARED, SMALL_POOL, Fleet

ADAPTED, STOCK_ADAPTED = "ratio4-pat-adapters", "ratio4-fa3-adapters"
TWO_LEVELS, STOCK = "ratio4-pat-two_levels", "ratio4-fa3"
SERVERS = (ADAPTED, STOCK_ADAPTED, TWO_LEVELS, STOCK)
COLOURS = (*ADAPTERS, None)
SYSTEM = random_prompt(seed=31, length=1000)


def load_of(requests: int) -> Load:
    return Load(tuple(SYSTEM + random_prompt(seed=40 + i, length=30) for i in range(requests)))


def test_a_batch_of_several_adapters(server: Fleet) -> None:
    """And the bare model."""
    load = replace(load_of(36), adapters=COLOURS * 12)
    theirs = server(STOCK_ADAPTED)
    texts = answers(theirs, load)
    found, counted = beside(server(ADAPTED), load, texts, forced_logprobs(theirs, load, texts))
    assert found.small
    assert counted.packed_steps > 0  # the requests of an adapter share its system prompt
    assert not [reason for reason in counted.fallbacks if reason.startswith("layer")]
    # Had the adapters done nothing, or all the same, this would have shown nothing.
    bare = answers(theirs, replace(load, adapters=None))
    adapted = [i for i in range(36) if COLOURS[i % 3] is not None]
    assert equal_share([texts[i] for i in adapted], [bare[i] for i in adapted]) < 0.5


def test_adapters_share_no_kv(server: Fleet) -> None:
    """Equal prompts under other adapters are other nodes of the tree: each is prefilled for
    itself, and nothing of them is packed. Under one adapter they are one node, and pack."""
    ours = server(ADAPTED)
    alone = random_prompt(seed=32, length=500)
    for colour in COLOURS:
        (cold,) = ours.generate([alone], 1, adapters=[colour])
        assert cold.cached_tokens == 0
    before = ours.counters()
    found = ours.generate([alone] * 3, 24, adapters=COLOURS)
    counted = ours.counters() - before
    assert all(answer.cached_tokens > 400 for answer in found)
    assert counted.packed_steps == 0 and counted.kv_tokens_read == counted.kv_tokens_unpacked
    before = ours.counters()
    ours.generate([alone] * 12, 24, adapters=ADAPTERS[:1] * 12)
    counted = ours.counters() - before
    assert counted.packed_steps >= 20
    assert counted.kv_tokens_read < 0.5 * counted.kv_tokens_unpacked


def test_nodes_that_were_evicted_to_the_host_and_loaded_back(server: Fleet) -> None:
    """They answer right, and pack."""
    load, ours, theirs = load_of(8), server(TWO_LEVELS), server(STOCK)
    texts = answers(theirs, load)
    wanted = forced_logprobs(theirs, load, texts)
    assert beside(ours, load, texts, wanted)[0].small
    parameters = {"temperature": 0, "max_new_tokens": 1}
    for _ in range(2):
        for i in range(SMALL_POOL // 1000 + 1):  # prompts that only take room
            ours.generate([random_prompt(seed=70 + i, length=1000)], 1)
        body = {"input_ids": list(load.prompts[0]), "sampling_params": parameters}
        details = ours.post("/generate", body)["meta_info"]["cached_tokens_details"]
        assert details and details["host"] >= len(SYSTEM), "not evicted, or not loaded back"
        found, counted = beside(ours, load, texts, wanted)
        assert found.small
        assert counted.packed_steps >= NEW_TOKENS - 8  # requests do not all begin at once
        assert counted.kv_tokens_read < 0.5 * counted.kv_tokens_unpacked
        assert not counted.fallbacks


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl (see README.md)")
def test_a_decode_server_with_its_radix_cache(
    server: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    load, theirs = load_of(10), server(STOCK)
    texts = answers(theirs, load)
    wanted = forced_logprobs(theirs, load, texts)
    config = Config("pair", args=COMPARED, device="cuda")
    folder, radix = tmp_path_factory.mktemp("pair"), ("--disaggregation-decode-enable-radix-cache",)
    with serve_pair(server.model("ratio4"), folder, config, radix) as pair:
        for turn in range(2):
            before = pair.decode.counters()
            forced = pair.forced_logprobs(load.prompts, [text.tokens for text in texts])
            counted = pair.decode.counters() - before
            found = Distance.between(forced, wanted)
            print(f"turn {turn}: {found}, {counted}")
            assert found.small
            assert counted.decode_steps >= NEW_TOKENS - 2
            assert counted.packed_steps >= NEW_TOKENS // 2  # requests arrive one after another
            assert counted.kv_tokens_read < counted.kv_tokens_unpacked
        assert pair.prefill.counters().decode_steps == 0
