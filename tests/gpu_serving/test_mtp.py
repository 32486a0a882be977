# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction of a model of linear attention (``--speculative-algorithm NEXTN``): a
layer of the model drafts, and where drafts are refused the states go back to the last token that
was accepted. pat gives the answers that fa3 gives, and packs the verify steps."""

from __future__ import annotations

from serving.server import Answer

from .agreement import LOADS, NEW_TOKENS, accepted, answers, apart
from .fleet import Fleet
from .test_hybrids import FIRST_TURN

PLAIN, OURS_PLAIN, PEER, OURS = SERVERS = ("mtp-fa3", "mtp-pat", "mtp-fa3-drafts", "mtp-pat-drafts")


def of_loads(server: Fleet, name: str) -> list[Answer]:
    """The answers to all compared loads, when what SGLang caches of their prompts is cached."""
    found: list[Answer] = []
    for load in (FIRST_TURN, LOADS["disjoint"]):
        answers(server(name), load)
        found += answers(server(name), load)
    return found


def test_answers(server: Fleet) -> None:
    """As near to fa3's with drafts as these are to fa3's without: verifying, SGLang takes the steps
    of linear attention in another order, with any backend."""
    plain, theirs = (of_loads(server, name) for name in (PLAIN, PEER))
    before = server(OURS).counters()
    ours = of_loads(server, OURS)
    counted = server(OURS).counters() - before
    without = apart(of_loads(server, OURS_PLAIN), plain)
    distance, limit = apart(ours, theirs), apart(theirs, plain)
    print(f"{distance} from fa3 with drafts, fa3 with from without {limit}; pat without {without}")
    print(f"{accepted(ours):.3f} tokens a step, fa3 {accepted(theirs):.3f}; {counted}")
    assert distance.about_as_small_as(limit)
    assert abs(accepted(ours) - accepted(theirs)) < 0.1
    assert not counted.fallbacks and not counted.base_layers


def test_verify_steps_are_packed(server: Fleet) -> None:
    one = server(OURS)
    before = one.counters()
    answers(one, FIRST_TURN)
    counted = one.counters() - before
    print(f"{counted}")
    assert counted.verify_steps >= counted.packed_steps >= NEW_TOKENS / 4 - 4
    assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
    assert "serves all 1 attention layers" in one.text()
