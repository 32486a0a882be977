# SPDX-License-Identifier: Apache-2.0
"""The command line of the kernel benchmark."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.document import value, whole_number
from benchmarks.common.trees import HEADS, PAPER_TREES
from benchmarks.kernel import batches
from benchmarks.kernel.cases import (
    DRAFT_HEADS,
    DRAFT_TREES,
    POOL_GB,
    RAGGED_HEADS,
    Case,
    draft_tokens,
    drawn,
)
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.layer import KV_DTYPES, PatOptions
from sglang_pat.explain.tree import Tree
from sglang_pat.target import POLICIES

QUICK_TREES = tuple(PAPER_TREES[i] for i in (0, 2, 5, 9, 18))
# Options that choose among batches, and what they go with.
_CHOICES = {"only": "ragged", "trace": "ragged", "sample": "batches"}
# Modes that have batches of their own.
_MODES = ("trees", "draft_tokens", "batches", "ragged")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.kernel", description=description)
    add = parser.add_argument
    heads, tree = value(Heads.parse), value(Tree.parse)
    add("--heads", nargs="+", type=heads, metavar="Q/KV", help="as 32/8 (default: all four)")
    add("--trees", nargs="+", type=tree, metavar="TREE", help="as 1,8,512_32,512,256")
    add("--permuted", action="store_true", help="slots at random places of the pool")
    how = "of K and V; beside fp8_e4m3, pat is timed with bfloat16 too (default: bfloat16, or as "
    add("--kv-dtype", choices=tuple(KV_DTYPES), help=f"{how}the server of --batches had it)")
    how = "time verify steps, of so many draft tokens a request, as 4,8 (default: decode steps)"
    add("--draft-tokens", type=value(draft_tokens), metavar="T[,T...]", help=how)
    add("--ragged", action="store_true", help="batches whose requests differ, nine heads")
    how = "replay the batches of a server, out of its SGLANG_PAT_DUMP"
    add("--batches", type=Path, metavar="FILE", help=how)
    how = "with --batches: N of them, from the first to the last (default: all)"
    add("--sample", type=value(whole_number), metavar="N", help=how)
    add("--only", nargs="+", default=[], metavar="PATTERN", help="rows by name, as 'skew*' or 8/1")
    how = "a Mooncake trace for the family window of --ragged (default: leave that family out)"
    add("--trace", type=Path, metavar="FILE", help=how)
    how = "start no row that would end later (default: no limit)"
    add("--budget-s", type=float, default=math.inf, metavar="S", help=how)
    how = f"leave out batches with more K and V (default: {POOL_GB:g})"
    add("--pool-gb", type=float, default=POOL_GB, metavar="GB", help=how)
    add("--policy", choices=POLICIES, default="default", help="pat: the paper to the letter")
    how = "before each repeat a layer's matrix products instead of a write of 256 MB: code, too, is"
    add("--cold-code", action="store_true", help=f"{how} in no cache then, as in a server")
    add("--quick", action="store_true", help="five trees, 32/8 heads, fewer repeats")
    add("--json", type=Path, metavar="FILE", help="write rows and conditions")
    add("--from", dest="source", type=Path, metavar="FILE", help="a --json file, instead of a GPU")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with a message if an option would have no effect."""
    modes = [name for name in _MODES if getattr(options, name)]
    if len(modes) > 1 and modes != ["trees", "draft_tokens"]:
        parser.error(f"{_flag(modes[-1])} has batches of its own: leave {_flag(modes[0])} out")
    for name, owner in _CHOICES.items():
        if getattr(options, name) and not getattr(options, owner):
            parser.error(f"{_flag(name)} goes with {_flag(owner)} only")
    try:
        if options.draft_tokens:
            draft_trees(options)
        if options.batches:
            batches.replay(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def cases(options: argparse.Namespace) -> tuple[str, list[Case]]:
    """The kind of document that is asked for, and what is measured. Raises OSError and ValueError
    for files and patterns that give nothing."""
    if options.batches:
        return "batches", batches.replay(options).cases
    if options.ragged:
        return "ragged", drawn(options.heads or RAGGED_HEADS, options.only, options.trace)
    if options.draft_tokens:
        heads = options.heads or (DRAFT_HEADS[:1] if options.quick else DRAFT_HEADS)
        trees = draft_trees(options)
        counts = options.draft_tokens
        return "drafts", [Case(h, tree, count) for count in counts for h in heads for tree in trees]
    every = [Heads(32, 8)] if options.quick else [Heads(*pair) for pair in HEADS]
    trees = options.trees or (QUICK_TREES if options.quick else PAPER_TREES)
    return "trees", [Case(each, tree) for each in options.heads or every for tree in trees]


def draft_trees(options: argparse.Namespace) -> Sequence[Tree]:
    """Those of verify steps. Raises ValueError for one whose tails do not hold the draft tokens."""
    every = DRAFT_TREES if options.quick else DRAFT_TREES + PAPER_TREES
    found: Sequence[Tree] = options.trees or every
    most = max(options.draft_tokens)
    for tree in found:
        if tree.tokens[-1] < most:
            raise ValueError(
                f"--draft-tokens {most}: the tails of tree {tree} have {tree.tokens[-1]} tokens, "
                "which must hold the draft tokens: give fewer, or --trees with longer tails"
            )
    return found


def settings_of(options: argparse.Namespace) -> PatOptions:
    """What is asked for about pat; with several numbers of draft tokens, for the first."""
    chosen = PatOptions(options.policy)
    if options.batches:
        found = batches.replay(options)
        return replace(chosen, kv_dtype=found.kv_dtype, draft_tokens=found.draft_tokens)
    draft_tokens = options.draft_tokens[0] if options.draft_tokens else 1
    return replace(chosen, kv_dtype=options.kv_dtype or "bfloat16", draft_tokens=draft_tokens)
