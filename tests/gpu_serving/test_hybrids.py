# SPDX-License-Identifier: Apache-2.0
"""Linear attention or state spaces beside attention, and Gemma 3's windows and large heads: pat is
as near to fa3 and to flashinfer as these are to each other, and packs the layers that attend. Where
flashinfer's log-probabilities are NaN, as a Gemma 3 gave on an H200, pat is compared with fa3 alone
(``agreement.check_forced``).

Three servers for each of the families: this module is best run by itself. ``PAT_HYBRIDS`` chooses
some of them, as ``qwen3_next,gemma3``.
"""

from __future__ import annotations

import os

import pytest
from kit.hybrid_models import FAMILIES as ALL_FAMILIES
from serving.workloads import random_prompt

from .agreement import LOADS, NEW_TOKENS, PEERS, Load, answers
from .fleet import Fleet
from .test_agreement import check_beside_peers

FAMILIES = tuple(os.environ.get("PAT_HYBRIDS", ",".join(ALL_FAMILIES)).split(","))
SERVERS = tuple(f"{family}-{name}" for family in FAMILIES for name in (*PEERS, "pat"))
WINDOWED = ("gemma3",)
HYBRIDS = tuple(family for family in FAMILIES if family not in WINDOWED)
SERVED = {
    "qwen3_next": "serves all 1 attention layers",
    "qwen3_5": "serves all 1 attention layers",
    "falcon_h1": "serves all 3 attention layers",
    "nemotron_h": "serves all 3 attention layers",
    "granite_hybrid": "serves all 3 attention layers",
    "gemma3": "serves 2 of 4 attention layers (2 with a sliding window)",
}
# The prompts of 156 tokens leave no state, where there is one every 256, so none of them is cached.
# Not more at once than a chunk of a prefill holds (8,192 tokens): see agreement.forced_logprobs.
COMPARED = {
    "shared": Load(LOADS["shared"].prompts[:48]),
    "multi_level": LOADS["multi_level"],
    "disjoint": LOADS["disjoint"],
}
# The tree holds a state every 64 to 256 tokens, by family: 2,048 of these are shared at least. With
# two KV heads plans give a small batch whose tokens are read up to 5 times in the mean items of one
# query each (csrc/pack/separate.h); here it is 6 to 8 times.
SYSTEM = random_prompt(seed=81, length=2100)
FIRST_TURN = Load(tuple(SYSTEM + random_prompt(seed=82 + i, length=30 + i) for i in range(12)))


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_packed(family: str, server: Fleet) -> None:
    """In decode graphs; only windows are left to the base. First: it needs pat's servers alone."""
    one = server(f"{family}-pat")
    answers(one, FIRST_TURN)
    before = one.counters()
    answers(one, FIRST_TURN)
    counted = one.counters() - before
    print(f"{family}: {counted}")
    assert counted.packed_steps >= NEW_TOKENS - 8  # requests do not all begin at once
    assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
    assert not counted.fallbacks
    assert set(counted.base_layers) == ({"a sliding window"} if family in WINDOWED else set())
    text = one.text()
    assert SERVED[family] in text and "cuda graph: True" in text
    assert "looks for shared prefixes in SGLang's radix cache (rust tree core)" in text


@pytest.mark.parametrize("load_name", COMPARED)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_a_continuation(family: str, load_name: str, server: Fleet) -> None:
    check_beside_peers(f"{family}-{{}}", load_name, COMPARED[load_name], server)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_second_turn_starts_from_the_state_of_the_first(family: str, server: Fleet) -> None:
    """The system prompt and its state stay in the tree, and are where fa3's server has them."""
    ours, theirs = server(f"{family}-pat"), server(f"{family}-fa3")
    for one in (ours, theirs):
        one.post("/flush_cache")
    texts = answers(theirs, FIRST_TURN)
    answers(ours, FIRST_TURN)
    prompts = tuple(
        prompt + text.tokens + random_prompt(seed=95 + i, length=12)
        for i, (prompt, text) in enumerate(zip(FIRST_TURN.prompts, texts, strict=True))
    )
    turn = Load(prompts)
    wanted = answers(theirs, turn)
    before = ours.counters()
    found = answers(ours, turn)
    counted = ours.counters() - before
    for name, given in (("pat", found), ("fa3", wanted)):
        cached = [answer.cached_tokens for answer in given]
        print(f"{family}-{name}: cached {cached}")
        assert min(cached) >= len(SYSTEM) // 256 * 256
    assert counted.packed_steps >= NEW_TOKENS - 8 and not counted.fallbacks
    check_beside_peers(f"{family}-{{}}", "second turn", turn, server)
