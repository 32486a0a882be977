# SPDX-License-Identifier: Apache-2.0
"""Verify steps that pat runs on CPU servers which speculate (plugins/pat_verify.py): the answers of
a server that does not, and counters that say what was planned and packed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import sglang_pat
from sglang_pat.dump import read_dump

from .conftest import Serve, Stock
from .server import Answer, Config, ServingServer, check_left, disagreements
from .workloads import PATIENT, WORKLOADS, random_prompt

DRAFT_TOKENS = 4
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(DRAFT_TOKENS))
RIDS = [f"long-{i}" for i in range(8)]
SHORT = sorted(WORKLOADS.keys() - {"patient"})  # whose long answers are compared below
LEAVERS_TOKENS = 4000  # more than are generated while the others answer


def dump_beside(fault: Path, breadth: int) -> Path:
    return fault.with_name(f"dump-{breadth}.jsonl")


def speculating(fault: Path, breadth: int = 1) -> Config:
    """A server that drafts tokens from what it has seen: with a ``breadth`` of 1 mostly chains, but
    for continuations of several matches side by side, and for the tokens 0 that SGLang fills them
    up with. ``fault``: the file with the fault to commit, beside which it dumps batches."""
    env = (("PAT_TEETH_CPU", "pat_verify"), ("PAT_TEETH_FAULT", str(fault)))
    env += (("SGLANG_PAT_DUMP", str(dump_beside(fault, breadth))),)
    args = (*NGRAM, "--speculative-ngram-max-bfs-breadth", str(breadth))
    return Config(f"speculating-{breadth}", args=args, env=env, plugins=True)


def verify_steps(answers: list[Answer]) -> int:
    """Of all answers; each step gives a request one token and those drafts that it accepts."""
    return sum(answer.verify_steps for answer in answers)


def start_undrafted(pool: ThreadPoolExecutor, server: ServingServer) -> Future[list[Answer]]:
    """Forget what was drafted, so that the long answers take their time, and start them."""
    server.post("/flush_cache")
    return server.start_patient(pool, rid=RIDS)


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


def test_requests_join_while_others_are_decoded(server: ServingServer, stock: Stock) -> None:
    """Short answers are asked for while long ones come, three times."""
    with ThreadPoolExecutor() as pool:
        long = start_undrafted(pool, server)
        for name in ("ragged", "identical", "disjoint"):
            assert disagreements(server.ask(WORKLOADS[name]), stock[name]) == []
        assert disagreements(long.result(), stock["patient"]) == []
    assert not server.counters().fallbacks


def test_aborted_requests_leave_the_others_alone(server: ServingServer, stock: Stock) -> None:
    """Also those whose clients go away."""
    with ThreadPoolExecutor() as pool:
        future = start_undrafted(pool, server)
        for index in (1, 4, 5):
            server.post("/abort_request", {"rid": RIDS[index]})
        for events in (1, 9):
            server.quit_after(PATIENT.prompts[0], events, new_tokens=LEAVERS_TOKENS)
        check_left(future.result(), stock["patient"], {1, 4, 5})
    assert not server.counters().fallbacks


def test_verify_steps_are_planned_and_packed(server: ServingServer) -> None:
    server.ask(WORKLOADS["multi_level"])  # its prefixes are in the cache, its answers drafted
    answers, counted = server.counted(server.ask, WORKLOADS["multi_level"])
    steps = [answer.verify_steps for answer in answers]
    assert max(steps) <= counted.verify_steps <= sum(steps)
    assert counted.plans_made + counted.plans_reused == counted.verify_steps
    assert counted.packed_steps >= counted.verify_steps - 2  # requests may come one by one
    assert counted.kv_tokens_read < 0.6 * counted.kv_tokens_unpacked
    assert not counted.fallbacks and not counted.base_layers


def test_a_single_request_is_verified_by_pat(server: ServingServer) -> None:
    """There is no base that could, so it does not matter how few requests a step has."""
    prompts = [random_prompt(seed=110, length=50)]
    (answer,), counted = server.counted(server.generate, prompts, 20)
    assert counted.verify_steps == answer.verify_steps > 0
    assert counted.packed_steps == 0 and not counted.fallbacks
    assert set(counted.base_forwards) == {"extend"}


def test_plans_outlive_verify_steps(server: ServingServer, stock: Stock) -> None:
    """A plan has room for 128 tokens of each request, which are 32 steps at least."""
    server.post("/flush_cache")
    answers, counted = server.counted(server.ask, PATIENT)
    assert disagreements(answers, stock["patient"]) == []
    assert counted.verify_steps >= max(answer.verify_steps for answer in answers)
    assert counted.plans_made < 0.2 * counted.verify_steps
    assert not counted.fallbacks


@pytest.mark.parametrize("name", ["sees_next", "misses_own"])
def test_a_mask_that_is_off_by_one_shows(
    name: str, server: ServingServer, fault: Path, stock: Stock
) -> None:
    for made in ("", name, ""):
        fault.write_text(made)
        assert (disagreements(server.ask(WORKLOADS["shared"]), stock["shared"]) != []) == bool(made)


def test_verify_steps_are_dumped_with_their_draft_tokens(
    server: ServingServer, fault: Path
) -> None:
    """The planner makes of each batch the plan that the server had."""
    file = dump_beside(fault, breadth=1)
    server.ask(WORKLOADS["ragged"])
    dump = read_dump(file)
    assert len(dump.batches) > 2
    assert dump.header["draft_tokens"] == dump.target.draft_tokens == DRAFT_TOKENS
    assert any(batch.plan["shared_items"] for batch in dump.batches)
    for batch in dump.batches:
        plan = sglang_pat.plan(batch.paths, batch.seq_lens, dump.target)
        read = plan.kv_tokens_read(sum(batch.seq_lens))
        found = (plan.num_items, plan.num_shared_items, read)
        assert found == tuple(batch.plan.values())
        for path, length in zip(batch.paths, batch.seq_lens, strict=True):
            assert not path or path[-1][2] <= length - DRAFT_TOKENS
