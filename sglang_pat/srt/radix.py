# SPDX-License-Identifier: Apache-2.0
"""The radix view: for each request the path of radix nodes that its K/V slots stand under.

The only reader of SGLang's caches. It reads paths and hands them on; ``step`` gives them to the
planner. Sharing is what the live tree says: two requests under one node
were given the same slots for it, so neither token ids nor slot ids are compared. Per request the
handle is ``req.lock.node``, the node pinned for it, and the part that is safe to share is
``req.kv.cache_protected_len`` tokens: up to there SGLang guarantees that the request's row of
``req_to_token`` repeats the tree's slots. A request without a lock (one just released) has no path.

A turn of a streaming session has no lock of its own. It runs on the row and the ``kv`` record of
the session's slot, which holds the lock of the first turn's prompt. That turn put the prompt into
the tree like any request, and later turns write behind it only, so the row still repeats the tree's
slots for the record's ``cache_protected_len`` tokens; what later turns add is the session's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat import _C
from sglang_pat.sharing import NO_LOCK, NOT_CACHED, RADIX_CACHE_DISABLED
from sglang_pat.srt.interface import path_fields
from sglang_pat.srt.paths import remember
from sglang_pat.srt.upstream import path_query

# A request that has been in the batch unchanged for more than SETTLE_STEPS decode steps is not read
# again, for RECHECK_STEPS at most: see csrc/srt/handle_memory.h.
SETTLE_STEPS = 2
RECHECK_STEPS = 64
NO_NODE = -1  # read in place of a node handle when the request holds no lock
# Id, parent and key of a node in SGLang's caches of Python nodes.
_NODE_ATTRS = ("id", "parent", "key")


# What a request is known by: the node it holds or NO_NODE, its tokens that are safe to share, and
# its row of req_to_token.
HANDLE = np.dtype([("node", np.int64), ("tokens", np.int64), ("table_row", np.int64)])
_NO_HANDLE = np.array((NO_NODE, 0, 0), dtype=HANDLE)


class Handles(NamedTuple):
    """What a plan depends on, of one batch. Equal handles mean equal sharing.

    ``num_queries``: of the batch, those without a request included. ``packed``: a ``HANDLE`` of
    each request, as bytes, because they are compared at every step; ``table`` gives them names.
    """

    num_queries: int
    packed: bytes

    @property
    def table(self) -> npt.NDArray[Any]:
        """[requests] of ``HANDLE``, read-only."""
        return np.frombuffer(self.packed, dtype=HANDLE)


class Paths(NamedTuple):
    """The radix paths of the B queries of a batch, in the form in which the cache gives them.

    ``queries[i]`` is None for a query that shares nothing. With a ``reader``, of a cache of Python
    nodes, it is query i's leaf, the last node of its path, from which the reader climbs to the
    root. Without one it is the path: tuples from the root on, in which ``fields`` are the positions
    of (node id, start, end), start and end in tokens. ``limits`` [B] int64: tokens that are safe to
    share. ``private``: how many requests share nothing, by reason.
    """

    queries: list[Any]
    limits: npt.NDArray[np.int64]
    fields: tuple[int, int, int]
    reader: _C.NodeReader | None
    private: dict[str, int]

    def as_tuples(self) -> list[list[tuple[int, int, int]]]:
        """Each query's path as (node id, start, end), from the root on and as far as it is safe to
        share. Slower than the planner's own reading: for dumps."""
        found = []
        known: dict[int, list[tuple[int, int, int]]] = {}
        node_id, start, end = self.fields
        for query, limit in zip(self.queries, self.limits.tolist(), strict=True):
            if query is None:
                path = []
            elif self.reader is not None:
                path = _climb(query, known)
            else:
                path = [(node[node_id], node[start], node[end]) for node in query]
            found.append([(n, s, min(e, limit)) for n, s, e in path if s < limit])
        return found


def _climb(node: Any, known: dict[int, list[tuple[int, int, int]]]) -> list[tuple[int, int, int]]:
    """The path to a Python node. ``known``: those found before, by the address of their node."""
    above, climbed = node, []
    while id(above) not in known and above.parent is not None:
        climbed.append(above)
        above = above.parent
    path = known.get(id(above), [])
    for each in reversed(climbed):
        begin = path[-1][2] if path else 0
        path = known[id(each)] = [*path, (each.id, begin, begin + len(each.key))]
    return path


class RadixView:
    """Reads where requests stand in one prefix cache.

    ``kind`` names the cache; ``disabled`` says why no request has a path in it, or is empty.
    ``fields`` and ``reader`` as in ``Paths``.
    """

    def __init__(self, tree_cache: Any) -> None:
        self.tree_cache = tree_cache
        self.disabled: str = ""  # why no request has a path here
        self.kind = ""
        self.fields = (0, 1, 2)
        node = "lock.node"
        self.reader: _C.NodeReader | None = None
        # SGLang's streaming sessions, which only its unified cache has.
        self._sessions: Any = getattr(tree_cache, "session", None)
        self._collect: Callable[[list[int], Sequence[Any]], Iterable[Any]] = _nothing
        core: Any = getattr(tree_cache, "tree_core", None)
        native = path_query(tree_cache)
        if tree_cache is None or getattr(tree_cache, "disable", False):
            self.disabled = RADIX_CACHE_DISABLED
        elif native is not None:
            # Plain tuples, in about half the time that an object of each node would take.
            self.kind = "rust tree core"
            self.fields = path_fields()
            paths = remember(native, self.fields)
            self._collect = lambda nodes, _reqs: paths(nodes)
        elif hasattr(core, "_node_arena"):
            # Its own collect_path_info climbs in Python, to the root for every request.
            self.kind = f"{type(core).__name__} tree core"
            self.reader = _C.NodeReader(*_NODE_ATTRS)
            self._collect = lambda nodes, _reqs: map(core._node_arena.__getitem__, nodes)
        elif hasattr(tree_cache, "root_node"):
            self.kind = f"{type(tree_cache).__name__} nodes"
            node = "lock.node.id"
            self.reader = _C.NodeReader(*_NODE_ATTRS)
            # A request that was not read again may have been released.
            self._collect = lambda _nodes, reqs: (
                None if req.lock is None else req.lock.node for req in reqs
            )
        else:
            self.disabled = f"unknown cache {type(tree_cache).__name__}"
        self._handles = _C.HandleReader(
            (node, "kv.cache_protected_len", "kv.req_pool_idx"), SETTLE_STEPS, RECHECK_STEPS
        )

    def read_handles(
        self,
        reqs: Sequence[Any],
        rows: torch.Tensor,
        num_queries: int,
        step: int,
        *,
        anew: bool,
    ) -> Handles:
        """Read what a plan for a batch of ``num_queries`` depends on, the first of which are
        ``reqs``.

        ``rows`` [>= len(reqs)] int64, CPU, contiguous: those of ``req_to_token`` that the batch
        reads. A request that does not own its row, such as one just released, has no say in it:
        its handle is (NO_NODE, 0, row).

        ``step`` counts decode steps; in those without a call the batch was as in the call before.
        Requests that have settled are not looked at, except with ``anew`` and where SGLang does not
        count how often it gave out each row.

        Raises AttributeError or TypeError if SGLang's requests have changed their form, ValueError
        for other rows.
        """
        if self.disabled:
            return Handles(num_queries, np.full(len(reqs), _NO_HANDLE).tobytes())
        if rows.numel() < len(reqs):
            raise ValueError(f"{len(reqs)} requests in a batch of {len(rows)} rows")
        table = getattr(self.tree_cache, "req_to_token_pool", None)
        counts = getattr(table, "req_generation", None)
        generations = None if counts is None else counts[rows]
        packed = self._handles.read(reqs, _address(rows), _address(generations), step, anew)
        if self._sessions is not None and self._sessions.slots:
            packed = self._with_sessions(reqs, packed)
        return Handles(num_queries, packed)

    def look_up(self, reqs: Sequence[Any], handles: Handles) -> Paths:
        """The paths of a batch, by what ``read_handles`` gave for ``reqs``. Queries without a
        request share nothing.

        Raises KeyError for a node that the tree does not know, ValueError for fewer queries than
        requests.
        """
        count = handles.num_queries
        nodes, tokens, missing, uncached = _C.HandleReader.columns(handles.packed, count)
        limits = np.frombuffer(tokens, dtype=np.int64)
        if self.disabled:
            private = {self.disabled: len(reqs)}
            return Paths([None] * count, limits, self.fields, None, private)
        queries: list[Any]
        if not missing:
            queries = list(self._collect(nodes, reqs))
        else:
            queries = [None] * len(nodes)
            held = [index for index, node in enumerate(nodes) if node != NO_NODE]
            found = self._collect([nodes[i] for i in held], [reqs[i] for i in held])
            for index, one in zip(held, found, strict=True):
                queries[index] = one
        queries += [None] * (count - len(nodes))
        reasons = {NO_LOCK: missing, NOT_CACHED: uncached}
        private = {reason: times for reason, times in reasons.items() if times}
        return Paths(queries, limits, self.fields, self.reader, private)

    def _with_sessions(self, reqs: Sequence[Any], packed: bytes) -> bytes:
        """``packed`` handles with the nodes that sessions hold for their turns."""
        table = np.frombuffer(packed, dtype=HANDLE).copy()
        for index in np.flatnonzero(table["node"] == NO_NODE).tolist():
            req = reqs[index]
            if req.kv.req_pool_idx != table["table_row"][index]:
                continue
            if (lock := self.lock_of(req)) is not None:
                table["node"][index] = lock.node
        repacked: bytes = table.tobytes()
        return repacked

    def lock_of(self, req: Any) -> Any:
        """The tree lock under which a request runs: its own or its session's, or None."""
        slot = None if self._sessions is None else self._sessions.borrowed_slot(req)
        return (req if slot is None else slot).lock

    def slots(self, lock: Any) -> Any:
        """Slots of the tokens from the root to a lock's node: int64 tensor (CHECK only)."""
        return self.tree_cache.path_device_indices(lock.node)


def _address(numbers: torch.Tensor | None) -> int:
    """Where they are read; 0 for None."""
    if numbers is None:
        return 0
    if numbers.dtype is not torch.int64 or not numbers.is_cpu or not numbers.is_contiguous():
        raise ValueError(
            f"rows or their generations are {numbers.dtype} on {numbers.device} with strides "
            f"{numbers.stride()}, must be contiguous int64 on the CPU"
        )
    return numbers.data_ptr()


def _nothing(nodes: list[int], _reqs: Sequence[Any]) -> Iterable[Any]:
    raise LookupError(f"no prefix cache to look up the nodes of {len(nodes)} requests in")
