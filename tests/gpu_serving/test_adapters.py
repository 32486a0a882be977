# SPDX-License-Identifier: Apache-2.0
"""Two LoRA adapters and the bare model under one system prompt, in one batch."""

from __future__ import annotations

from dataclasses import replace

from serving.workloads import random_prompt

from .agreement import Distance, Load, answers, equal_share, forced_logprobs
from .fleet import ADAPTERS, Fleet

OURS, STOCK = "ratio4-pat-adapters", "ratio4-fa3-adapters"
SERVERS = (OURS, STOCK)
COLOURS = (*ADAPTERS, None)
SYSTEM = random_prompt(seed=31, length=800)
# So many, and so short behind SYSTEM, that plans pack them (see ``LOADS``).
REQUESTS = 36
LOAD = Load(
    tuple(SYSTEM + random_prompt(seed=40 + i, length=10 + i) for i in range(REQUESTS)),
    adapters=tuple(COLOURS[i % len(COLOURS)] for i in range(REQUESTS)),
)
ALONE = random_prompt(seed=32, length=500)
TWINS = 12  # requests of ALONE under one adapter


def test_a_batch_of_several_adapters(server: Fleet) -> None:
    ours, theirs = server(OURS), server(STOCK)
    texts = answers(theirs, LOAD)
    before = ours.counters()
    forced = forced_logprobs(ours, LOAD, texts)
    counted = ours.counters() - before
    found = Distance.between(forced, forced_logprobs(theirs, LOAD, texts))
    print(f"adapters: {found}, {counted}")
    assert found.small
    assert counted.packed_steps > 0  # the requests of an adapter share its system prompt
    assert not [reason for reason in counted.fallbacks if reason.startswith("layer")]
    # Had the adapters done nothing, or all the same, this would have shown nothing.
    bare = answers(theirs, replace(LOAD, adapters=None))
    adapted = [i for i, colour in enumerate(LOAD.adapters or ()) if colour is not None]
    assert equal_share([texts[i] for i in adapted], [bare[i] for i in adapted]) < 0.5


def test_adapters_share_no_kv(server: Fleet) -> None:
    """Equal prompts under other adapters are other nodes of the tree: each is prefilled for
    itself, and nothing of them is packed. Under one adapter they are one node, and pack."""
    ours = server(OURS)
    for colour in COLOURS:
        (cold,) = ours.generate([ALONE], 1, adapters=[colour])
        assert cold.cached_tokens == 0
    before = ours.counters()
    found = ours.generate([ALONE] * len(COLOURS), 24, adapters=COLOURS)
    counted = ours.counters() - before
    assert all(answer.cached_tokens > 400 for answer in found)
    assert counted.packed_steps == 0 and counted.kv_tokens_read == counted.kv_tokens_unpacked
    before = ours.counters()
    ours.generate([ALONE] * TWINS, 24, adapters=ADAPTERS[:1] * TWINS)
    counted = ours.counters() - before
    assert counted.packed_steps >= 20
    assert counted.kv_tokens_read < 0.5 * counted.kv_tokens_unpacked
