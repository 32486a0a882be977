# SPDX-License-Identifier: Apache-2.0
"""Verify steps that pat runs: the answers of a server that does not speculate, which are those of
the reference too (test_verify.py), and counters that say what was planned and packed."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import speculation
from .compare import disagreements
from .conftest import Serve
from .server import ServingServer
from .workloads import WORKLOADS, random_prompt


@pytest.fixture
def server(serve: Serve, mask: Path) -> ServingServer:
    mask.write_text("")
    return serve(speculation.speculating("pat", mask))


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_answers_are_those_without_speculation(
    workload: str, server: ServingServer, stock: speculation.Stock
) -> None:
    speculation.check_answers(server, workload, stock)


@pytest.mark.parametrize("workload", ["crowd", "multi_level", "ragged"])
def test_trees_are_verified(
    workload: str, serve: Serve, mask: Path, stock: speculation.Stock
) -> None:
    """With a breadth of 4 a draft token may have four successors, of which one is accepted."""
    mask.write_text("")
    server = serve(speculation.speculating("pat", mask, breadth=4))
    speculation.check_answers(server, workload, stock)
    assert not server.counters().fallbacks


def test_requests_join_while_others_are_decoded(
    server: ServingServer, stock: speculation.Stock
) -> None:
    speculation.check_requests_that_join(server, stock)
    assert not server.counters().fallbacks


def test_aborted_requests_leave_the_others_alone(
    server: ServingServer, stock: speculation.Stock
) -> None:
    speculation.check_aborts(server, stock)
    assert not server.counters().fallbacks


def test_flushing_forgets_drafts(server: ServingServer, stock: speculation.Stock) -> None:
    speculation.check_flush(server, stock)


def test_verify_steps_are_planned_and_packed(server: ServingServer) -> None:
    speculation.ask(server, "multi_level")  # its prefixes are in the cache, its answers drafted
    before = server.counters()
    answers = speculation.ask(server, "multi_level")
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
    answers = speculation.ask(server, "patient")
    counted = server.counters() - before
    assert counted.verify_steps >= max(answer.verify_steps for answer in answers)
    assert counted.plans_made < 0.2 * counted.verify_steps
    assert not counted.fallbacks


@pytest.mark.parametrize("mistake", ["sees_next", "misses_own"])
def test_a_mask_that_is_off_by_one_shows(
    mistake: str, server: ServingServer, mask: Path, stock: speculation.Stock
) -> None:
    for made in ("", mistake, ""):
        mask.write_text(made)
        answers = speculation.ask(server, "shared")
        assert (disagreements(answers, stock["shared"]) != []) == bool(made)
