# SPDX-License-Identifier: Apache-2.0
"""Plans written by hand, byte by byte as csrc/plan.h has them, and inputs to execute them on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_pat import _C
from sglang_pat.reference import attention

DYNAMIC = -1
DIRECT = -1

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u4"),
        *((name, "<i4") for name in ("num_queries", "num_items", "num_members", "num_partials")),
        ("num_shared_items", "<i4"),
        *((name, "<i4") for name in ("items_offset", "members_offset", "queries_offset")),
        *((name, "<i4") for name in ("total_bytes", "max_queries", "max_items", "max_partials")),
        *((name, "<i4") for name in ("num_q_heads", "num_kv_heads")),
        *((name, "<i4") for name in ("num_wide_items", "num_heavy_items")),
        ("reserved", "<i4", 2),
    ]
)
ITEM = np.dtype(
    [
        *((name, "<i4") for name in ("member_offset", "num_queries", "row", "kv_start", "kv_len")),
        *((name, "<i2") for name in ("row_tile", "kv_tile")),
        *((name, "<i4") for name in ("partial", "tokens")),
    ]
)
MEMBER = np.dtype([("query", "<i4"), ("partial", "<i4")])
QUERY = np.dtype([("partial_offset", "<i4"), ("num_splits", "<i4")])

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + length) of all of ``queries``, one item of a plan."""

    queries: tuple[int, ...]
    start: int
    length: int  # or DYNAMIC


@dataclass
class HandPlan:
    """A plan's parts, free to be damaged, and the object that ``decode`` takes."""

    header: npt.NDArray[Any]
    items: npt.NDArray[Any]
    members: npt.NDArray[Any]
    queries: npt.NDArray[Any]
    _bytes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    def encode(self) -> HandPlan:
        """Lay the parts out again, after changes to them."""
        parts = (self.header, self.items, self.members, self.queries)
        raw = b"".join(part.tobytes() for part in parts)
        self._bytes = np.frombuffer(raw + bytes(-len(raw) % 8), np.uint64).copy()
        return self

    @property
    def data_ptr(self) -> int:
        return self._bytes.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._bytes.nbytes


def encode(
    pieces: list[Piece], num_queries: int, heads: tuple[int, int], wide: bool = False
) -> HandPlan:
    """The plan whose items are ``pieces``: first, with ``wide``, those of more than 64 packed rows
    as wide items, then the heavy ones of more than 32, then the others, each in that order."""
    group = heads[0] // heads[1]

    def tile(piece: Piece) -> int:
        rows = len(piece.queries) * group
        return 128 if wide and rows > 64 else 64 if rows > 32 else 16

    pieces = sorted(pieces, key=tile, reverse=True)
    tiles = [tile(piece) for piece in pieces]
    of_query: list[list[Piece]] = [[] for _ in range(num_queries)]
    for piece in pieces:
        for query in piece.queries:
            of_query[query].append(piece)
    queries = np.zeros(num_queries, QUERY)
    partial: dict[tuple[int, Piece], int] = {}
    for query, mine in enumerate(of_query):
        queries[query] = (len(partial) if len(mine) > 1 else 0, len(mine))
        if len(mine) > 1:
            for piece in sorted(mine, key=lambda p: p.start):
                partial[query, piece] = len(partial)
    items = np.zeros(len(pieces), ITEM)
    members = []
    for i, piece in enumerate(pieces):
        row = piece.queries[-1]
        single = partial.get((row, piece), DIRECT) if len(piece.queries) == 1 else 0
        items[i] = (
            *(len(members), len(piece.queries), row, piece.start, piece.length, tiles[i], 64),
            *(single, 0),
        )
        members += [(query, partial.get((query, piece), DIRECT)) for query in piece.queries]
    header = np.zeros(1, HEADER)
    header["magic"], header["version"] = 0x50415431, 3
    header["num_queries"], header["num_items"] = num_queries, len(pieces)
    header["num_members"], header["num_partials"] = len(members), len(partial)
    header["num_shared_items"] = sum(len(piece.queries) > 1 for piece in pieces)
    header["items_offset"] = HEADER.itemsize
    header["members_offset"] = HEADER.itemsize + items.nbytes
    header["queries_offset"] = header["members_offset"] + len(members) * MEMBER.itemsize
    header["total_bytes"] = header["queries_offset"] + queries.nbytes
    header["num_q_heads"], header["num_kv_heads"] = heads
    header["num_wide_items"], header["num_heavy_items"] = tiles.count(128), tiles.count(64)
    return HandPlan(header, items, np.array(members, MEMBER), queries).encode()


@dataclass(frozen=True)
class Case:
    """Inputs of one decode step; every slot that no query owns holds NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    pieces: list[Piece]
    scale: float
    logit_cap: float = 0.0

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[1], self.k.shape[1]

    def plan(self, wide: bool = False) -> HandPlan:
        return encode(self.pieces, len(self.q), self.heads, wide)

    def to(self, dtype: torch.dtype) -> Case:
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def truth(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE by definition, computed in ``dtype``."""
        return attention(
            self.q,
            self.k,
            self.v,
            self.table,
            self.rows,
            self.seq_lens,
            scale=self.scale,
            logit_cap=self.logit_cap,
            dtype=dtype,
        )


def forest(rng: np.random.Generator, num_queries: int, max_splits: int = 3) -> list[Piece]:
    """Pieces of a random forest: groups of queries share a segment, groups in them the next, and
    each query ends with a tail that may be empty. Segments are cut into up to ``max_splits``."""
    pieces: list[Piece] = []

    def cut(queries: tuple[int, ...], start: int, length: int) -> None:
        inner = rng.choice(length - 1, min(max_splits, length) - 1, replace=False) + 1
        edges = [0, *sorted(inner.tolist()), length]
        pieces.extend(Piece(queries, start + a, b - a) for a, b in pairwise(edges))

    def grow(queries: list[int], start: int, depth: int) -> None:
        length = int(rng.integers(1, 150))
        if len(queries) > 1 and depth < 3:
            cut(tuple(queries), start, length)
            at = int(rng.integers(1, len(queries)))
            grow(queries[:at], start + length, depth + 1)
            grow(queries[at:], start + length, depth + 1)
            return
        for query in queries:
            private = int(rng.integers(0, 100))
            if private and rng.integers(2):
                cut((query,), start, private)
            else:
                private = 0
            pieces.append(Piece((query,), start + private, DYNAMIC))

    grow(list(range(num_queries)), 0, 0)
    rng.shuffle(pieces)  # type: ignore[arg-type]
    return pieces


def case(
    pieces: list[Piece],
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 64,
    v_head_dim: int | None = None,
    *,
    seed: int = 0,
    tails: tuple[int, ...] = (0, 1, 7, 63, 64, 65, 130),
    logit_cap: float = 0.0,
) -> Case:
    """Random inputs for pieces of queries 0...n - 1: dynamic pieces get a length of ``tails``, rows
    and slots are shuffled, and strides are wider than the tensors."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    num_queries = 1 + max((query for piece in pieces for query in piece.queries), default=-1)
    lengths = [
        int(rng.choice(tails)) if piece.length == DYNAMIC else piece.length for piece in pieces
    ]
    seq_lens = np.zeros(num_queries, np.int64)
    for piece, length in zip(pieces, lengths, strict=True):
        for query in piece.queries:
            seq_lens[query] = max(seq_lens[query], piece.start + length)
    owned = sum(lengths)
    num_slots = owned + 50
    slots = rng.permutation(num_slots)
    rows = rng.permutation(num_queries + 3)[:num_queries]
    width = int(seq_lens.max(initial=0)) + 5
    # What no token owns names a slot of NaN, too.
    table = np.full((num_queries + 3, width), slots[-1], np.int32)
    used = 0
    for piece, length in zip(pieces, lengths, strict=True):
        for query in piece.queries:
            table[rows[query], piece.start : piece.start + length] = slots[used : used + length]
        used += length
    num_q_heads, num_kv_heads = heads
    v_dim = v_head_dim or head_dim
    unowned = torch.from_numpy(slots[owned:].astype(np.int64))
    k = torch.randn(num_slots, num_kv_heads + 1, head_dim + 8)
    v = torch.randn(num_slots, num_kv_heads + 2, v_dim)
    k[unowned] = v[unowned] = float("nan")
    return Case(
        q=torch.randn(num_queries, num_q_heads, head_dim + 3)[..., :head_dim],
        k=k[:, :num_kv_heads, :head_dim],
        v=v[:, 2:],
        table=torch.from_numpy(table),
        rows=torch.from_numpy(rows),
        seq_lens=torch.from_numpy(seq_lens),
        pieces=pieces,
        scale=head_dim**-0.5,
        logit_cap=logit_cap,
    )


def execute(
    inputs: Case,
    hand: HandPlan | None = None,
    *,
    threads: int = 2,
    isa: str = "",
    partial: torch.dtype = torch.float32,
    **changes: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the CPU executor on a plan of hand, by default the case's; ``changes`` replace arguments
    of ``_C.decode_cpu``. Returns the output [B, Hq, Dv], a view of a wider tensor that held NaN
    before, and the LSE [B, Hq]."""
    plan = hand or inputs.plan()
    num_queries, num_q_heads, head_dim = inputs.q.shape
    num_slots, num_kv_heads, v_head_dim = inputs.v.shape
    wide = torch.full((num_queries, num_q_heads + 1, v_head_dim + 5), float("nan"))
    out = wide.to(inputs.q.dtype)[:, 1:, :v_head_dim]
    lse = torch.full((num_queries, num_q_heads), float("nan"))

    def address(tensor: torch.Tensor) -> tuple[int, int, int]:
        return (tensor.data_ptr(), tensor.stride(0), tensor.stride(1))

    arguments: dict[str, Any] = {
        "plan": plan.data_ptr,
        "plan_bytes": plan.nbytes,
        "q": address(inputs.q),
        "k_cache": address(inputs.k),
        "v_cache": address(inputs.v),
        "out": address(out),
        "lse": lse.data_ptr(),
        "req_to_token": (inputs.table.data_ptr(), inputs.table.stride(0), *inputs.table.shape),
        "rows": inputs.rows.data_ptr(),
        "seq_lens": inputs.seq_lens.data_ptr(),
        "num_slots": num_slots,
        "num_queries": num_queries,
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "dtype": DTYPES[inputs.q.dtype],
        "partial_dtype": DTYPES[partial],
        "scale": inputs.scale,
        "logit_cap": inputs.logit_cap,
        "num_threads": threads,
        "isa": isa,
    }
    _C.decode_cpu(**(arguments | changes))
    return out, lse
