# SPDX-License-Identifier: Apache-2.0
"""A CPU server that speculates gives the answers of one that does not: SGLang's NGRAM worker on the
test's torch operations, with a reference for the attention of the verify step. What pat verifies is
compared in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import speculation
from .compare import disagreements
from .conftest import Serve
from .server import ServingServer
from .workloads import WORKLOADS


@pytest.fixture
def server(serve: Serve, mask: Path) -> ServingServer:
    mask.write_text("")
    return serve(speculation.speculating("torch_verify", mask))


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_answers_are_those_without_speculation(
    workload: str, server: ServingServer, stock: speculation.Stock
) -> None:
    speculation.check_answers(server, workload, stock)


def test_requests_join_while_others_are_decoded(
    server: ServingServer, stock: speculation.Stock
) -> None:
    speculation.check_requests_that_join(server, stock)


def test_aborted_requests_leave_the_others_alone(
    server: ServingServer, stock: speculation.Stock
) -> None:
    speculation.check_aborts(server, stock)


def test_flushing_forgets_drafts(server: ServingServer, stock: speculation.Stock) -> None:
    speculation.check_flush(server, stock)


@pytest.mark.parametrize("mistake", ["sees_next", "misses_own"])
def test_a_mask_that_is_off_by_one_shows(
    mistake: str, server: ServingServer, mask: Path, stock: speculation.Stock
) -> None:
    for made in ("", mistake, ""):
        mask.write_text(made)
        answers = speculation.ask(server, "shared")
        assert (disagreements(answers, stock["shared"]) != []) == bool(made)


def test_a_mask_for_chains_is_wrong_at_most_where_token_0_is_generated(
    server: ServingServer, mask: Path, stock: speculation.Stock
) -> None:
    """Tokens 0 that SGLang fills up drafts with are no part of the chain: once such a token is
    accepted, a backend that knows no mask, such as FA3 and pat, has computed what follows from
    the wrong tokens."""
    mask.write_text("chain")
    for name in ("crowd", "ragged"):
        pairs = zip(speculation.ask(server, name), stock[name], strict=True)
        answers = [pair for pair in pairs if 0 not in pair[1].tokens]
        assert 4 < len(answers) < len(stock[name])
        assert disagreements(*map(list, zip(*answers, strict=True))) == []
