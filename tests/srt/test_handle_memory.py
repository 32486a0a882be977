# SPDX-License-Identifier: Apache-2.0
"""Which requests are looked at again, and that what is remembered is theirs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sglang_pat import _C

SETTLE, RECHECK = 4, 64


class Lock:
    def __init__(self, node: Any) -> None:
        self.node = node


class Request:
    """Counts how often it is looked at."""

    def __init__(self, node: Any, row: int) -> None:
        self.held: Lock | None = Lock(node)
        self.tokens, self.row = 10 * row, row
        self.generation = 1  # of the row
        self.looks = 0

    @property
    def lock(self) -> Lock | None:
        self.looks += 1
        return self.held


class Reader:
    """Reads a batch per decode step; only what it asks for is looked at."""

    def __init__(self) -> None:
        self.native = _C.HandleReader(("lock.node", "tokens", "row"), SETTLE, RECHECK)
        self.step = 0

    def read(
        self, requests: Sequence[Any], steps: int = 1, *, anew: bool = False, counted: bool = True
    ) -> list[int]:
        """The nodes, ``steps`` after the last call. ``counted``: rows have generations."""
        self.step += steps
        rows = np.array([request.row for request in requests], dtype=np.int64)
        generations = np.zeros(1 + max(rows, default=0), dtype=np.int64)
        generations[rows] = [request.generation for request in requests]
        count = len(generations) if counted else 0
        at = generations.ctypes.data
        out = self.native.read(requests, rows.ctypes.data, at, count, self.step, anew)
        handles = np.frombuffer(out, dtype=np.int64).reshape(-1, 3)
        assert handles[:, 2].tolist() == rows.tolist()
        assert all(h[1] == 10 * h[2] for h in handles if h[0] >= 0)
        return handles[:, 0].tolist()

    def settle(self, requests: Sequence[Any]) -> None:
        for _ in range(SETTLE + 1):
            self.read(requests)


def looks(requests: Sequence[Any]) -> list[int]:
    """How often each was looked at since the last time."""
    counts = [request.looks for request in requests]
    for request in requests:
        request.looks = 0
    return counts


def many(count: int) -> list[Request]:
    return [Request(100 + row, row) for row in range(count)]


def test_only_those_that_may_have_changed_are_looked_at() -> None:
    reader, reqs = Reader(), many(6)
    reqs[2].held = None
    nodes = [100, 101, -1, 103, 104, 105]
    for _ in range(SETTLE + 1):
        assert reader.read(reqs[:5]) == nodes[:5]
        assert looks(reqs) == [1, 1, 1, 1, 1, 0]
    assert reader.read(reqs[::-1]) == nodes[::-1]
    assert looks(reqs) == [0, 0, 0, 0, 0, 1]
    assert reader.read(reqs[1:]) == nodes[1:]
    assert looks(reqs) == [0, 0, 0, 0, 0, 1]
    assert reader.read(reqs, steps=SETTLE) == nodes
    assert looks(reqs) == [1, 0, 0, 0, 0, 0], "the last has settled, the first was away"
    assert reader.read(reqs, anew=True) == nodes
    assert looks(reqs) == [1] * 6


def test_a_handle_that_changes_settles_again() -> None:
    reader, reqs = Reader(), many(1)
    reader.settle(reqs)
    reqs[0].held = Lock(7)
    assert reader.read(reqs) == [100], "not looked at"
    assert reader.read(reqs, anew=True) == [7]
    looks(reqs)
    reader.settle(reqs)
    assert looks(reqs) == [SETTLE]
    assert reader.read(reqs) == [7] and looks(reqs) == [0]


def test_all_are_read_again_in_time_but_not_at_once() -> None:
    reader, reqs = Reader(), many(200)
    reader.settle(reqs)
    looks(reqs)
    peak, total = 0, np.zeros(len(reqs), dtype=np.int64)
    for _ in range(RECHECK):
        reader.read(reqs)
        counts = looks(reqs)
        peak, total = max(peak, sum(counts)), total + counts
    assert total.min() >= 1 and total.max() <= 3
    assert 0 < peak < 20
    reader.read(reqs, steps=RECHECK)
    assert looks(reqs) == [1] * len(reqs)


def test_a_request_that_gets_its_row_anew_settles_again() -> None:
    """As after a pause, without having missed a step."""
    reader, reqs = Reader(), many(3)
    reader.settle(reqs)
    looks(reqs)
    reqs[1].generation += 1
    reqs[1].held = Lock(7)
    for _ in range(SETTLE + 1):
        assert reader.read(reqs) == [100, 7, 102]
    assert looks(reqs) == [0, SETTLE + 1, 0]
    assert reader.read(reqs) == [100, 7, 102] and looks(reqs) == [0, 0, 0]


def test_without_generations_all_are_read() -> None:
    reader, reqs = Reader(), many(3)
    reader.settle(reqs)
    looks(reqs)
    assert reader.read(reqs, counted=False) == [100, 101, 102] and looks(reqs) == [1] * 3


def test_another_request_in_the_row_is_read() -> None:
    """Also at a dead one's address. Requests are not kept alive."""
    reader, addresses, one = Reader(), [], Request(1, 3)
    reader.settle([one])
    assert reader.read([Request(2, 3)]) == [2] and reader.read([one]) == [1]
    for node in range(20):
        request = Request(node, 3)
        addresses.append(id(request))
        assert reader.read([request]) == [node]
        reader.settle([request])
        alive = weakref.ref(request)
        del request
        assert alive() is None
    assert len(set(addresses)) < len(addresses)


def test_what_cannot_be_remembered_is_read_every_time() -> None:
    class NoReference:
        __slots__ = ("generation", "lock", "row", "tokens")

    bare: Any = NoReference()
    bare.row, bare.tokens, bare.generation = 1, 10, 1
    far: list[Any] = [bare, Request(5, 1 << 20), Request(5, -1)]
    reader = Reader()
    for node in range(SETTLE + 3):
        bare.lock = far[1].held = far[2].held = Lock(node)
        assert reader.read(far) == [node] * 3


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_leaves_nothing_wrong_behind(bad: int) -> None:
    reader, reqs = Reader(), many(3)
    reader.read(reqs)
    wrong, good = Request("no node", bad), list(reqs)
    reqs[bad] = wrong
    for node in range(SETTLE + 1):
        for request in good:
            request.held = Lock(node)
        with pytest.raises(TypeError, match=r"lock\.node is not an integer"):
            reader.read(reqs)
    assert reader.read(good) == [SETTLE] * 3
