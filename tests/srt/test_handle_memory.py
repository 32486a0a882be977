# SPDX-License-Identifier: Apache-2.0
"""Which requests are looked at again, and that what is remembered is theirs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_pat import _C

SETTLE, RECHECK = 4, 64


class Request:
    """Holds a node; counts how often it is looked at. ``generation``: of its row."""

    def __init__(self, node: Any, row: int) -> None:
        self.node, self.row, self.tokens = node, row, 10 * row
        self.generation, self.looks = 1, 0

    @property
    def lock(self) -> Any:
        self.looks += 1
        return None if self.node is None else SimpleNamespace(node=self.node)


class Reader:
    """Reads a batch per decode step."""

    def __init__(self) -> None:
        self.native = _C.HandleReader(("lock.node", "tokens", "row"), SETTLE, RECHECK)
        self.step = 0

    def read(
        self, requests: Sequence[Any], steps: int = 1, *, anew: bool = False, counted: bool = True
    ) -> tuple[list[int], list[int]]:
        """The nodes, ``steps`` after the last call, and how often each request was looked at.
        ``counted``: rows have generations."""
        self.step += steps
        rows = np.array([request.row for request in requests], dtype=np.int64)
        generations = np.zeros(1 + max(rows, default=0), dtype=np.int64)
        generations[rows] = [request.generation for request in requests]
        count = len(generations) if counted else 0
        for request in requests:
            request.looks = 0
        at = generations.ctypes.data
        out = self.native.read(requests, rows.ctypes.data, at, count, self.step, anew)
        handles = np.frombuffer(out, dtype=np.int64).reshape(-1, 3)
        assert handles[:, 2].tolist() == rows.tolist()
        assert all(tokens == 10 * row for node, tokens, row in handles if node >= 0)
        return handles[:, 0].tolist(), [request.looks for request in requests]

    def settle(self, requests: Sequence[Any]) -> None:
        for _ in range(SETTLE + 1):
            self.read(requests)


def many(count: int) -> list[Request]:
    return [Request(100 + row, row) for row in range(count)]


def test_only_those_that_may_have_changed_are_looked_at() -> None:
    """One whose handle changes settles again, or that got its row anew, as after a pause, without
    having missed a step."""
    reader, reqs = Reader(), many(6)
    reqs[2].node = None
    nodes = [100, 101, -1, 103, 104, 105]
    for _ in range(SETTLE + 1):
        assert reader.read(reqs[:5]) == (nodes[:5], [1] * 5)
    assert reader.read(reqs[::-1]) == (nodes[::-1], [1, 0, 0, 0, 0, 0])
    assert reader.read(reqs[1:]) == (nodes[1:], [0, 0, 0, 0, 1])
    # The last has settled, the first was away.
    assert reader.read(reqs, steps=SETTLE) == (nodes, [1, 0, 0, 0, 0, 0])
    assert reader.read(reqs, counted=False) == (nodes, [1] * 6)
    reader.settle(reqs)
    reqs[5].node = 7
    assert reader.read(reqs) == (nodes, [0] * 6)
    nodes[5] = 7
    assert reader.read(reqs, anew=True) == (nodes, [1] * 6)
    for _ in range(SETTLE):
        assert reader.read(reqs) == (nodes, [0, 0, 0, 0, 0, 1])
    reqs[1].generation += 1
    reqs[1].node = nodes[1] = 8
    for _ in range(SETTLE + 1):
        assert reader.read(reqs) == (nodes, [0, 1, 0, 0, 0, 0])
    assert reader.read(reqs) == (nodes, [0] * 6)


def test_all_are_read_again_in_time_but_not_at_once() -> None:
    reader, reqs = Reader(), many(200)
    reader.settle(reqs)
    looks = np.array([reader.read(reqs)[1] for _ in range(RECHECK)])
    assert looks.sum(0).min() >= 1 and looks.sum(1).max() < 20
    assert reader.read(reqs, steps=RECHECK)[1] == [1] * len(reqs)


def test_another_request_in_the_row_is_read() -> None:
    """Also at a dead one's address. Requests are not kept alive. What cannot be remembered is read
    every time."""
    reader, addresses, one = Reader(), [], Request(1, 3)
    reader.settle([one])
    assert reader.read([Request(2, 3)])[0] == [2] and reader.read([one])[0] == [1]
    for node in range(20):
        request = Request(node, 3)
        addresses.append(id(request))
        assert reader.read([request])[0] == [node]
        reader.settle([request])
        alive = weakref.ref(request)
        del request
        assert alive() is None
    assert len(set(addresses)) < len(addresses)
    far = [Request(5, 1 << 20), Request(5, -1), SimpleNamespace(row=1, tokens=10, generation=1)]
    for node in range(SETTLE + 3):
        far[0].node = far[1].node = node
        far[2].lock = SimpleNamespace(node=node)
        assert reader.read(far)[0] == [node] * 3


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_leaves_nothing_wrong_behind(bad: int) -> None:
    reader, reqs = Reader(), many(3)
    reader.read(reqs)
    good = list(reqs)
    reqs[bad] = Request("no node", bad)
    for node in range(SETTLE + 1):
        for request in good:
            request.node = node
        with pytest.raises(TypeError, match=r"lock\.node is not an integer"):
            reader.read(reqs)
    assert reader.read(good)[0] == [SETTLE] * 3
