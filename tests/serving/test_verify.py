# SPDX-License-Identifier: Apache-2.0
"""Verify steps that pat runs on CPU servers which speculate (plugins/pat_verify.py): the answers of
a server that does not, and counters that say what was planned and packed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import Serve, Stock
from .server import Answer, Config, ServingServer, check_left, disagreements
from .workloads import PATIENT, WORKLOADS

DRAFT_TOKENS = 4
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(DRAFT_TOKENS))
RIDS = [f"long-{i}" for i in range(8)]
SHORT = sorted(WORKLOADS.keys() - {"patient"})  # whose long answers are compared below
LEAVERS_TOKENS = 4000  # more than are generated while the others answer


def speculating(fault: Path, breadth: int = 1) -> Config:
    """A server that drafts tokens from what it has seen: with a ``breadth`` of 1 mostly chains, but
    for continuations of several matches side by side, and for the tokens 0 that SGLang fills them
    up with. ``fault``: the file with the fault to commit."""
    env = (("PAT_TEETH_CPU", "pat_verify"), ("PAT_TEETH_FAULT", str(fault)))
    args = (*NGRAM, "--speculative-ngram-max-bfs-breadth", str(breadth))
    return Config(f"speculating-{breadth}", args=args, env=env, plugins=True)


def verify_steps(answers: list[Answer]) -> int:
    """Of all answers; each step gives a request one token and those drafts that it accepts."""
    return sum(answer.verify_steps for answer in answers)


@pytest.fixture
def server(serve: Serve, fault: Path) -> ServingServer:
    fault.write_text("")
    return serve(speculating(fault))


@pytest.mark.parametrize(
    ("breadth", "name"),
    # With 4 a draft token may have four successors, of which one is accepted.
    [*((4, name) for name in ("crowd", "multi_level", "ragged")), *((1, name) for name in SHORT)],
)
def test_answers_are_those_without_speculation(
    breadth: int, name: str, serve: Serve, fault: Path, stock: Stock
) -> None:
    """Cold and warm. What was answered before is drafted the next time, so that nearly all drafts
    are accepted."""
    fault.write_text("")
    server = serve(speculating(fault, breadth))
    cold, warm = server.ask(WORKLOADS[name]), server.ask(WORKLOADS[name])
    assert disagreements(cold + warm, stock[name] * 2) == []
    tokens = sum(len(answer.tokens) - 1 for answer in warm)
    assert 0 < verify_steps(warm) < 0.6 * tokens
    assert not server.counters().fallbacks


def test_aborted_requests_leave_the_others_alone(server: ServingServer, stock: Stock) -> None:
    """Also those whose clients go away."""
    with ThreadPoolExecutor() as pool:
        server.post("/flush_cache")  # and what was drafted, so that they take their time
        future = server.start_patient(pool, rid=RIDS)
        for index in (1, 4, 5):
            server.post("/abort_request", {"rid": RIDS[index]})
        for events in (1, 9):
            server.quit_after(PATIENT.prompts[0], events, new_tokens=LEAVERS_TOKENS)
        check_left(future.result(), stock["patient"], {1, 4, 5})
    assert not server.counters().fallbacks


def test_verify_steps_are_planned_and_packed(server: ServingServer, stock: Stock) -> None:
    """A plan has room for 128 tokens of each request, which are 32 steps at least."""
    server.post("/flush_cache")
    answers, counted = server.counted(server.ask, PATIENT)
    assert disagreements(answers, stock["patient"]) == []
    assert counted.verify_steps >= max(answer.verify_steps for answer in answers)
    assert counted.plans_made + counted.plans_reused == counted.verify_steps
    assert counted.plans_made < 0.2 * counted.verify_steps
    assert counted.packed_steps > 0.9 * counted.verify_steps
    assert counted.kv_tokens_read < 0.8 * counted.kv_tokens_unpacked
    assert set(counted.base_forwards) == {"extend"}  # there is no base that could verify
    assert not counted.fallbacks and not counted.base_layers


@pytest.mark.parametrize("name", ["sees_next", "misses_own"])
def test_a_mask_that_is_off_by_one_shows(
    name: str, server: ServingServer, fault: Path, stock: Stock
) -> None:
    for made in ("", name, ""):
        fault.write_text(made)
        assert (disagreements(server.ask(WORKLOADS["shared"]), stock["shared"]) != []) == bool(made)
