# SPDX-License-Identifier: Apache-2.0
"""Verify steps of speculative decoding: pat gives the answers that fa3 gives, as often as fa3 does
with and without drafts, accepts as many drafts, and packs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import sqrt
from statistics import fmean, stdev

import pytest
from serving.server import Answer, Prompt

from sglang_pat.demo.counters import Counters

from .agreement import (
    FACTOR,
    LARGEST_MORE,
    LOADS,
    MEAN_MORE,
    NEW_TOKENS,
    accepted,
    answers,
    apart,
    compared,
    equal_share,
)
from .fleet import Fleet

PLAIN, OURS_PLAIN = "ratio4-fa3", "ratio4-pat"
RIGHT = ("ratio4-pat-drafts-right", "ratio4-pat-drafts-no-overlap")
WRONG = (
    *("ratio4-pat-drafts-wrong", "ratio4-pat-eagle", "ratio4-pat-trees-eagle"),
    "ratio4-pat-eagle3",
)
# By ours: the server of fa3 that is given the same drafts.
PEERS = dict.fromkeys(RIGHT, "ratio4-fa3-drafts-right") | {
    "ratio4-pat-trees-right": "ratio4-fa3-trees-right"
}
OURS = (*PEERS, *WRONG, "ratio4-pat-ngram", "ratio4-pat-trees-ngram")
# Eight heads a KV head and eight draft tokens: 64 packed rows a request.
LARGE_PLAIN, OURS_LARGE_PLAIN, OURS_LARGE = "ratio8-fa3", "ratio8-pat", "ratio8-pat-ngram"
LARGE = (LARGE_PLAIN, OURS_LARGE_PLAIN, OURS_LARGE)
SERVERS = (PLAIN, OURS_PLAIN, *PEERS.values(), "ratio4-fa3-ngram", *OURS, *LARGE)
COMPARED = ("shared", "multi_level", "disjoint", "samples")
PROMPTS = [p for load in COMPARED for p in LOADS[load].prompts for _ in range(LOADS[load].samples)]


def far_prompts(some: list[Answer], others: list[Answer], bound: float) -> set[Prompt]:
    """The prompts of which a log-probability is further away than ``bound``; says where."""
    found = set()
    for prompt, one, other in zip(PROMPTS, some, others, strict=True):
        for i in range(compared(one, other)):
            if abs(one.logprobs[i] - other.logprobs[i]) > bound:
                print(f"prompt of {len(prompt)}, token {i}: {one.tokens[max(0, i - 3) : i + 1]}")
                found.add(prompt)
                break
    return found


def by_prompt(values: list[float]) -> list[float]:
    """The mean of the answers to each different prompt: copies of it are no further draws."""
    found: dict[Prompt, list[float]] = {}
    for prompt, value in zip(PROMPTS, values, strict=True):
        found.setdefault(prompt, []).append(value)
    return [fmean(each) for each in found.values()]


def check_shares(ours: list[Answer], ours_plain: list[Answer], plain: list[Answer]) -> str:
    """Answers are as often ``plain``'s as those without drafts, but for three standard errors: a
    near-tie halves a text here or there. Returns both shares."""
    shares = [equal_share([one], [other]) for one, other in zip(ours, plain, strict=True)]
    least = [equal_share([one], [other]) for one, other in zip(ours_plain, plain, strict=True)]
    less = by_prompt([b - a for a, b in zip(shares, least, strict=True)])
    error = stdev(less) / sqrt(len(less))
    said = f"equal {fmean(shares):.4f}, without drafts {fmean(least):.4f}, error {error:.4f}"
    assert fmean(less) <= 3 * error, said
    return said


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


def check_answers(
    name: str, server: Fleet, plain: list[Answer], ours_plain: list[Answer]
) -> Counters:
    """Answers with drafts are as near to fa3's without as pat's without. Returns what was counted
    meanwhile."""
    before = server(name).counters()
    ours = of_loads(server, name)
    counted = server(name).counters() - before
    distance, limit = apart(ours, plain), apart(ours_plain, plain)
    print(f"{name}: {distance}, without drafts {limit}; {accepted(ours):.2f} tokens a step")
    print(f"{name}: {check_shares(ours, ours_plain, plain)}; {counted}")
    far = far_prompts(ours, plain, FACTOR * limit.largest + LARGEST_MORE)
    assert distance.mean <= FACTOR * limit.mean + MEAN_MORE
    assert not far
    assert counted.verify_steps > 0
    assert not counted.fallbacks and not counted.base_layers
    return counted


@pytest.mark.parametrize("name", OURS)
def test_answers(name: str, server: Fleet, plain: list[Answer], ours_plain: list[Answer]) -> None:
    assert check_answers(name, server, plain, ours_plain).packed_steps > 0


def test_answers_of_64_packed_rows_a_request(server: Fleet) -> None:
    """Plans give each request row tiles of its own here, so that nothing is packed."""
    plain, ours_plain = (of_loads(server, name) for name in (LARGE_PLAIN, OURS_LARGE_PLAIN))
    assert check_answers(OURS_LARGE, server, plain, ours_plain).packed_steps == 0


@pytest.mark.parametrize(("name", "peer"), PEERS.items())
def test_as_many_drafts_are_accepted(name: str, peer: str, server: Fleet) -> None:
    """A draft token that saw a wrong one, or not all of those before it, would be refused."""
    ours, theirs = (accepted(of_loads(server, each)) for each in (name, peer))
    print(f"{name}: {ours:.3f} tokens a step; fa3 {theirs:.3f}")
    assert theirs > 1.2
    assert abs(ours - theirs) < 0.1


def test_wrong_drafts_are_refused(server: Fleet) -> None:
    for name in WRONG:
        assert accepted(of_loads(server, name)) < 1.5


def test_drafts_of_what_was_seen_are_accepted(server: Fleet) -> None:
    # Twice each: drafts are what a server has answered before, and pat's has been asked already.
    for name in ("pat", "fa3"):
        of_loads(server, f"ratio4-{name}-ngram")
    ours, theirs = (accepted(of_loads(server, f"ratio4-{name}-ngram")) for name in ("pat", "fa3"))
    print(f"ngram: {ours:.3f} tokens a step; fa3 {theirs:.3f}")
    # Our results depend on the batch more than fa3's do (test_agreement), so that near-ties fall
    # differently more often than in the answers that drafts are taken from.
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
    for half in (texts[: len(plain)], texts[len(plain) :]):
        print(f"beside others, {NEW_TOKENS} tokens: {check_shares(half, ours_plain, plain)}")
    assert not (one.counters() - before).fallbacks


def test_what_the_log_says(server: Fleet) -> None:
    for name in OURS:
        log = server(name).text()
        assert "serves all 4 attention layers" in log
        assert "serves nothing" not in log
    assert "draft worker's attention is SGLang's own" in server(RIGHT[0]).text()
