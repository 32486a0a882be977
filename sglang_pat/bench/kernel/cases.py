# SPDX-License-Identifier: Apache-2.0
"""Which batches of regular trees ``sglang_pat.bench.kernel`` runs, by its options."""

from __future__ import annotations

import argparse

from sglang_pat.bench.common.trees import HEADS, PAPER_TREES, Tree
from sglang_pat.bench.kernel import batches, drafts, traffic
from sglang_pat.bench.kernel.floor import Heads

QUICK_TREES = tuple(PAPER_TREES[i] for i in (0, 2, 5, 9, 18))
# One shared node of so many tokens, so many queries, each with a private tail.
SWEEP_TOKENS = (128, 512, 2048, 8192, 32768)
SWEEP_QUERIES = (1, 4, 16, 64, 256, 512)
SWEEP_TAIL = 128


def cases(options: argparse.Namespace) -> list[traffic.Case]:
    """What to run: heads, permuted or not, tree."""
    few = options.quick or options.timeline
    if options.batches:
        found = batches.replay(options).cases
        return [(case.heads, options.permuted, case.forest) for case in found]
    if options.draft_tokens:
        todo = [(each, tree) for each in drafts.heads(options) for tree in drafts.trees(options)]
        return [(each, options.permuted, tree) for each, tree in todo]
    trees = options.trees or (QUICK_TREES if few else PAPER_TREES)
    layouts = [options.permuted]
    if options.sweep:
        trees = [Tree((1, q), (n, SWEEP_TAIL)) for n in SWEEP_TOKENS for q in SWEEP_QUERIES]
        layouts = [False, True]
    one = few or options.sweep or options.traffic
    heads = options.heads or ([Heads(32, 8)] if one else [Heads(*pair) for pair in HEADS])
    return [(each, permuted, tree) for each in heads for permuted in layouts for tree in trees]
