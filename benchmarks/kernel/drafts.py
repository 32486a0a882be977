# SPDX-License-Identifier: Apache-2.0
"""Verify steps of speculative decoding, pat beside FA3 and FlashInfer: ``python -m
benchmarks.kernel --draft-tokens T[,T...]``.

Each request has T draft tokens, the last tokens of its sequence, and each of them attends to all
tokens up to itself (docs/speculation.md). By default on the batches of that page and on the trees
of the paper. K/V of a request are read once for all of its draft tokens, by pat and by the peers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.common.trees import PAPER_TREES
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.layer import PatOptions
from benchmarks.kernel.report import DECODE_MARGIN, TreeRow, decode_ratio, geomean
from sglang_pat import _C
from sglang_pat.explain.tree import Tree
from sglang_pat.srt.layers import MOST_DRAFT_ROWS

# 64 requests on one prefix, 64 that share nothing, 16 of each kind.
TREES = tuple(map(Tree.parse, ("1,64_8192,128", "64_1024", "1,16_4096,300", "16_2048")))
HEADS = (Heads(32, 8), Heads(64, 8), Heads(8, 1))
# A row that takes more of the better peer's time than this is named, and so is a decode step of
# more than DECODE_MARGIN.
MOST_SHARED = {("1,64_8192,128", 4): 0.55}  # by tree and draft tokens
MOST_PRIVATE = 1.03


def parse(text: str) -> tuple[int, ...]:
    """Numbers of draft tokens, ``T[,T...]``. Raises ValueError for others than 1 to 128."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= 128 for part in parts):
        raise ValueError(f"draft tokens {text!r} are not whole numbers from 1 to 128, as in 4,8")
    return tuple(dict.fromkeys(map(int, parts)))


def trees(options: argparse.Namespace) -> Sequence[Tree]:
    """Those asked for, or by default those above and the paper's. Raises ValueError for a tree
    whose tails do not hold the draft tokens."""
    found: Sequence[Tree] = options.trees or (TREES if options.quick else TREES + PAPER_TREES)
    most = max(options.draft_tokens)
    for tree in found:
        if tree.tokens[-1] < most:
            raise ValueError(
                f"--draft-tokens {most}: the tails of tree {tree} have {tree.tokens[-1]} tokens, "
                "which must hold the draft tokens: give fewer, or --trees with longer tails"
            )
    return found


def heads(options: argparse.Namespace) -> Sequence[Heads]:
    """Those asked for, or by default those above."""
    return options.heads or (HEADS[:1] if options.quick else HEADS)


def packed_rows(each: Heads, draft_tokens: int) -> int:
    """Of a request: query heads of a KV head, of all draft tokens."""
    return each.q // each.kv * draft_tokens


def reason_against(each: Heads, draft_tokens: int) -> str:
    """Why the CUDA kernels do not take so many draft tokens of such heads, or ""."""
    strides = (each.kv * each.dim,) * 2
    try:
        if hasattr(_C, "check_decode_cuda"):  # built with the CUDA kernels
            _C.check_decode_cuda(
                each.q, each.kv, each.dim, *strides, 1.0, 0.0, draft_tokens=draft_tokens
            )
        PatOptions(draft_tokens=draft_tokens).target(TREES[0], each)
    except ValueError as error:
        return str(error)
    return ""


def is_the_bases(row: TreeRow) -> bool:
    """Whether a server leaves such verify steps to SGLang's attention."""
    rows = packed_rows(Heads.parse(row.heads), row.draft_tokens)
    return row.draft_tokens > 1 and rows > MOST_DRAFT_ROWS


def limit_of(row: TreeRow) -> float:
    """At most so much of the better peer's time a row should take."""
    if row.draft_tokens == 1:
        return DECODE_MARGIN
    if not Tree.parse(row.spec).shares:
        return MOST_PRIVATE
    return MOST_SHARED.get((row.spec, row.draft_tokens), DECODE_MARGIN)


def summary(rows: Sequence[TreeRow]) -> Iterator[str]:
    """What rows of equal heads, layout and draft tokens say, as lines: pat's time over that of the
    better of FA3 and FlashInfer, and the rows over their limit."""
    found = [(row, ratio) for row in rows if (ratio := decode_ratio(row)) is not None]
    if not found:
        yield "no peer ran"
        return
    shared = [ratio for row, ratio in found if Tree.parse(row.spec).shares]
    private = [f"{row.spec} {ratio:.3f}" for row, ratio in found if not Tree.parse(row.spec).shares]
    if shared:
        mean = f"{geomean(shared):.3f} in the geometric mean"
        yield f"over the better of fa3 and flashinfer, {len(shared)} trees with sharing: {mean}"
    if private:
        yield f"nothing shared, over the better of fa3 and flashinfer: {', '.join(private)}"
    ours = [(row, ratio) for row, ratio in found if not is_the_bases(row)]
    if ours:
        over = [
            f"{row.spec} {ratio:.3f} (at most {limit_of(row):g})"
            for row, ratio in ours
            if ratio > limit_of(row)
        ]
        yield f"over the limit, {len(over)} of {len(ours)}: {', '.join(over) or 'none'}"
    if len(ours) < len(found):
        yield (
            f"a server leaves these to SGLang's attention ({MOST_DRAFT_ROWS + 1} packed rows a "
            "request or more), so they have no limit"
        )
