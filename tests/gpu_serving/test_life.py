# SPDX-License-Identifier: Apache-2.0
"""What happens to a server while it lives: equal answers to equal requests, requests that are
alone, branches, and other weights. Clients that go away are the soak's and tests/serving's."""

from __future__ import annotations

import pytest
from serving.server import Answer
from serving.workloads import random_prompt

from .agreement import LOADS, NEW_TOKENS, Load, answers, beside, equal_share, forced_logprobs
from .fleet import Fleet

OURS, STOCK, OTHER = "ratio4-pat", "ratio4-fa3", "ratio4b-fa3"
NO_GRAPHS, SERVES_ONE = "ratio4-pat-no_graphs", "ratio4-pat-pages"
SERVERS = (OURS, STOCK, OTHER, NO_GRAPHS, SERVES_ONE, "ratio4-flashinfer")
LOAD, ALONE = LOADS["multi_level"], LOADS["single"]
# Sampling error of shares: some 50 texts a load, of which a near-tie halves a few.
MARGIN = 0.05


def test_free_answers(server: Fleet) -> None:
    """As often fa3's as flashinfer's are; from run to run as often the same as fa3's, whose
    products round by batch. Samples of a prompt are the same draw, so loads count together."""
    runs: dict[str, list[list[Answer]]] = {}
    for each in (STOCK, "ratio4-flashinfer", OURS):
        runs[each] = [[], []]
        for load in (LOADS[name] for name in ("shared", "multi_level", "samples")):
            answers(server(each), load)  # now all prompts are cached
            for run in runs[each]:
                run += answers(server(each), load)
    as_fa3 = {each: equal_share(found[1], runs[STOCK][1]) for each, found in runs.items()}
    repeated = {each: equal_share(*found) for each, found in runs.items()}
    assert as_fa3[OURS] >= as_fa3["ratio4-flashinfer"] - MARGIN
    assert repeated[OURS] >= repeated[STOCK] - MARGIN


def test_the_same_bits_from_run_to_run(server: Fleet) -> None:
    """Where the batch is the same."""
    one = server(SERVES_ONE)
    before = one.counters()
    answers(one, ALONE)
    first = answers(one, ALONE)
    assert all(answers(one, ALONE) == first for _ in range(3))
    assert (one.counters() - before).decode_steps > 0


def test_branches(server: Fleet) -> None:
    """Under four long paths many short tails, which pay as branches."""
    ours, theirs = server(SERVES_ONE), server(STOCK)
    system = random_prompt(seed=7, length=1024)
    agents = [system + random_prompt(seed=10 + i, length=320) for i in range(4)]
    tails = [random_prompt(seed=20 + i, length=4) for i in range(64)]
    load = Load(tuple(agents[i % 4] + tail for i, tail in enumerate(tails)))
    texts = answers(theirs, load)
    answers(ours, load)  # now all prompts are cached, and all begin at once
    _, counted = ours.counted(answers, ours, load)
    assert counted.branched_steps > 0
    found, counted = beside(ours, load, texts, forced_logprobs(theirs, load, texts))
    assert found.small and counted.branched_steps > 0


@pytest.mark.parametrize("name", [OURS, NO_GRAPHS])
def test_a_request_alone_is_the_stock_servers(name: str, server: Fleet) -> None:
    """The same kernels on the same numbers: one rounding of ours in bf16 would already show.
    Without a graph fa3 splits a sequence otherwise than in one, and so rounds otherwise."""
    ours, theirs = server(name), server(STOCK)
    texts = answers(theirs, ALONE)
    theirs.post("/flush_cache")  # the prompt's K/V come from one prefill on every server
    wanted = forced_logprobs(theirs, ALONE, texts)
    for _ in range(2):
        ours.post("/flush_cache")
        found, counted = beside(ours, ALONE, texts, wanted)
        assert found.largest <= 1e-3 if name == OURS else found.small
        assert counted.decode_steps == 0 and counted.host_seconds == 0
        assert counted.base_forwards["small_batch"] >= NEW_TOKENS - 1
        assert not counted.fallbacks
        # Two requests run on pat in between, and leave its plan behind.
        _, counted = ours.counted(answers, ours, Load(LOADS["shared"].prompts[:2]))
        assert counted.decode_steps >= NEW_TOKENS // 2


def test_other_weights_from_disk(server: Fleet) -> None:
    """There and back: each time the answers are those of a fresh stock server with these weights,
    from an empty cache.

    Without ``recapture_cuda_graph``, with which stock servers die, too. By reading, torch 2.14 then
    frees memory that SGLang's prefill graphs still use (docs/operating.md, "Weight updates").
    """
    ours = server(OURS)
    stock = {"ratio4b": server(OTHER), "ratio4": server(STOCK)}
    texts = {name: answers(one, LOAD) for name, one in stock.items()}
    assert equal_share(texts["ratio4"], texts["ratio4b"]) < 0.5
    try:
        for name, one in stock.items():
            answers(ours, LOAD)  # the cache holds K/V of the weights before
            ours.update_weights(server.model(name))
            (first,) = ours.generate(LOAD.prompts[:1], 1)
            assert first.cached_tokens == 0
            wanted = forced_logprobs(one, LOAD, texts[name])
            found, counted = beside(ours, LOAD, texts[name], wanted)
            assert found.small and counted.packed_steps >= NEW_TOKENS - 8
    finally:
        ours.update_weights(server.model("ratio4"))
