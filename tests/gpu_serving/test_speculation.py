# SPDX-License-Identifier: Apache-2.0
"""Verify steps of speculative decoding: pat gives the answers that fa3 gives, as often as fa3 does
with and without drafts, accepts as many drafts, and packs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

import pytest
import torch
from serving.server import Answer

from .agreement import LOADS, accepted, answers, apart, equal_share
from .fleet import Fleet

PLAIN = ("shared", "multi_level", "disjoint", "samples")
# Tokens that a verify step gives a request: where drafts are right, where they are wrong.
RIGHT, WRONG, ANY = (1.2, 9.0), (0.0, 1.5), (0.0, 9.0)


@dataclass(frozen=True)
class Row:
    """``plain``: the servers of fa3 and of pat without drafts; ``peer``: that of fa3 with the same
    drafts, if any; ``tokens``: least and most that a step may give a request; ``packs``: whether
    plans share."""

    ours: str
    tokens: tuple[float, float]
    peer: str = ""
    plain: tuple[str, str] = ("ratio4-fa3", "ratio4-pat")
    loads: tuple[str, ...] = PLAIN
    packs: bool = True

    @property
    def servers(self) -> tuple[str, ...]:
        return (self.ours, *self.plain, *([self.peer] if self.peer else []))

    def __str__(self) -> str:
        return self.ours


FIRST = Row("ratio4-pat-right", RIGHT, "ratio4-fa3-right")
ROWS = [
    FIRST,
    replace(FIRST, ours="ratio4-pat-no_overlap"),
    Row("ratio4-pat-right_trees", RIGHT, "ratio4-fa3-right_trees"),
    *(Row(f"ratio4-pat-{how}", WRONG) for how in ("wrong", "eagle", "eagle_trees", "eagle3")),
    Row("ratio4-pat-ngram", ANY, "ratio4-fa3-ngram"),
    Row("ratio4-pat-ngram_trees", ANY),
    # Eight heads a KV head and eight draft tokens: 64 packed rows a request, the most that pat
    # takes. Plans give each request row tiles of its own, so that nothing is packed.
    Row("ratio8-pat-ngram8", ANY, plain=("ratio8-fa3", "ratio8-pat"), packs=False),
    # Of latents (MLA) 32 packed rows a request, the most that pat takes. Prefixes of some hundred
    # tokens are not worth packing then.
    *(
        Row(
            *(f"latents8-pat-{how}", RIGHT, f"latents8-fa3-{how}"),
            plain=("latents8-fa3", "latents8-pat"),
            loads=("turn", "disjoint"),
        )
        for how in ("latents", "latents_trees")
    ),
    # A layer of a model of linear attention drafts, and where drafts are refused the states go back
    # to the last token that was accepted.
    Row("mtp-pat-nextn", ANY, "mtp-fa3-nextn", ("mtp-fa3", "mtp-fa3"), ("turn", "disjoint")),
]
if torch.cuda.device_count() > 1:
    two = ("qwen3-fa3-tp2", "qwen3-pat-tp2")
    ROWS.append(Row("qwen3-pat-tp2_right", RIGHT, plain=two, loads=("multi_level", "disjoint")))


@dataclass(frozen=True)
class Twice:
    """Answers to the same prompts: cold, and when prompts are cached and NGRAM drafts them."""

    cold: list[Answer]
    warm: list[Answer]

    def repeated(self) -> list[Answer]:
        """The warm answers that equal the cold ones. NGRAM drafts what was answered before: where
        a near-tie falls otherwise in the warm batch, the drafts behind it are wrong."""
        pairs = zip(self.cold, self.warm, strict=True)
        return [warm for cold, warm in pairs if warm.tokens == cold.tokens]


AnswersOf = Callable[[str, Sequence[str]], Twice]


@pytest.fixture(scope="session")
def answers_of(server: Fleet) -> AnswersOf:
    """A server's answers to some loads, asked once for all tests."""
    known: dict[tuple[str, Sequence[str]], Twice] = {}

    def ask(name: str, loads: Sequence[str]) -> list[Answer]:
        return [answer for load in loads for answer in answers(server(name), LOADS[load])]

    def find(name: str, loads: Sequence[str]) -> Twice:
        if (name, loads) not in known:
            known[name, loads] = Twice(ask(name, loads), ask(name, loads))
        return known[name, loads]

    return find


def check_shares(
    loads: Sequence[str], ours: list[Answer], ours_plain: list[Answer], plain: list[Answer]
) -> None:
    """Answers are as often ``plain``'s as those without drafts, but for three standard errors: a
    near-tie halves a text here or there. Copies of a prompt are no further draws."""
    prompts = [p for load in loads for p in LOADS[load].prompts for _ in range(LOADS[load].samples)]
    less: dict[tuple[int, ...], list[float]] = {}
    for prompt, one, other, wanted in zip(prompts, ours, ours_plain, plain, strict=True):
        lost = equal_share([other], [wanted]) - equal_share([one], [wanted])
        less.setdefault(prompt, []).append(lost)
    means = [fmean(each) for each in less.values()]
    error = stdev(means) / sqrt(len(means))
    assert fmean(means) <= 3 * error


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_answers(row: Row, server: Fleet, answers_of: AnswersOf) -> None:
    """With drafts as near to fa3's without as pat's without; as near to fa3's with drafts as these
    are to fa3's without, where states are verified: SGLang then takes the steps of linear attention
    in another order, with any backend."""
    one = server(row.ours)
    asked, counted = one.counted(answers_of, row.ours, row.loads)
    ours = asked.warm
    plain, ours_plain = (answers_of(name, row.loads).warm for name in row.plain)
    of_peer = answers_of(row.peer, row.loads) if row.peer else Twice([], [])
    theirs = of_peer.warm
    if row.ours.startswith("mtp"):
        distance, limit = apart(ours, theirs), apart(theirs, plain)
    else:
        distance, limit = apart(ours, plain), apart(ours_plain, plain)
        check_shares(row.loads, ours, ours_plain, plain)
    least, most = row.tokens
    assert distance.about_as_small_as(limit)
    assert least < accepted(ours) < most
    # A draft token that saw a wrong one, or not all of those before it, would be refused.
    if "ngram" in row.ours:
        ours, theirs, slack = asked.repeated(), of_peer.repeated(), 0.5
    else:
        slack = 0.1
    print(f"{row}: {accepted(ours):.2f} tokens a step, {accepted(theirs):.2f} of the peer's")
    assert not theirs or accepted(ours) > accepted(theirs) - slack
    assert counted.verify_steps > 0 and (counted.packed_steps > 0) == row.packs
    assert not counted.fallbacks and not counted.base_layers
    assert "serves all" in one.text() and "serves nothing" not in one.text()


@pytest.mark.parametrize("row", [FIRST, Row("ratio4-pat-right_pages64", RIGHT)], ids=str)
def test_plans_outlive_verify_steps(row: Row, server: Fleet) -> None:
    """A plan holds for 64 tokens of each request at least: with overlap by bounds of the lengths,
    which slots in pages of 64 do not widen."""
    one, load = server(row.ours), LOADS["shared"]
    one.generate(load.prompts, 4)
    texts, counted = one.counted(one.generate, load.prompts, 400)
    steps = counted.verify_steps + counted.base_forwards.get("small_batch", 0)
    assert steps >= max(text.verify_steps for text in texts) > 90
    assert counted.plans_made < 0.25 * counted.verify_steps
    assert 0 < counted.kv_tokens_read < counted.kv_tokens_unpacked
    assert not counted.fallbacks


@pytest.mark.parametrize("row", [FIRST], ids=str)
def test_requests_that_come_and_go(row: Row, server: Fleet, answers_of: AnswersOf) -> None:
    """Long and short requests side by side, some of them aborted: the answers stay what they were,
    and nothing falls back."""
    one = server(row.ours)
    plain, ours_plain = (answers_of(name, row.loads).warm for name in row.plain)
    before = one.counters()
    rids = [f"abort-{i}" for i in range(4)]
    with ThreadPoolExecutor() as pool:
        prompts = LOADS["disjoint"].prompts[:4]
        aborted = pool.submit(one.generate, prompts, 2000, rid=rids)
        texts = [answer for load in row.loads * 2 for answer in answers(one, LOADS[load])]
        for rid in rids:
            one.post("/abort_request", {"rid": rid})
        aborted.result()
    for half in (texts[: len(plain)], texts[len(plain) :]):
        check_shares(row.loads, half, ours_plain, plain)
    assert not (one.counters() - before).fallbacks
