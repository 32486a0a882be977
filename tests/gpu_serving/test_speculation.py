# SPDX-License-Identifier: Apache-2.0
"""Verify steps of speculative decoding: pat gives the answers that fa3 gives, as often as fa3 does
with and without drafts, accepts as many drafts, and packs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from statistics import fmean, stdev

import pytest
from serving.server import Answer

from sglang_pat.bench.common.counters import Counters

from .agreement import LOADS, NEW_TOKENS, Distance, answers, equal_share
from .fleet import Fleet
from .test_agreement import MARGIN

PLAIN, OURS_PLAIN, PEER = "ratio4-fa3", "ratio4-pat", "ratio4-fa3-drafts-right"
RIGHT = ("ratio4-pat-drafts-right", "ratio4-pat-drafts-no-overlap")
OURS = (*RIGHT, "ratio4-pat-drafts-wrong", "ratio4-pat-eagle", "ratio4-pat-ngram")
# Eight heads a KV head and eight draft tokens: 64 packed rows a request.
LARGE_PLAIN, OURS_LARGE_PLAIN, OURS_LARGE = "ratio8-fa3", "ratio8-pat", "ratio8-pat-ngram"
LARGE = (LARGE_PLAIN, OURS_LARGE_PLAIN, OURS_LARGE)
SERVERS = (PLAIN, OURS_PLAIN, PEER, "ratio4-fa3-ngram", *OURS, *LARGE)
COMPARED = ("shared", "multi_level", "disjoint", "samples")
# NGRAM fills up its drafts with this token, each behind the request's last one (SGLang's
# ngram_corpus/result.cpp). Attention of a chain, fa3's as ours, lets it attend to the drafts before
# it, too. So the tokens behind a filler that was accepted may be wrong.
FILLER = 0


def accepted(texts: list[Answer]) -> float:
    """Tokens that a verify step gives a request, from 1 to its draft tokens, on average."""
    return sum(len(text.tokens) - 1 for text in texts) / sum(text.verify_steps for text in texts)


def apart(some: list[Answer], others: list[Answer]) -> Distance:
    """Of the log-probabilities of each answer up to the first token that differs, or to FILLER."""
    pairs: list[tuple[float, float]] = []
    for one, other in zip(some, others, strict=True):
        for token, other_token, *both in zip(
            one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True
        ):
            if token != other_token:
                break
            pairs.append((both[0], both[1]))
            if token == FILLER:
                break
    return Distance.between(*map(list, zip(*pairs, strict=True)))


def of_loads(server: Fleet, name: str) -> list[Answer]:
    """The answers to all compared loads, when their prompts are cached."""
    found: list[Answer] = []
    for load in COMPARED:
        answers(server(name), LOADS[load])
        found += answers(server(name), LOADS[load])
    return found


@pytest.fixture(scope="session")
def plain(server: Fleet) -> list[Answer]:
    return of_loads(server, PLAIN)


@pytest.fixture(scope="session")
def ours_plain(server: Fleet) -> list[Answer]:
    return of_loads(server, OURS_PLAIN)


@pytest.fixture(scope="session")
def peer(server: Fleet) -> list[Answer]:
    return of_loads(server, PEER)


def check_answers(
    name: str, server: Fleet, plain: list[Answer], ours_plain: list[Answer]
) -> Counters:
    """Answers with drafts are as near to fa3's without as pat's without. Returns what was counted
    meanwhile."""
    before = server(name).counters()
    ours = of_loads(server, name)
    counted = server(name).counters() - before
    shares = [equal_share([one], [other]) for one, other in zip(ours, plain, strict=True)]
    least = [equal_share([one], [other]) for one, other in zip(ours_plain, plain, strict=True)]
    distance, limit = apart(ours, plain), apart(ours_plain, plain)
    print(
        f"{name}: equal {fmean(shares):.4f}, {distance}; without drafts {fmean(least):.4f}, {limit}"
    )
    print(f"{name}: {accepted(ours):.2f} tokens a step; {counted}")
    # A near-tie halves a text here or there, so that the mean of 100 texts has a standard error.
    less = [b - a for a, b in zip(shares, least, strict=True)]
    assert fmean(less) <= 3 * stdev(less) / sqrt(len(less))
    assert distance.about_as_small_as(limit)
    assert counted.verify_steps > 0
    assert not counted.fallbacks and not counted.base_layers
    return counted


@pytest.mark.parametrize("name", OURS)
def test_answers(name: str, server: Fleet, plain: list[Answer], ours_plain: list[Answer]) -> None:
    assert check_answers(name, server, plain, ours_plain).packed_steps > 0


def test_answers_of_64_packed_rows_a_request(server: Fleet) -> None:
    """Plans give each request row tiles of its own here, so that nothing is packed."""
    plain, ours_plain = (of_loads(server, name) for name in (LARGE_PLAIN, OURS_LARGE_PLAIN))
    check_answers(OURS_LARGE, server, plain, ours_plain)


@pytest.mark.parametrize("name", RIGHT)
def test_as_many_drafts_are_accepted(name: str, server: Fleet, peer: list[Answer]) -> None:
    """A draft token that saw a wrong one, or not all of those before it, would be refused."""
    ours, theirs = accepted(of_loads(server, name)), accepted(peer)
    print(f"{name}: {ours:.3f} tokens a step; fa3 {theirs:.3f}")
    assert theirs > 1.2
    assert abs(ours - theirs) < 0.1


def test_wrong_drafts_are_refused(server: Fleet) -> None:
    for name in ("ratio4-pat-drafts-wrong", "ratio4-pat-eagle"):
        assert accepted(of_loads(server, name)) < 1.5


def test_drafts_of_what_was_seen_are_accepted(server: Fleet) -> None:
    ours, theirs = (accepted(of_loads(server, f"ratio4-{name}-ngram")) for name in ("pat", "fa3"))
    print(f"ngram: {ours:.3f} tokens a step; fa3 {theirs:.3f}")
    # Drafts are what was answered before. Our results depend on the batch more than fa3's do
    # (test_agreement), so that near-ties fall differently more often.
    assert ours > theirs - 0.5


def test_plans_outlive_verify_steps(server: Fleet) -> None:
    """A plan holds for 128 tokens of each request: with overlap by bounds of the lengths."""
    one = server(RIGHT[0])
    load = LOADS["shared"]
    one.generate(load.prompts, 4)
    before = one.counters()
    texts = one.generate(load.prompts, 400)
    counted = one.counters() - before
    print(f"{counted}")
    steps = counted.verify_steps + counted.base_forwards.get("small_batch", 0)
    assert steps >= max(text.verify_steps for text in texts) > 90
    assert counted.plans_made < 0.25 * counted.verify_steps
    assert not counted.fallbacks


def test_requests_that_come_and_go(
    server: Fleet, plain: list[Answer], ours_plain: list[Answer]
) -> None:
    """Long and short requests side by side, some of them aborted: the answers stay what they were,
    and nothing falls back."""
    one = server(RIGHT[0])
    before = one.counters()
    rids = [f"abort-{i}" for i in range(4)]
    texts: list[Answer] = []
    with ThreadPoolExecutor() as pool:
        prompts = LOADS["disjoint"].prompts[:4]
        aborted = pool.submit(one.generate, prompts, 2000, rids=rids)
        for load in COMPARED * 2:
            texts += answers(one, LOADS[load])
        for rid in rids:
            one.post("/abort_request", {"rid": rid})
        aborted.result()
    share = equal_share(texts, plain * 2)
    print(f"beside others: {share:.4f} of {NEW_TOKENS} tokens each")
    assert share >= equal_share(ours_plain, plain) - 2 * MARGIN
    assert not (one.counters() - before).fallbacks


def test_what_the_log_says(server: Fleet) -> None:
    for name in OURS:
        log = server(name).text()
        assert "serves all 4 attention layers" in log
        assert "serves nothing" not in log
    assert "draft worker's attention is SGLang's own" in server(RIGHT[0]).text()
