# SPDX-License-Identifier: Apache-2.0
"""Other papers' rules for packs and splits beside ours, in turns: ``python -m benchmarks.papers``.
Without a GPU it prints what the plans hold.

Our kernels run the plan of each rule, so that rules are compared without comparing kernels: row
tiles, the queue of items and the merge are ours, and no plan has branches but ours. PackInfer is
left out: its groups mask any queries of a batch, which needs branches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.document import conditions, write
from benchmarks.common.forests import PAPER_TREES, Forest, all_forests
from benchmarks.kernel.clock import Clock, capture
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.layer import Layer, PatOptions, device_batch, error_of
from benchmarks.kernel.report import MAX_DIFFERENCE, geomean
from sglang_pat import _C
from sglang_pat.planner import Plan, Planner
from sglang_pat.target import Target

WHOLE = 2**31 - 1  # tokens of a piece: the pack is not cut
ROOM = 1 << 20  # items and partials: more than any rule makes


@dataclass(slots=True)
class Pack:
    """Tokens [start, end) that ``queries`` queries share, and read in one CTA unless it is cut."""

    parent: int  # the node above it in the tree, or -1
    start: int
    end: int
    queries: int  # 0: nobody is left who reads it here

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class PackTree:
    """``nodes`` of several queries, parents first, and each query's private tail."""

    nodes: Sequence[Pack]
    tails: Sequence[Pack]
    target: Target

    def descend(self, gives_way: Callable[[Pack, Pack], bool]) -> tuple[list[bool], list[Pack]]:
        """Goes down the tree and asks of each child and tail whether the pack above gives way to
        it: its queries leave that pack, which they read along with their own tokens. Returns which
        took over, and the packs."""
        packs = [replace(pack) for pack in (*self.nodes, *self.tails)]
        below: dict[int, list[int]] = defaultdict(list)
        for index, pack in enumerate(packs):
            if pack.queries:
                below[pack.parent].append(index)
        takes_over = [False] * len(packs)
        for node in range(len(self.nodes)):
            for index in below[node]:
                above, child = packs[node], packs[index]
                if gives_way(above, child):
                    takes_over[index] = True
                    above.queries -= child.queries
                    child.start = above.start
        return takes_over, packs

    def ctas(self, pack: Pack) -> int:
        """Of a pack that is not cut: one for as many queries as the largest row tile holds."""
        group = self.target.num_q_heads // self.target.num_kv_heads
        return -(-pack.queries // max(1, self.target.row_tiles[-1] // group))


Decisions = tuple[list[bool], list[int]]  # of nodes, then tails: takes over; tokens of its pieces


def pat_naive(tree: PackTree) -> Decisions:
    """It "simply packs each node in the tree-structured block table into a CTA" (PAT, 8.5). A CTA
    longer than their mean is cut into equal parts that are not (section 6)."""
    takes_over, packs = tree.descend(lambda above, below: False)
    ctas = [tree.ctas(pack) for pack in packs]
    tokens = sum(count * pack.tokens for count, pack in zip(ctas, packs, strict=True))
    mean = max(1, tokens // max(1, sum(ctas)))
    lengths = [max(1, pack.tokens) for pack in packs]
    return takes_over, [-(-length // -(-length // mean)) for length in lengths]


def paged(tree: PackTree, tokens: int) -> Decisions:
    """PagedAttention: one CTA reads all K/V of a query (V1), or a partition of 512 tokens (V2). No
    sequence ends with a shared node: the token that is decoded is its own."""
    takes_over, packs = tree.descend(lambda above, below: True)
    return takes_over, [tokens] * len(packs)


def relay(tree: PackTree) -> Decisions:
    """RelayAttention shares a single level, the system prompt; what follows is each query's own.
    It leaves splits to FlashAttention: here a part for each item that the SMs run at once."""
    takes_over, packs = tree.descend(lambda above, below: above.parent >= 0)
    tokens = sum(tree.ctas(pack) * pack.tokens for pack in packs) * tree.target.num_kv_heads
    slots = tree.target.num_sms * tree.target.items_per_sm
    return takes_over, [64 * max(1, -(-tokens // (64 * slots)))] * len(packs)


def chunk(tree: PackTree) -> Decisions:
    """ChunkAttention: "we only process those chunks shared by multiple sequences", of 64 tokens
    each, then "those chunks only related to the current sequence", one CTA a sequence."""
    takes_over, packs = tree.descend(lambda above, below: False)
    return takes_over, [64 if pack.queries > 1 else WHOLE for pack in packs]


def fasttree(tree: PackTree) -> Decisions:
    """A child takes over if both packs then compute less in vain, the partials' cost included.
    Packs of more than 16 queries are launched first, then the others: in pieces of 1,024 tokens,
    or of 128 where these are fewer than the SMs, or than four an SM in the second phase."""
    target = tree.target
    cost = partial(padding, target.num_q_heads // target.num_kv_heads)

    def pays(above: Pack, below: Pack) -> bool:
        left, size, tokens = above.queries, below.queries, above.tokens
        apart = cost(left, tokens) + cost(size, below.tokens) + 0.1 * size
        return apart > cost(left - size, tokens) + cost(size, tokens + below.tokens)

    def tokens_of(large: bool) -> int:
        phase = [pack for pack in packs if (pack.queries > 16) == large]
        pieces = sum(tree.ctas(pack) * -(-pack.tokens // 1024) for pack in phase)
        few = pieces * target.num_kv_heads < target.num_sms * (1 if large else 4)
        return 128 if few else 1024

    takes_over, packs = tree.descend(pays)
    lengths = {large: tokens_of(large) for large in (True, False)}
    return takes_over, [lengths[pack.queries > 16] for pack in packs]


def padding(group: int, queries: int, tokens: int) -> float:
    """What FastTree's tiles that are not full compute in vain, with its authors' weights
    (FastTree-Artifact, kernel_bench/fasttree.py): up to 16 queries have tiles of 16 queries and 128
    tokens, more have tiles of 64 and 32. ``group``: query heads of a KV head."""
    if queries == 0:
        return 0.0
    tile_queries, tile_tokens = (16, 128) if queries <= 16 else (64, 32)
    idle_queries, idle_tokens = -queries % tile_queries, max(0, tile_tokens - tokens)
    return group * (0.66 * idle_queries * tokens + 0.33 * idle_tokens * queries)


RULES: dict[str, Callable[[PackTree], Decisions]] = {
    "pat-naive": pat_naive,
    "paged-v1": partial(paged, tokens=WHOLE),
    "paged-v2": partial(paged, tokens=512),
    "relay": relay,
    "chunk": chunk,
    "fasttree": fasttree,
}
OURS, PAT = "ours", "pat"  # the library's policies; the second is PAT to the letter
NAMES = (OURS, PAT, *RULES)


def plan_by(name: str, batch: Forest, target: Target) -> Plan:
    """The plan of one of ``NAMES``."""
    if name == OURS:
        return Planner(target).plan(batch.paths, batch.seq_lens)
    roomy = replace(target, policy="pat", max_items=ROOM, max_partials=ROOM)
    plan = _plan_by(name, batch, roomy)
    if plan.num_wide_items == 0:  # no CTA has more than 64 rows: rules that count CTAs count these
        tiles = tuple(tile for tile in target.row_tiles if tile <= _C.WIDE_ROWS)
        plan = _plan_by(name, batch, replace(roomy, row_tiles=tiles))
    return plan


def _plan_by(name: str, batch: Forest, target: Target) -> Plan:
    planner = Planner(target)
    plan = planner.plan(batch.paths, batch.seq_lens)
    if name == PAT:
        return plan
    nodes, of_queries = planner.last_tree()
    starts = [nodes[node][2] if node >= 0 else 0 for node in of_queries]
    ends = zip(of_queries, starts, batch.seq_lens, strict=True)
    tails = [Pack(node, start, end, int(end > start)) for node, start, end in ends]
    takes_over, tokens = RULES[name](PackTree([Pack(*node) for node in nodes], tails, target))
    return planner.plan_packs(batch.seq_lens, takes_over, tokens)


def measure(batch: Forest, heads: Heads, clock: Clock | None) -> list[dict[str, Any]]:
    """A row for each name: items, K/V tokens read over those that the batch has, partial results a
    query; with a clock a layer's time in us, that over ours, and the error of the output."""
    target = PatOptions().target(batch, heads)
    plans = {name: plan_by(name, batch, target) for name in NAMES}
    rows: dict[str, dict[str, Any]] = {
        name: {
            "family": batch.family,
            "batch": str(batch),
            "rule": name,
            "items": plan.num_items,
            "read": plan.kv_tokens_read(sum(batch.seq_lens)) / batch.unique_tokens,
            "partials": plan.num_partials / batch.num_queries,
        }
        for name, plan in plans.items()
    }
    if clock:
        torch.cuda.empty_cache()
        inputs, scale, graphs = device_batch(batch, heads), heads.dim**-0.5, {}
        for name, plan in plans.items():
            # PAT launches a kernel for each row tile on a stream of its own.
            settings = PatOptions(PAT if name in (PAT, "pat-naive") else "default")
            layer = Layer(inputs, batch, heads, settings, scale, plan)
            graphs[name] = capture(layer.attend)
            out = layer.attend().fill_(float("nan"))
            graphs[name].replay()
            rows[name]["error"] = error_of(out, inputs, scale)
        us, _ = clock.compare({name: graph.replay for name, graph in graphs.items()})
        for name, row in rows.items():
            row |= {"us": us[name], "over_ours": us[name] / us[OURS]}
    return list(rows.values())


def table(rows: Sequence[dict[str, Any]], key: str) -> list[str]:
    """A line for each rule with the means of families, and of all batches: geometric ones, but of
    partial results, of which a plan may have none."""
    mean = statistics.mean if key == "partials" else geomean
    families = [*dict.fromkeys(row["family"] for row in rows), "all"]
    lines = [f"{key:10}" + "".join(f"{family:>9}" for family in families)]
    for name in NAMES:
        mine = [row for row in rows if row["rule"] == name]
        means = [
            mean([row[key] for row in mine if family in (row["family"], "all")])
            for family in families
        ]
        lines.append(f"{name:10}" + "".join(f"{each:9.3f}" for each in means))
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and conditions")
    file, heads = parser.parse_args(arguments).json, Heads(32, 8)
    on_gpu = torch.cuda.is_available()
    clock = Clock(50.0) if on_gpu else None
    device = torch.cuda.get_device_name() if on_gpu else "no GPU, plans for an H200"
    print(device, flush=True)
    batches = [*PAPER_TREES, *all_forests()]
    rows = [row for batch in batches for row in measure(batch, heads, clock)]
    document = conditions("papers", "benchmarks.papers", device, {"heads": str(heads)})
    write(document | {"rows": rows}, file)
    for key in ("over_ours",) if on_gpu else ("items", "read", "partials"):
        print("\n".join(table(rows, key)))
    wrong = [row for row in rows if not row.get("error", 0.0) <= MAX_DIFFERENCE]
    for row in wrong:
        print(f"{row['batch']}: the output of {row['rule']} is off by {row['error']:.2g}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
