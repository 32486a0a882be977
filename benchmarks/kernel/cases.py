# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmark measures: batches with heads and draft tokens, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.common.forests import Forest, all_forests
from benchmarks.kernel.floor import Heads, kv_bytes
from benchmarks.kernel.kv import TreeBatch, slot_table
from benchmarks.kernel.layer import PatOptions, device_batch
from sglang_pat import _C
from sglang_pat.explain.tree import Tree

# Of --ragged: heads of one GPU, as models have them at tensor-parallel sizes of 1 to 8.
RAGGED_HEADS = tuple(
    Heads.parse(spec)
    for spec in ("32/8", "64/8", "24/8", "40/8", "28/4", "16/2", "8/1", "5/1", "4/1")
)
# Of --draft-tokens: 64 requests on one prefix, 64 that share nothing, 16 of each kind.
DRAFT_TREES = tuple(map(Tree.parse, ("1,64_8192,128", "64_1024", "1,16_4096,300", "16_2048")))
DRAFT_HEADS = (Heads(32, 8), Heads(64, 8), Heads(8, 1))
POOL_GB = 40.0
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """A batch, a tree of equal levels or another one, with heads and ``draft_tokens`` a query."""

    heads: Heads
    requests: Tree | Forest
    draft_tokens: int = 1

    @property
    def name(self) -> str:
        drafted = f" x {self.draft_tokens}" if self.draft_tokens > 1 else ""
        return f"{self.requests}-{self.heads}{drafted}"

    @property
    def pool(self) -> tuple[int, int]:
        """KV heads and head dim: forests of equal ones use the same K and V."""
        return self.heads.kv, self.heads.dim

    @property
    def gigabytes(self) -> float:
        """Of K and V in bf16."""
        return kv_bytes(self.requests.unique_tokens + 1, self.heads) / 1e9


def draft_tokens(text: str) -> tuple[int, ...]:
    """Numbers of draft tokens, ``T[,T...]``. Raises ValueError for others than 1 to 128."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= 128 for part in parts):
        raise ValueError(f"draft tokens {text!r} are not whole numbers from 1 to 128, as in 4,8")
    return tuple(dict.fromkeys(map(int, parts)))


def reason_against(heads: Heads, draft_tokens: int) -> str:
    """Why the CUDA kernels do not take so many draft tokens of such heads, or ""."""
    strides = (heads.kv * heads.dim,) * 2
    shape = (heads.q, heads.kv, heads.dim)
    try:
        if hasattr(_C, "check_decode_cuda"):  # built with the CUDA kernels
            _C.check_decode_cuda(*shape, *strides, 1.0, 0.0, draft_tokens=draft_tokens)
        PatOptions(draft_tokens=draft_tokens).target(DRAFT_TREES[0], heads)
    except ValueError as error:
        return str(error)
    return ""


def drawn(heads: Sequence[Heads], only: Sequence[str], trace: Path | None) -> list[Case]:
    """All cases of ``benchmarks.common.forests``, named FAMILY-SEED-HEADS, or those whose names
    hold what one of the patterns in ``only`` matches; cases of equal KV heads are neighbours.

    Raises ValueError if no name matches, or as ``forests.windows`` does.
    """
    forests = all_forests(trace)
    found = [
        case
        for case in (Case(each, forest) for each in heads for forest in forests)
        if not only or any(fnmatchcase(case.name, f"*{one}*") for one in only)
    ]
    if not found:
        raise ValueError(
            f"--only {' '.join(only)} matches no row; rows are FAMILY-SEED-HEADS, as "
            f"{Case(heads[0], forests[0]).name}"
        )
    order = {pool: place for place, pool in enumerate(dict.fromkeys(case.pool for case in found))}
    return sorted(found, key=lambda case: order[case.pool])


class Pool:
    """K and V of random values, bf16, for batches of up to ``tokens`` tokens, which have their
    slots at the front."""

    def __init__(self, tokens: int, kv_heads: int, head_dim: int) -> None:
        self._values = torch.Generator(DEVICE).manual_seed(0)
        self.k_cache, self.v_cache = (
            self._normal(tokens + 1, kv_heads, head_dim) for _ in range(2)
        )

    def _normal(self, *shape: int) -> torch.Tensor:
        options = {"dtype": torch.bfloat16, "device": DEVICE}
        return torch.randn(shape, generator=self._values, **options)  # type: ignore[call-overload,no-any-return]

    def batch(self, case: Case, permuted: bool) -> TreeBatch:
        """The inputs of a case, with a q of its own."""
        table, seq_lens = slot_table(case.requests, permuted=permuted)
        count = case.requests.num_queries
        return TreeBatch(
            q=self._normal(count * case.draft_tokens, case.heads.q, case.heads.dim),
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            req_to_token=table.to(DEVICE),
            rows=torch.arange(1, count + 1, device=DEVICE),
            seq_lens=seq_lens.to(DEVICE),
            draft_tokens=case.draft_tokens,
        )


def inputs(cases: Iterable[Case], permuted: bool) -> Iterator[tuple[Case, Callable[[], TreeBatch]]]:
    """Each case and what makes its inputs on the GPU: those of a tree have K and V of their own, of
    forests those of neighbours with equal KV heads the same, made with the first of them."""
    for (kv_heads, head_dim), members in groupby(cases, lambda case: case.pool):
        group = list(members)
        tokens = max(case.requests.unique_tokens for case in group)
        pool = cache(partial(Pool, tokens, kv_heads, head_dim))
        for case in group:
            if isinstance(case.requests, Tree):
                about = (case.requests, case.heads, permuted, case.draft_tokens)
                yield case, partial(device_batch, *about)
            else:
                yield case, partial(_of_pool, pool, case, permuted)


def _of_pool(pool: Callable[[], Pool], case: Case, permuted: bool) -> TreeBatch:
    return pool().batch(case, permuted)
