# SPDX-License-Identifier: Apache-2.0
"""Batches whose requests differ (``benchmarks.common.forests``), pat beside FA3 and FlashInfer:
``python -m benchmarks.kernel --ragged``.

Rows are named FAMILY-SEED-HEADS. K and V are random and made once for all batches of equal KV
heads; a batch has its slots at the front of them. A cascade by levels is left out: these trees have
none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

import torch

from benchmarks.common.budget import Budget
from benchmarks.common.document import Document, write
from benchmarks.common.forests import Forest, all_forests
from benchmarks.kernel.floor import Heads, kv_bytes
from benchmarks.kernel.kv import TreeBatch, slot_table
from benchmarks.kernel.report import TreeRow, decode_ratio

# Query and KV heads of one GPU, as models have them at tensor-parallel sizes of 1 to 8.
HEADS = tuple(
    Heads.parse(spec)
    for spec in ("32/8", "64/8", "24/8", "40/8", "28/4", "16/2", "8/1", "5/1", "4/1")
)
POOL_GB = 40.0
DEVICE = "cuda"
PEERS = ("fa3", "flashinfer")


@dataclass(frozen=True)
class RaggedCase:
    heads: Heads
    forest: Forest
    draft_tokens: int = 1

    @property
    def name(self) -> str:
        return f"{self.forest}-{self.heads}"

    @property
    def pool(self) -> tuple[int, int]:
        """KV heads and head dim: cases of equal ones use the same K and V."""
        return self.heads.kv, self.heads.dim

    @property
    def bytes(self) -> int:
        return kv_bytes(self.forest.unique_tokens + 1, self.heads)


MakeRow = Callable[[RaggedCase, TreeBatch], TreeRow]


def cases(heads: Sequence[Heads], only: Sequence[str], trace: Path | None) -> list[RaggedCase]:
    """All cases, or those whose names hold what one of the patterns in ``only`` matches; cases of
    equal KV heads are neighbours.

    Raises ValueError if no name matches, or as ``forests.windows`` does.
    """
    forests = all_forests(trace)
    found = [
        case
        for case in (RaggedCase(each, forest) for each in heads for forest in forests)
        if not only or any(fnmatchcase(case.name, f"*{one}*") for one in only)
    ]
    if not found:
        raise ValueError(
            f"--only {' '.join(only)} matches no row; rows are FAMILY-SEED-HEADS, as "
            f"{RaggedCase(heads[0], forests[0]).name}"
        )
    order = {pool: place for place, pool in enumerate(dict.fromkeys(case.pool for case in found))}
    return sorted(found, key=lambda case: order[case.pool])


class Pool:
    """K and V of random values, bf16, for batches of up to ``tokens`` tokens."""

    def __init__(self, tokens: int, kv_heads: int, head_dim: int, device: str) -> None:
        values = torch.Generator(device).manual_seed(0)
        self.k_cache, self.v_cache = (
            torch.randn(
                (tokens + 1, kv_heads, head_dim),
                generator=values,
                dtype=torch.bfloat16,
                device=device,
            )
            for _ in range(2)
        )
        self._values = values
        self._device = device

    def batch(self, case: RaggedCase, permuted: bool) -> TreeBatch:
        """The inputs of a case, with a q of its own."""
        table, seq_lens = slot_table(case.forest, permuted=permuted)
        count = case.forest.num_queries
        q = torch.randn(
            (count * case.draft_tokens, case.heads.q, case.heads.dim),
            generator=self._values,
            dtype=torch.bfloat16,
            device=self._device,
        )
        return TreeBatch(
            q=q,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            req_to_token=table.to(self._device),
            rows=torch.arange(1, count + 1, device=self._device),
            seq_lens=seq_lens.to(self._device),
            draft_tokens=case.draft_tokens,
        )


def run(
    todo: Sequence[RaggedCase],
    make_row: MakeRow,
    document: Document,
    *,
    permuted: bool,
    budget_s: float,
    pool_gb: float,
    path: Path | None,
) -> None:
    """Adds a row to ``document`` for every case, or a line to its ``left_out``; written as it
    grows."""
    budget, done = Budget(time.monotonic() + budget_s), 0
    for (kv_heads, head_dim), members in groupby(todo, lambda case: case.pool):
        fitting = []
        for case in members:
            if case.bytes > pool_gb * 1e9:
                done += 1
                _leave_out(
                    document, case, f"K and V of {case.bytes / 1e9:.1f} GB, over {pool_gb:g}"
                )
            else:
                fitting.append(case)
        pool = None
        for case in fitting:
            done += 1
            if not budget.allows("row"):
                _leave_out(document, case, "the time is up")
                continue
            began = time.monotonic()
            if pool is None:
                tokens = max(each.forest.unique_tokens for each in fitting)
                pool = Pool(tokens, kv_heads, head_dim, DEVICE)
            row = make_row(case, pool.batch(case, permuted))
            document["rows"].append(asdict(row))
            budget.took("row", time.monotonic() - began)
            ratio = decode_ratio(row)
            against = f"{ratio:.3f} of the better peer" if ratio else "no peer ran"
            print(f"{done}/{len(todo)} {case.name} {row.pat:.1f} us, {against}{budget}", flush=True)
            write(document, path)
        del pool  # before the next one is made
    write(document, path)


def _leave_out(document: Document, case: RaggedCase, reason: str) -> None:
    document["left_out"].append(f"{case.name}: {reason}")
