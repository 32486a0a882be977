# SPDX-License-Identifier: Apache-2.0
"""Measures the rates of a GPU as our kernels reach them, each from batches that differ in one
thing, so that the launch and whatever else they have in common cancels out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sglang_pat.bench.common.forests import Forest
from sglang_pat.bench.common.trees import Tree
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.calibrate.batches import regular
from sglang_pat.calibrate.machine import CalibrationError, Machine
from sglang_pat.planner import Plan, plan
from sglang_pat.profiles import Costs, Profile
from sglang_pat.target import Target

KV_BYTES = 2  # of an element: bf16
# An item's overhead may hide behind the loads of others, but a plan must not take it for nothing.
LEAST_OVERHEAD_S = 1e-7
LEAST_WEIGHT = 0.01

# Batches are as large as gives each SM so many items, KV heads counted: then none is worth a split.
# Private sequences for the bandwidth, and their tokens.
BANDWIDTH_ITEMS, BANDWIDTH_TOKENS = 16, (1024, 2048)
# Tokens that as many queries share as fill so many row tiles, for the products.
PRODUCT_TILES, PRODUCT_TOKENS = 16, (4096, 12_288)
# Private sequences for an item's overhead, of more than the 64 tokens up to which several items run
# side by side.
OVERHEAD_ITEMS, OVERHEAD_TOKENS = (64, 128), (72, 320)
# Pairs of queries and the tokens that each pair shares, read by one item or by two.
REREAD_PAIRS, REREAD_TOKENS = 8, 2048

Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """A machine, the heads to measure with, and the profile that plans are made by meanwhile."""

    machine: Machine
    heads: Heads
    profile: Profile

    @property
    def token_bytes(self) -> int:
        """K and V of one token, all KV heads."""
        return 2 * KV_BYTES * self.heads.kv * self.heads.dim

    def queries(self, items: int) -> int:
        """Queries that give each SM ``items`` items, if each query has one for every KV head."""
        return math.ceil(items * self.profile.sms / self.heads.kv)

    def target(self, queries: int, **options: Any) -> Target:
        """For so many queries, with room for many partials. ``options``: fields of ``Target``."""
        values: dict[str, Any] = {"max_partials": 8 * queries + 8192, "kv_bytes": KV_BYTES}
        return Target.of_profile(
            self.profile,
            num_q_heads=self.heads.q,
            num_kv_heads=self.heads.kv,
            head_dim=self.heads.dim,
            max_queries=queries,
            **(values | options),
        )

    def plan(self, batch: Forest, shared: bool = True, **options: Any) -> tuple[Plan, Target]:
        """Without ``shared``, every query reads its whole sequence itself. Raises CalibrationError
        for a plan that is not what the options ask for."""
        target = self.target(batch.num_queries, **options)
        paths = batch.paths if shared else [()] * batch.num_queries
        made = plan(paths, batch.seq_lens, target)
        if made.degraded:
            raise CalibrationError(
                f"the plan of {batch.name} for {self.heads} heads was made {made.degraded}: "
                "calibrate with heads of a smaller group"
            )
        return made, target

    def seconds(self, batch: Forest, shared: bool = True, **options: Any) -> float:
        return self.machine.seconds(batch, *self.plan(batch, shared, **options))


def measure(bench: Bench, say: Say) -> Costs:
    """The profile's costs with the four rates measured; ``say`` is told each.

    Raises CalibrationError for times from which a rate does not follow.
    """
    bytes_per_s = bandwidth(bench)
    say(f"bandwidth: {bytes_per_s / 1e12:.3g} TB/s of K/V")
    flops_per_s = products(bench)
    say(f"products: {flops_per_s / 1e12:.3g} TFLOP/s")
    overhead = item_overhead(bench)
    hidden = overhead < LEAST_OVERHEAD_S
    say(
        f"an item's overhead: {overhead * 1e6:.2g} us"
        + (f", hidden behind loads: taken as {LEAST_OVERHEAD_S * 1e6:g} us" if hidden else "")
    )
    weight = reread_weight(bench, bytes_per_s)
    say(f"a token read again: {weight:.2f} of a first read")
    return replace(
        bench.profile.costs,
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        item_overhead_s=max(overhead, LEAST_OVERHEAD_S),
        reread_weight=min(max(weight, LEAST_WEIGHT), 1.0),
    )


def bandwidth(bench: Bench) -> float:
    """Bytes of K and V per second, of items that run long and share nothing."""
    queries = bench.queries(BANDWIDTH_ITEMS)
    short, long = (regular(Tree((queries,), (tokens,))) for tokens in BANDWIDTH_TOKENS)
    seconds = bench.seconds(long, branching="never") - bench.seconds(short, branching="never")
    more = (long.unique_tokens - short.unique_tokens) * bench.token_bytes
    return more / _positive(seconds, "reading twice as many tokens")


def products(bench: Bench) -> float:
    """Operations per second, of items of the largest row tile, whose tokens are in the L2."""
    tile = bench.target(1).row_tiles[-1]
    # At least one such item for each SM, or the plan has smaller ones.
    tiles = max(PRODUCT_TILES, math.ceil(bench.profile.sms / bench.heads.kv))
    queries = tiles * max(1, tile // (bench.heads.q // bench.heads.kv))
    short, long = (regular(Tree((1, queries), (tokens, 1))) for tokens in PRODUCT_TOKENS)
    options: dict[str, Any] = {"branching": "never", "policy": "naive"}
    seconds = bench.seconds(long, **options) - bench.seconds(short, **options)
    more = 4 * queries * (PRODUCT_TOKENS[1] - PRODUCT_TOKENS[0]) * bench.heads.q * bench.heads.dim
    return more / _positive(seconds, "three times the products")


def item_overhead(bench: Bench) -> float:
    """Seconds of an item on its SM, its tokens not counted; may be 0 or less where it hides."""
    few, many = map(bench.queries, OVERHEAD_ITEMS)
    a_query = {}
    for tokens in OVERHEAD_TOKENS:
        times = [
            bench.seconds(regular(Tree((queries,), (tokens,))), branching="never")
            for queries in (few, many)
        ]
        a_query[tokens] = _positive(times[1] - times[0], "twice as many items") / (many - few)
    short, long = OVERHEAD_TOKENS
    a_token = (a_query[long] - a_query[short]) / (long - short)
    return (a_query[short] - short * a_token) * bench.profile.sms / bench.heads.kv


def reread_weight(bench: Bench, bytes_per_s: float) -> float:
    """Time of reading a token again soon after its first read, of that of a first read."""
    pairs = bench.queries(REREAD_PAIRS)
    batch = regular(Tree((pairs, 2 * pairs), (REREAD_TOKENS, 0)))
    once = bench.seconds(batch, branching="never", policy="naive")
    twice = bench.seconds(batch, shared=False, branching="never")
    return (twice - once) * bytes_per_s / (batch.unique_tokens * bench.token_bytes)


def _positive(seconds: float, what: str) -> float:
    if seconds <= 0:
        raise CalibrationError(
            f"{what} took {seconds * 1e6:.1f} us more, which cannot be: is something else running "
            "on this GPU? Stop it and run this again"
        )
    return seconds
