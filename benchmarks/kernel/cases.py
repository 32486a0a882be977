# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmark measures: batches with heads and draft tokens."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.common.forests import PAPER_TREES, Forest, Tree, all_forests
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.layer import E4M3
from sglang_pat.dump import read_dump

PAPER_HEADS = [Heads(32, 32), Heads(16, 8), Heads(32, 8), Heads(64, 8)]
# Of --ragged: heads of one GPU, as models have them at tensor-parallel sizes of 1 to 8.
RAGGED_HEADS = [
    Heads.parse(spec)
    for spec in ("32/8", "64/8", "24/8", "40/8", "28/4", "16/2", "8/1", "5/1", "4/1")
]
# Of --draft-tokens: 64 requests on one prefix, 64 that share nothing, 16 of each kind.
DRAFT_TREES = tuple(map(Tree.parse, ("1,64_8192,128", "64_1024", "1,16_4096,300", "16_2048")))
DRAFT_HEADS = [Heads(32, 8), Heads(64, 8), Heads(8, 1)]


@dataclass(frozen=True)
class Case:
    """A batch, a tree of equal levels or another one, with heads and ``draft_tokens`` a query."""

    heads: Heads
    requests: Forest
    draft_tokens: int = 1

    @property
    def name(self) -> str:
        drafted = f" x {self.draft_tokens}" if self.draft_tokens > 1 else ""
        return f"{self.requests}-{self.heads}{drafted}"


@dataclass(frozen=True)
class Work:
    """The ``kind`` of a document, its cases, the dtype of K and V, and of a server's batches the
    header of its dump."""

    kind: str
    cases: list[Case]
    kv_dtype: str
    server: dict[str, Any] | None = None


def asked(options: argparse.Namespace) -> Work:
    """What the options ask for.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is no dump, no batch has a name as asked for, or an option makes no sense.
    """
    kv_dtype = options.kv_dtype
    drafts = [int(number) for number in (options.draft_tokens or "1").split(",")]
    kind, heads = "trees", PAPER_HEADS
    requests: Sequence[Forest] = PAPER_TREES
    server: dict[str, Any] | None = None
    if options.batches:
        kind, (server, requests) = "batches", read_batches(options.batches)
        heads = [Heads(server["num_q_heads"], server["num_kv_heads"], server["head_dim"])]
        drafts = drafts if options.draft_tokens else [server["draft_tokens"]]
        kv_dtype = kv_dtype or (E4M3 if server["kv_dtype"] == "float8_e4m3fn" else "bfloat16")
    elif options.ragged:
        kind, requests, heads = "ragged", all_forests(), RAGGED_HEADS
    elif options.draft_tokens:
        kind, heads = "drafts", DRAFT_HEADS
        requests = DRAFT_TREES + PAPER_TREES
    heads = [Heads.parse(spec) for spec in options.heads] or heads
    requests = sample([Tree.parse(spec) for spec in options.trees] or requests, options.sample)
    every = [Case(each, one, count) for count in drafts for each in heads for one in requests]
    chosen = [
        case
        for case in every
        if not options.only or any(fnmatchcase(case.name, f"*{one}*") for one in options.only)
    ]
    if not chosen:
        raise ValueError(f"no row is asked for; rows are named as {every[0].name}")
    return Work(kind, chosen, kv_dtype or "bfloat16", server)


def sample(every: Sequence[Forest], count: int | None) -> Sequence[Forest]:
    """So many of them, evenly spaced from the first to the last; all for none."""
    if not count or count >= len(every):
        return every
    return [every[round(i * (len(every) - 1) / max(count - 1, 1))] for i in range(count)]


def read_batches(file: Path) -> tuple[dict[str, Any], list[Forest]]:
    """The header of a running server's dump (``SGLANG_PAT_DUMP``), without its target, and its
    batches, by their numbers, without queries of no tokens. Their slots will be single tokens,
    contiguous within a node, whatever pages the server had; K and V are random.

    Raises OSError or ValueError, in words, for a file that is no dump or has no batch.
    """
    dump = read_dump(file)
    if not dump.batches:
        raise ValueError(f"{file} has no batch: no decode step of several requests ran on pat")
    forests = []
    for number, batch in enumerate(dump.batches, 1):
        held = [i for i, tokens in enumerate(batch.seq_lens) if tokens]
        paths, seq_lens = [batch.paths[i] for i in held], [batch.seq_lens[i] for i in held]
        forests.append(Forest(f"batch-{number}", paths, seq_lens))
    return {name: value for name, value in dump.header.items() if name != "target"}, forests
