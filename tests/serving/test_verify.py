# SPDX-License-Identifier: Apache-2.0
"""Verify steps that pat runs on CPU servers which speculate (plugins/pat_verify.py): the answers of
a server that does not, and counters that say what was planned and packed."""

from __future__ import annotations

import urllib.error
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from .compare import disagreements
from .conftest import Serve
from .patient import PATIENT, start_patient
from .quitters import quit_after
from .server import Answer, Config, ServingServer
from .workloads import WORKLOADS, random_prompt

Stock = dict[str, list[Answer]]

DRAFT_TOKENS = 4
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(DRAFT_TOKENS))
LEAVERS_TOKENS = 4000  # more than are generated while the others answer


def speculating(mask: Path, breadth: int = 1) -> Config:
    """A server that drafts tokens from what it has seen: with a ``breadth`` of 1 mostly chains, but
    for continuations of several matches side by side, and for the tokens 0 that SGLang fills them
    up with. ``mask``: the file that holds the mistake to make in the mask of a verify step."""
    env = (("PAT_VERIFY", "1"), ("PAT_VERIFY_MASK", str(mask)))
    args = (*NGRAM, "--speculative-ngram-max-bfs-breadth", str(breadth))
    return Config(f"speculating-{breadth}", args=args, env=env, plugins=True)


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
    assert not server.counters().fallbacks


def start_undrafted(
    pool: ThreadPoolExecutor, server: ServingServer, rids: list[str]
) -> Future[list[Answer]]:
    """Forget what was drafted, so that the long answers take their time, and start them."""
    server.post("/flush_cache")
    return start_patient(pool, server, rids=rids)


@pytest.fixture
def server(serve: Serve, mask: Path) -> ServingServer:
    mask.write_text("")
    return serve(speculating(mask))


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_answers_are_those_without_speculation(
    workload: str, server: ServingServer, stock: Stock
) -> None:
    check_answers(server, workload, stock)


def test_requests_join_while_others_are_decoded(server: ServingServer, stock: Stock) -> None:
    """Short answers are asked for while long ones come, three times."""
    with ThreadPoolExecutor() as pool:
        long = start_undrafted(pool, server, [f"join-{i}" for i in range(8)])
        for name in ("ragged", "identical", "disjoint"):
            assert disagreements(ask(server, name), stock[name]) == []
        assert disagreements(long.result(), stock["patient"]) == []
    assert not server.counters().fallbacks


def test_aborted_requests_leave_the_others_alone(server: ServingServer, stock: Stock) -> None:
    """Also those whose clients go away."""
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
    assert not server.counters().fallbacks


def test_flushing_forgets_drafts(server: ServingServer, stock: Stock) -> None:
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


def test_verify_steps_are_planned_and_packed(server: ServingServer) -> None:
    ask(server, "multi_level")  # its prefixes are in the cache, its answers drafted
    before = server.counters()
    answers = ask(server, "multi_level")
    counted = server.counters() - before
    steps = [answer.verify_steps for answer in answers]
    assert max(steps) <= counted.verify_steps <= sum(steps)
    assert counted.plans_made + counted.plans_reused == counted.verify_steps
    assert counted.packed_steps >= counted.verify_steps - 2  # requests may come one by one
    assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
    assert not counted.fallbacks and not counted.base_layers


def test_a_single_request_is_verified_by_pat(server: ServingServer) -> None:
    """There is no base that could, so it does not matter how few requests a step has."""
    before = server.counters()
    (answer,) = server.generate([random_prompt(seed=110, length=50)], 20)
    counted = server.counters() - before
    assert counted.verify_steps == answer.verify_steps > 0
    assert counted.packed_steps == 0 and not counted.fallbacks
    assert set(counted.base_forwards) == {"extend"}


def test_plans_outlive_verify_steps(server: ServingServer) -> None:
    """A plan has room for 128 tokens of each request, which are 32 steps at least."""
    server.post("/flush_cache")
    before = server.counters()
    answers = ask(server, "patient")
    counted = server.counters() - before
    assert counted.verify_steps >= max(answer.verify_steps for answer in answers)
    assert counted.plans_made < 0.2 * counted.verify_steps
    assert not counted.fallbacks


@pytest.mark.parametrize("mistake", ["sees_next", "misses_own"])
def test_a_mask_that_is_off_by_one_shows(
    mistake: str, server: ServingServer, mask: Path, stock: Stock
) -> None:
    for made in ("", mistake, ""):
        mask.write_text(made)
        assert (disagreements(ask(server, "shared"), stock["shared"]) != []) == bool(made)


@pytest.mark.parametrize("workload", ["crowd", "multi_level", "ragged"])
def test_trees_are_verified(workload: str, serve: Serve, mask: Path, stock: Stock) -> None:
    """With a breadth of 4 a draft token may have four successors, of which one is accepted."""
    mask.write_text("")
    check_answers(serve(speculating(mask, breadth=4)), workload, stock)
