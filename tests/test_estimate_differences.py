# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate`` names prompts that a few tokens keep from sharing, and no others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pat.estimate.differences import (
    LEAST_COMMON,
    MOST_DIFFERENT,
    Cut,
    anchors,
    compare,
    find,
    find_all,
    moved,
)
from sglang_pat.estimate.kinds import kind_of
from sglang_pat.estimate.radix import common_prefix
from sglang_pat.estimate.requests import Request

INSTRUCTIONS = (
    "You are the assistant of a shop. Be brief and polite. Look up an order before you say "
    "anything about it, and never promise a refund that you have not seen in the system. "
) * 8


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def requests_of(texts: list[str]) -> list[Request]:
    return [
        Request(line, np.array(encode(text), dtype=np.int64), len(text), 16)
        for line, text in enumerate(texts, 1)
    ]


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("at 2026-11-23 10:15:01 we", "at 2026-11-23 10:15:07 we", "date or time"),
        ("Today is Monday, 23 November 2026.", "Today is Friday, 4 December 2026.", "date or time"),
        ("Today is Nov 3, 2026.", "Today is Dec 14, 2026.", "date or time"),
        ("now: 2026-11-23T10:15:01Z", "now: 2026-11-24T08:00:59Z", "date or time"),
        ("It is 9:05 pm", "It is 11:45 am", "date or time"),
        (
            "id 123e4567-e89b-12d3-a456-426614174000.",
            "id 00000000-e89b-12d3-a456-426614174999.",
            "uuid",
        ),
        ("session sess_8fK2z9", "session sess_1aQ7b3", "id"),
        ("trace 5f2b9c1e77aa", "trace 9e1d0c3b66ff", "id"),
        ("Request 4812 of", "Request 977 of", "number"),
        (
            "2026-11-23, session ab12cd34:",
            "2026-11-24, session zz99yy88:",
            "date or time and id",
        ),
        ("Speak French now", "Speak German now", None),
        ("I bought a lamp", "Where is the chair that I bought?", None),
        ("on 2026-11-23 in Rome", "on 2026-11-24 in Oslo", None),
        ("the same", "the same", None),
    ],
)
def test_kinds_of_differences(one: str, other: str, kind: str | None) -> None:
    found = kind_of(one, other)
    assert (found.name if found else None) == kind


def test_a_difference_is_told_in_whole_words() -> None:
    found = kind_of("Time: 2026-11-23 10:15:01. You", "Time: 2026-11-23 10:15:47. You")
    assert found is not None
    assert (found.one, found.other) == ("2026-11-23 10:15:01", "2026-11-23 10:15:47")


def stamped(count: int = 12) -> list[str]:
    return [
        f"Current time: 2026-11-{number + 1:02d} 08:{number:02d}:00\n{INSTRUCTIONS}"
        f"Customer: {'where is my parcel? ' * (number % 5)}{number}"
        for number in range(count)
    ]


def test_timestamps_are_named() -> None:
    requests = requests_of(stamped())
    (difference,) = find(requests, decode)
    assert difference.kind == "date or time"
    assert list(difference.cuts) == list(range(12))
    assert difference.start == common_prefix(requests[0].symbols, requests[9].symbols)
    assert difference.common > len(INSTRUCTIONS)
    assert difference.pieces[3] == "2026-11-04 08:03:00"


def test_what_differs_at_the_end_is_shared_again() -> None:
    requests = requests_of(stamped())
    behind = moved(requests, find(requests, decode))
    assert [len(request.symbols) for request in behind] == [len(r.symbols) for r in requests]
    assert [sorted(request.symbols) for request in behind] == [sorted(r.symbols) for r in requests]
    for request in behind[1:]:
        assert common_prefix(behind[0].symbols, request.symbols) > len(INSTRUCTIONS)


def test_differences_behind_each_other_are_named() -> None:
    tools = "lookup(order): the state of an order, as the warehouse has it. " * 30
    texts = [
        f"Time: 10:{n:02d}. {INSTRUCTIONS} Ticket {7000 + 13 * n}. {tools} Question {n}"
        for n in range(10, 20)
    ]
    requests = requests_of(texts)
    found, behind = find_all(requests, decode)
    assert [difference.kind for difference in found] == ["number", "date or time"]
    for difference, what in zip(found, ("Ticket ", "Time: "), strict=True):
        for number, cut in difference.cuts.items():
            before = texts[number][: cut.start]
            assert before.rpartition(what)[2] in ("", "7", "70", "71", "10:1")
    for request in behind[1:]:
        assert common_prefix(behind[0].symbols, request.symbols) > len(INSTRUCTIONS + tools)


def test_later_turns_under_the_time_of_the_first_are_named_with_it() -> None:
    """Also those of the conversation with which all others are compared."""
    times = [f"Time: 2026-11-23 10:15:{second:02d}" for second in (1, 2, 3)]
    firsts = [f"{time}\n{INSTRUCTIONS}\nuser: Hello, I am {time[-2:]}." for time in times]
    laters = [f"{first}\nassistant: Yes?\nuser: Where is my order?" for first in firsts]
    differences, _ = find_all(requests_of(firsts + laters), decode)
    assert [difference.kind for difference in differences] == ["date or time"]
    (found,) = differences
    assert sorted(found.cuts) == list(range(6))
    assert found.pieces[0] == found.pieces[3] == "2026-11-23 10:15:01"


def test_ids_of_different_lengths_are_named() -> None:
    texts = [f"[req-{'7' * (3 + n)}{n}x] {INSTRUCTIONS} Question {n}" for n in range(6)]
    (difference,) = find(requests_of(texts), decode)
    assert difference.kind == "id" and len(difference.cuts) == 6


def test_each_family_of_prompts_is_named_for_itself() -> None:
    other = "Write a unit test for the function below. Think about borders. " * 12
    texts = [f"Now: 10:{n:02d}. {(INSTRUCTIONS, other)[n % 2]} {n}" for n in range(10)]
    found = find(requests_of(texts), decode)
    assert sorted(tuple(difference.cuts) for difference in found) == [
        (0, 2, 4, 6, 8),
        (1, 3, 5, 7, 9),
    ]


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param([f"{INSTRUCTIONS} {n} is the question" for n in range(9)], id="shared"),
        pytest.param([INSTRUCTIONS] * 5, id="equal"),
        pytest.param(
            [f"{INSTRUCTIONS} At 10:{n:02d} I lost my card." for n in range(9)],
            id="time at the end",
        ),
        pytest.param([f"Speak {name}. {INSTRUCTIONS}" for name in ("French", "Urdu")], id="words"),
        pytest.param(["short 1", "short 2"], id="short"),
        pytest.param([f"{n} apples. " + "x" * 40 for n in range(9)], id="little follows"),
        pytest.param([""] * 2 + ["a"], id="nearly empty"),
    ],
)
def test_ordinary_prompts_are_not_named(texts: list[str]) -> None:
    assert find(requests_of([text for text in texts if text]), decode) == []


WORDS = sorted(set(INSTRUCTIONS.split()))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_random_conversations_are_not_named(seed: int, with_system: bool) -> None:
    rng = random.Random(seed)
    system = INSTRUCTIONS if with_system else ""
    texts = [system + " ".join(rng.choices(WORDS, k=rng.randint(20, 200))) for _ in range(12)]
    assert find(requests_of(texts), decode) == []
    assert find(requests_of(texts), None) == []


@cache
def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(50_000), k=count))


def test_token_ids_without_text_are_named_too() -> None:
    prompts = [[1, 2, *tokens(n, 5), *tokens(-1, 300), *tokens(50 + n, 40)] for n in range(8)]
    requests = [
        Request(n + 1, np.array(prompt), len(prompt), 16) for n, prompt in enumerate(prompts)
    ]
    (difference,) = find(requests, None)
    assert (difference.kind, difference.start, difference.common) == ("", 2, 300)
    assert set(difference.cuts.values()) == {Cut(2, 7)}
    assert difference.pieces[0] == " ".join(map(str, tokens(0, 5)))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(0, MOST_DIFFERENT),
    st.integers(0, MOST_DIFFERENT),
    st.integers(LEAST_COMMON * 4, 600),
)
def test_compare_finds_the_cut(before: int, mine: int, theirs: int, common: int) -> None:
    start, follow = tokens(1, before), tokens(2, common)
    one = np.array([*start, *(-1 - n for n in range(mine)), *follow, -900])
    other = np.array([*start, *(-100 - n for n in range(theirs)), *follow, -901])
    found = compare(one, other)
    if not mine and not theirs:
        assert found is None  # nothing differs before the end
        return
    assert found is not None
    assert (found.mine, found.theirs) == (Cut(before, before + mine), Cut(before, before + theirs))
    assert found.common == common


def test_prompts_that_one_begins_are_not_compared() -> None:
    one = np.array(tokens(1, 300))
    assert compare(one, one) is None and compare(one, one[:200]) is None


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 1000))
def test_a_common_run_has_a_common_anchor(before: int, other: int, seed: int) -> None:
    run = tokens(seed, 47)
    one = anchors(np.array([*tokens(seed + 1, before), *run, *tokens(seed + 2, 90)]))
    assert one & anchors(np.array([*tokens(seed + 3, other), *run, *tokens(seed + 4, 90)]))
    assert anchors(np.array([1, 2, 3])) == set()


def test_more_prompts_than_are_compared_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_pat.estimate.differences.MAX_PROMPTS", 4)
    (difference,) = find(requests_of(stamped()), decode)
    assert len(difference.cuts) == 12
