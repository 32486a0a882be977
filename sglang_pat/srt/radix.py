# SPDX-License-Identifier: Apache-2.0
"""The radix view: for each request the path of radix nodes that its K/V slots stand under.

The only reader of SGLang's caches. Sharing is what the live tree says: two requests under one node
were given the same slots for it, so neither token ids nor slot ids are compared. Per request the
handle is ``req.lock.node``, the node pinned for it, and the part that is safe to share is
``req.kv.cache_protected_len`` tokens: up to there SGLang guarantees that the request's row of
``req_to_token`` repeats the tree's slots. A request without a lock (one just released) has no path.

A turn of a streaming session runs on the row and the ``kv`` record of the session's slot, which
holds the lock of the first turn's prompt. Later turns write behind it only, so the row still
repeats the tree's slots for the record's ``cache_protected_len`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat import _C
from sglang_pat.planner import Plan, Planner
from sglang_pat.slots import SlotMismatch, compare, compare_shared
from sglang_pat.stats import NO_LOCK, NOT_CACHED, NOT_READ, RADIX_CACHE_DISABLED, TOO_LONG

# A request that has been in the batch unchanged for more than SETTLE_STEPS decode steps is not read
# again, for RECHECK_STEPS at most: see csrc/srt/handles.h.
SETTLE_STEPS = 2
RECHECK_STEPS = 64
NO_NODE = -1  # read in place of a node handle when the request holds no lock
# Id, parent and key of a node in SGLang's caches of Python nodes.
_NODE_ATTRS = ("id", "parent", "key")
# A plan that has read so many nodes, in 4 to 7 ms, begins no other path: requests that are left
# share nothing until a later plan. Nor does one whose own path has so many unknown nodes.
MOST_READ = 1 << 14

# What a request is known by: the node it holds or NO_NODE, its tokens that are safe to share, and
# its row of req_to_token. A batch's are bytes, which are compared at every step: equal ones mean
# equal sharing.
HANDLE = np.dtype([("node", np.int64), ("tokens", np.int64), ("table_row", np.int64)])


class RadixView:
    """Reads where requests stand in one prefix cache.

    ``kind`` names the cache; ``disabled`` says why no request has a path in it, or is empty.
    """

    def __init__(self, tree_cache: Any) -> None:
        self.tree_cache = tree_cache
        self.disabled = self.kind = ""
        self.unread = 0  # requests of the last plan whose paths are left to the next
        node = "lock.node"
        # SGLang's streaming sessions, which only its unified cache has.
        self._sessions: Any = getattr(tree_cache, "session", None)
        self._paths: _C.RadixPaths | None = None
        # The Python node that a request holds, given its number and its node's id.
        self._leaf: Callable[[Sequence[Any]], Callable[[int, int], Any]] | None = None
        core: Any = getattr(tree_cache, "tree_core", None)
        nodes: Any = getattr(core, "_node_arena", None)
        if tree_cache is None or getattr(tree_cache, "disable", False):
            self.disabled = RADIX_CACHE_DISABLED
        elif nodes is not None:
            self.kind = f"{type(core).__name__} tree core"
            self._paths = _C.RadixPaths.of_nodes(*_NODE_ATTRS, MOST_READ)
            self._leaf = lambda _reqs: lambda _query, node: nodes[node]
        elif hasattr(getattr(core, "_binding", None), "get_node_key_lengths"):
            self.kind = "rust tree core"
            self._paths = _C.RadixPaths.of_tree_core(core._binding, MOST_READ)
        elif hasattr(tree_cache, "root_node"):
            self.kind = f"{type(tree_cache).__name__} nodes"
            node = "lock.node.id"
            self._paths = _C.RadixPaths.of_nodes(*_NODE_ATTRS, MOST_READ)
            self._leaf = lambda reqs: lambda query, _node: reqs[query].lock.node
        else:
            self.disabled = f"unknown cache {type(tree_cache).__name__}"
        self._handles = _C.HandleReader(
            (node, "kv.cache_protected_len", "kv.req_pool_idx"), SETTLE_STEPS, RECHECK_STEPS
        )

    def read_handles(
        self, reqs: Sequence[Any], rows: torch.Tensor, step: int, *, anew: bool
    ) -> bytes:
        """The handles of ``reqs``, (NO_NODE, 0, row) of one that does not own its row, such as one
        just released. ``rows`` [>= len(reqs)] int64, CPU, contiguous: those that the batch reads.

        ``step`` counts decode steps; in those without a call the batch was as in the call before.
        Requests that have settled are not looked at, except with ``anew``.

        Raises AttributeError or TypeError if SGLang's requests have changed their form, ValueError
        for other rows.
        """
        if self.disabled:
            return np.array([(NO_NODE, 0, 0)] * len(reqs), HANDLE).tobytes()
        if rows.numel() < len(reqs):
            raise ValueError(f"{len(reqs)} requests in a batch of {len(rows)} rows")
        given_out = self.tree_cache.req_to_token_pool.req_generation  # how often, of each row
        packed: bytes = self._handles.read(
            reqs, _address(rows), _address(given_out), given_out.numel(), step, anew
        )
        if self._sessions is not None and self._sessions.slots:
            packed = self._with_sessions(reqs, packed)
        return packed

    def plan(
        self,
        planner: Planner,
        reqs: Sequence[Any],
        handles: bytes,
        seq_lens: npt.NDArray[np.int64],
    ) -> tuple[Plan, dict[str, int]]:
        """``planner``'s plan for what ``read_handles`` gave for ``reqs``, and how many requests
        share nothing, by reason. ``seq_lens`` [B]: queries without a request share nothing. Raises
        KeyError for a node that the tree does not know, and what the planner raises."""
        if self._paths is None:
            private = {self.disabled: len(reqs)}
            return planner.plan([None] * len(seq_lens), seq_lens), private
        leaf = None if self._leaf is None else self._leaf(reqs)
        plan = planner.plan_from_handles(handles, seq_lens, self._paths, leaf)
        self.unread = self._paths.num_unread
        reasons = {
            NO_LOCK: self._paths.num_missing,
            NOT_CACHED: self._paths.num_uncached,
            NOT_READ: self.unread,
            TOO_LONG: self._paths.num_too_long,
        }
        return plan, {reason: times for reason, times in reasons.items() if times}

    def _with_sessions(self, reqs: Sequence[Any], packed: bytes) -> bytes:
        """``packed`` handles with the nodes that sessions hold for their turns."""
        table = np.frombuffer(packed, HANDLE).copy()
        for index in np.flatnonzero(table["node"] == NO_NODE).tolist():
            req = reqs[index]
            if req.kv.req_pool_idx != table["table_row"][index]:
                continue
            if (lock := self.lock_of(req)) is not None:
                table["node"][index] = lock.node
        packed = table.tobytes()
        return packed

    def lock_of(self, req: Any) -> Any:
        """The tree lock under which a request runs: its own or its session's, or None."""
        slot = None if self._sessions is None else self._sessions.borrowed_slot(req)
        return (req if slot is None else slot).lock


def _address(numbers: torch.Tensor) -> int:
    if numbers.dtype is not torch.int64 or not numbers.is_cpu or not numbers.is_contiguous():
        raise ValueError(
            f"rows or their generations are {numbers.dtype} on {numbers.device} with strides "
            f"{numbers.stride()}, must be contiguous int64 on the CPU"
        )
    return numbers.data_ptr()


def check_plan(
    plan: Plan,
    reqs: Sequence[Any],
    view: RadixView,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Raise SlotMismatch unless the members of each item hold equal slots over its tokens in
    ``req_to_token``, and each request's row repeats the slots of its radix path as far as that is
    protected. ``rows`` on the CPU."""
    try:
        compare_shared(plan, req_to_token, rows, lambda query: _name(reqs, query))
        for query, req in enumerate(() if view.disabled else reqs):
            lock = view.lock_of(req)
            if lock is not None and req.kv.req_pool_idx == rows[query]:
                held = req_to_token[rows[query], : req.kv.cache_protected_len]
                path = view.tree_cache.path_device_indices(lock.node)  # int64, of the whole path
                cached = path[: len(held)].to(held.dtype)
                compare(held, cached, 0, _name(reqs, query), "the radix tree")
    except SlotMismatch as mismatch:
        raise SlotMismatch(f"SGLANG_PAT_CHECK: {mismatch}") from None


def _name(reqs: Sequence[Any], query: int) -> str:
    if query >= len(reqs):
        return f"query {query} (no request)"
    req = reqs[query]
    node = getattr(req.lock, "node", None)
    return f"request {req.rid} (query {query}, node {getattr(node, 'id', node)})"
