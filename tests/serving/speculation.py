# SPDX-License-Identifier: Apache-2.0
"""Servers that speculate on a CPU (plugins/pat_verify.py), and what must hold for each of them."""

from __future__ import annotations

import urllib.error
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from .compare import disagreements
from .patient import PATIENT, start_patient
from .quitters import quit_after
from .server import Answer, Config, ServingServer
from .workloads import WORKLOADS

Stock = dict[str, list[Answer]]

DRAFT_TOKENS = 4
_NGRAM = (
    *("--speculative-algorithm", "NGRAM"),
    *("--speculative-num-draft-tokens", str(DRAFT_TOKENS)),
)
LEAVERS_TOKENS = 4000  # more than are generated while the others answer


def speculating(backend: str, mask: Path, breadth: int = 1) -> Config:
    """A server that drafts tokens from what it has seen: with a ``breadth`` of 1 mostly chains, but
    for continuations of several matches side by side, and for the tokens 0 that SGLang fills them
    up with. ``mask``: the file that holds the mistake to make in the mask of a verify step."""
    env = (("PAT_VERIFY", "1"), ("PAT_VERIFY_MASK", str(mask)))
    args = (*_NGRAM, "--speculative-ngram-max-bfs-breadth", str(breadth))
    name = f"speculating-{backend}-{breadth}"
    return Config(name, backend=backend, args=args, env=env, plugins=True)


def ask(server: ServingServer, name: str) -> list[Answer]:
    """A workload's answers."""
    work = WORKLOADS[name]
    return server.generate(work.prompts, work.new_tokens, ignore_eos=work.ignore_eos)


def verify_steps(answers: list[Answer]) -> int:
    """Of all answers; each step gives a request one token and those drafts that it accepts."""
    return sum(answer.verify_steps for answer in answers)


def check_answers(server: ServingServer, name: str, stock: Stock) -> None:
    """A workload's answers, cold and warm, are those without speculation. What was answered before
    is drafted the next time, so that nearly all drafts are accepted."""
    assert disagreements(ask(server, name), stock[name]) == []
    warm = ask(server, name)
    assert disagreements(warm, stock[name]) == []
    tokens = sum(len(answer.tokens) - 1 for answer in warm)
    assert 0 < verify_steps(warm) < 0.6 * tokens


def check_requests_that_join(server: ServingServer, stock: Stock) -> None:
    """Short answers are asked for while long ones come, three times."""
    with ThreadPoolExecutor() as pool:
        long = start_undrafted(pool, server, [f"join-{i}" for i in range(8)])
        for name in ("ragged", "identical", "disjoint"):
            assert disagreements(ask(server, name), stock[name]) == []
        assert disagreements(long.result(), stock["patient"]) == []


def check_aborts(server: ServingServer, stock: Stock) -> None:
    """Requests that are aborted while they are decoded, or whose clients go away, leave the other
    answers as they are."""
    rids = [f"abort-{i}" for i in range(8)]
    with ThreadPoolExecutor() as pool:
        future = start_undrafted(pool, server, rids)
        for index in (1, 4, 5):
            server.post("/abort_request", {"rid": rids[index]})
        for events in (1, 9):
            quit_after(server, PATIENT.prompts[0], events, new_tokens=LEAVERS_TOKENS)
        answers = future.result()
    for answer, expected in zip(answers, stock["patient"], strict=True):
        if answer.finish_reason == "abort":
            assert answer.tokens == expected.tokens[: len(answer.tokens)]
        else:
            assert disagreements([answer], [expected]) == []
    assert [i for i, answer in enumerate(answers) if answer.finish_reason == "abort"] == [1, 4, 5]


def check_flush(server: ServingServer, stock: Stock) -> None:
    """The cache is flushed, and the drafts with it, once no request runs."""
    with ThreadPoolExecutor() as pool:
        future = start_undrafted(pool, server, [f"flush-{i}" for i in range(8)])
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.post("/flush_cache")
        assert disagreements(future.result(), stock["patient"]) == []
    server.post("/flush_cache")
    cold = ask(server, "multi_level")
    assert min(answer.cached_tokens for answer in cold) == 0
    assert disagreements(cold, stock["multi_level"]) == []
    warm = ask(server, "multi_level")
    assert verify_steps(warm) < verify_steps(cold)


def start_undrafted(
    pool: ThreadPoolExecutor, server: ServingServer, rids: list[str]
) -> Future[list[Answer]]:
    """Forget what was drafted, so that the long answers take their time, and start them."""
    server.post("/flush_cache")
    return start_patient(pool, server, rids=rids)
