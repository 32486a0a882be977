# SPDX-License-Identifier: Apache-2.0
"""Properties of pack tree, schedule and plan; no GPU and no SGLang needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.trees import Batch, batch_of, batches, check_plan, ranges_of, target, targets

from sglang_pat import decode
from sglang_pat.bench.common.trees import PAPER_TREES, Tree
from sglang_pat.planner import Planner, plan
from sglang_pat.target import Target


@settings(max_examples=400, deadline=None)
@given(batches(), targets())
def test_every_token_in_exactly_one_item(batch: Batch, made_for: Target) -> None:
    made = plan(batch.paths, batch.seq_lens, made_for)
    assert made.degraded == ""
    check_plan(made, batch, made_for, batch.seq_lens)


@settings(max_examples=150, deadline=None)
@given(batches(), targets())
def test_plan_holds_while_the_tails_grow(batch: Batch, made_for: Target) -> None:
    made = plan(batch.paths, batch.seq_lens, made_for)
    grown = np.asarray(made.max_seq_lens, dtype=np.int64)
    assert made.fits(grown.ctypes.data, len(grown))
    check_plan(made, batch, made_for, grown.tolist())
    if len(grown):
        grown = grown + 1
        assert not made.fits(grown.ctypes.data, len(grown))
    room = np.asarray(made.max_seq_lens) - np.asarray(batch.seq_lens, dtype=np.int64)
    for query, path in enumerate(batch.paths):
        ends_in_the_tree = (path[-1][2] if path else 0) == batch.seq_lens[query]
        assert room[query] >= 128 or (room[query] == 0 and ends_in_the_tree)


@pytest.mark.parametrize("tree", PAPER_TREES, ids=str)
def test_the_papers_trees(tree: Tree) -> None:
    batch, made_for = batch_of(tree), target()
    check_plan(plan(batch.paths, batch.seq_lens, made_for), batch, made_for, batch.seq_lens)


@settings(max_examples=150, deadline=None)
@given(batches(), targets(), st.randoms(use_true_random=False))
def test_deterministic_and_blind_to_batch_order(batch: Batch, made_for: Target, random) -> None:
    def shape(of: Batch) -> tuple[list, list]:
        made = Planner(made_for).plan(of.paths, of.seq_lens)
        ranges: list[list[tuple[int, int]]] = [[] for _ in of.seq_lens]
        whole = []
        for item in made.items:
            parts = ranges_of(made, item, of.seq_lens)
            whole.append(sorted((part.start, part.length, len(part.queries)) for part in parts))
            for part in parts:
                for query in part.queries:
                    ranges[query].append((part.start, part.length))
        per_query = zip(of.paths, of.seq_lens, map(sorted, ranges), strict=True)
        return sorted(whole), sorted(per_query)

    first, again = (plan(batch.paths, batch.seq_lens, made_for) for _ in range(2))
    assert first.items.tobytes() == again.items.tobytes()
    assert first.members.tobytes() == again.members.tobytes()
    order = list(range(len(batch.seq_lens)))
    random.shuffle(order)
    assert shape(batch) == shape(batch.permuted(order))


@settings(max_examples=100, deadline=None)
@given(batches(max_queries=24), st.integers(24, 40), st.integers(0, 40))
def test_a_plan_always_fits_its_buffers(batch: Batch, max_items: int, max_partials: int) -> None:
    made_for = target(max_queries=24, max_items=max_items, max_partials=max_partials)
    made = plan(batch.paths, batch.seq_lens, made_for)
    assert made.num_items <= max_items and made.num_partials <= max_partials
    check_plan(made, batch, made_for, batch.seq_lens)
    roomy = plan(batch.paths, batch.seq_lens, target(max_queries=24, branching="never"))
    too_small = roomy.num_items > max_items or roomy.num_partials > max_partials
    assert bool(made.degraded) == (too_small and made.num_segments == 0)


def modelled_bytes(batch: Batch, made_for: Target) -> float:
    """K/V and partial bytes of one KV head for a plan without splits."""
    made = plan(batch.paths, batch.seq_lens, made_for)
    group = made_for.num_q_heads // made_for.num_kv_heads
    kv = made.kv_tokens_read(sum(batch.seq_lens)) * 2 * made_for.head_dim * made_for.kv_bytes
    state = 2 * group * (made_for.head_dim * made_for.partial_bytes + 4)
    return kv + made.num_partials * state


@pytest.mark.parametrize("num_q_heads", [8, 16, 32, 64])
@pytest.mark.parametrize("tree", PAPER_TREES, ids=str)
def test_the_byte_rule_beats_the_papers(tree: Tree, num_q_heads: int) -> None:
    batch = batch_of(tree)
    # One unit: nothing splits; overhead and cache left out, so that bytes are all there is. No wide
    # tile either: packing goes by half of one.
    common = dict(
        num_q_heads=num_q_heads,
        units=1,
        item_overhead_s=1e-12,
        reread_weight=1.0,
        row_tiles=(16, 32, 64),
        branching="never",
    )
    best = modelled_bytes(batch, target(policy="bytes", **common))
    assert best <= modelled_bytes(batch, target(policy="paper", **common))
    assert best <= modelled_bytes(batch, target(policy="naive", **common))


def test_wide_items_come_first_and_fill_the_machine() -> None:
    """A wide item takes a whole unit, so that there is one for every second unit or none at all."""
    many = batch_of(Tree((1, 1024), (2048, 32)))
    made = plan(many.paths, many.seq_lens, target(branching="never"))
    tiles = made.items["row_tile"]
    wide = int((tiles > 64).sum())
    assert 2 * wide * 8 >= 132 and (tiles[:wide] == 128).all()
    assert made.num_wide_items == wide
    few = batch_of(Tree((1, 256), (256, 32)))
    made = plan(few.paths, few.seq_lens, target(branching="never"))
    assert made.items["row_tile"].max() == 64 and made.num_wide_items == 0


def test_heavy_items_come_before_light_ones() -> None:
    """Half of an SM begins with those, the other with these: each kind by descending length."""
    batch = batch_of(Tree((1, 16, 32, 64), (512, 96, 160, 200)))
    made = plan(batch.paths, batch.seq_lens, target(branching="never"))
    assert made.num_wide_items == 0 < made.num_heavy_items < made.num_items
    tiles = made.items["row_tile"]
    assert (tiles[: made.num_heavy_items] == 64).all()
    assert (tiles[made.num_heavy_items :] <= 32).all()
    lens = made.items["kv_len"][: made.num_heavy_items]
    assert (lens[1:] <= lens[:-1] * 1.25).all()  # the sort is one by buckets


def ranges_of_query(made, query: int) -> list[tuple[int, int]]:
    found = []
    for item in made.items:
        if query in made.members[item["member_offset"] :][: item["num_queries"]]["query"]:
            found.append((int(item["kv_start"]), int(item["kv_len"])))
    return sorted(found)


def test_the_papers_rule_on_a_hand_made_tree() -> None:
    # Node 1 (32 tokens, 10 queries) over node 2 (8 queries) and node 3 (2 queries): 4 * 8 >= 32
    # merges node 2 into node 1's tokens, 4 * 2 < 32 leaves node 3 apart. Tails (4 * 1) stay apart
    # from nodes longer than 4 tokens and merge into node 3, which has 4.
    paths = [[(1, 0, 32), (2, 32, 92)]] * 8 + [[(1, 0, 32), (3, 32, 36)]] * 2
    lens = [100] * 8 + [50] * 2
    made = plan(paths, lens, target(policy="paper", units=1, branching="never"))
    assert ranges_of_query(made, 0) == [(0, 92), (92, -1)]
    assert ranges_of_query(made, 9) == [(0, 32), (32, -1)]
    naive = plan(paths, lens, target(policy="naive", units=1, branching="never"))
    assert ranges_of_query(naive, 0) == [(0, 32), (32, 60), (92, -1)]
    assert ranges_of_query(naive, 9) == [(0, 32), (32, 4), (36, -1)]


def test_the_papers_equations_count_what_a_pack_took_over() -> None:
    # Node 1 (32 tokens, 17 queries) gives way to node 2 (12 queries): 4 * 12 >= 32. The pack of
    # node 2 then has 32 + 20 tokens, and to node 3 (10 queries) equation 2 gives 4 * 10 - 52 < 0
    # more than equation 1, so they are two packs. By its own 20 tokens node 2 would have merged.
    paths = [[(1, 0, 32), (2, 32, 52), (3, 52, 152)]] * 10
    paths += [[(1, 0, 32), (2, 32, 52)]] * 2 + [[(1, 0, 32)]] * 5
    lens = [160] * 10 + [60] * 2 + [40] * 5
    common = dict(units=1, item_overhead_s=1e-12, branching="never")
    made = plan(paths, lens, target(policy="paper", **common))
    assert ranges_of_query(made, 0) == [(0, 52), (52, 100), (152, -1)]
    assert ranges_of_query(made, 10) == [(0, 52), (52, -1)]
    assert ranges_of_query(made, 16) == [(0, 32), (32, -1)]
    # The byte rule: 12 partials of 4,128 bytes against 32 tokens of 512, then 10 against 52: both
    # merge, and so do the two tails of node 2, behind which nobody is left to read it.
    by_bytes = plan(paths, lens, target(policy="bytes", **common))
    assert ranges_of_query(by_bytes, 0) == [(0, 152), (152, -1)]


def test_the_papers_tie_goes_to_merging() -> None:
    # Eight of ten queries below 32 tokens: 4 * 8 == 32, where both schemes have one profit.
    def first_pack(tokens: int) -> tuple[int, int]:
        paths = [[(1, 0, tokens), (2, tokens, tokens + 60)]] * 8 + [[(1, 0, tokens)]] * 2
        lens = [tokens + 90] * 10
        made = plan(paths, lens, target(policy="paper", units=1, branching="never"))
        return ranges_of_query(made, 0)[0]

    assert first_pack(32) == (0, 92)
    assert first_pack(33) == (0, 33)


def test_the_paper_charges_a_read_that_nobody_makes() -> None:
    # 100 tokens over 30 queries in node 2, which merges (4 * 30 >= 100), and 5 in node 3. Without
    # these five nobody would read the 100 tokens by themselves, yet equation 2 as written charges
    # that read: 4 * 5 - 100 < 0, so they keep a pack. The byte rule sees that it goes away.
    paths = [[(1, 0, 100), (2, 100, 400)]] * 30 + [[(1, 0, 100), (3, 100, 400)]] * 5
    common = dict(units=1, item_overhead_s=1e-12, row_tiles=(16, 32, 64, 128), branching="never")
    made = plan(paths, [440] * 35, target(policy="paper", **common))
    assert ranges_of_query(made, 0) == [(0, 400), (400, -1)]
    assert ranges_of_query(made, 30) == [(0, 100), (100, 300), (400, -1)]
    by_bytes = plan(paths, [440] * 35, target(policy="bytes", **common))
    assert ranges_of_query(by_bytes, 30) == [(0, 400), (400, -1)]


def test_the_byte_rule_counts_group_tiles_and_partials() -> None:
    def splits(shared: int, queries: int, **overrides) -> int:
        common = dict(units=1, item_overhead_s=1e-12, reread_weight=1.0, branching="never")
        common |= overrides
        made = plan([[(1, 0, shared)]] * queries, [shared + 40] * queries, target(**common))
        return int(made.queries["num_splits"].max())

    # Two queries, one shared node of L tokens: packing saves one read of 512 L bytes and costs four
    # partials of 2 g (4 d + 4) bytes in fp32, half in bf16: break-even at 8.06 g tokens.
    for num_q_heads, group in ((8, 1), (32, 4), (64, 8)):
        assert splits(8 * group, 2, num_q_heads=num_q_heads) == 1
        assert splits(9 * group, 2, num_q_heads=num_q_heads) == 2
        assert splits(5 * group, 2, num_q_heads=num_q_heads, partial_bytes=2) == 2
    # 17 queries of 8 heads need two tiles of 128 rows: the 17th reads the node by itself for free.
    alone = target(num_q_heads=64, units=1, item_overhead_s=1e-12, branching="never")
    made = plan([[(1, 0, 400)]] * 17, [440] * 17, alone)
    assert sorted(made.queries["num_splits"].tolist()) == [1] + [2] * 16


def test_splits_fill_the_machine() -> None:
    one = plan([[]], [131072], target())
    assert one.num_items * 8 >= 132  # eight KV heads, 132 SMs
    many = plan([[]] * 1024, [1024] * 1024, target())
    assert many.num_items == 1024
    ragged = plan([[]] * 64, [32768] + [200] * 63, target())
    assert ragged.num_items > 64 + 8


def test_mean_split_keeps_items_under_the_mean() -> None:
    lens = [8192] * 2 + [1024] * 14
    made = plan([[]] * 16, lens, target(split="mean"))
    mean = sum(lens) / 16
    assert made.num_items == 2 * 5 + 14  # 8192 / 1920 rounded up
    assert made.items["kv_len"].max() <= mean


def test_mean_split_makes_equal_parts_however_short() -> None:
    """As the paper has it: nothing is too short for it, and tiles round nothing up."""
    lens = [300] + [50] * 9  # a mean of 75
    made = plan([[]] * 10, lens, target(split="mean"))
    pieces = ranges_of_query(made, 0)
    assert pieces == [(0, 75), (75, 75), (150, 75), (225, -1)]
    assert all(len(ranges_of_query(made, query)) == 1 for query in range(1, 10))
    # A shared pack counts once for each of its row tiles: 20 queries of 4 heads are two of 64 rows,
    # and (2 * 400 + 20 * 40) / 22 = 72 tokens.
    shared = target(split="mean", policy="naive", branching="never", row_tiles=(16, 32, 64))
    made = plan([[(1, 0, 400)]] * 20, [440] * 20, shared)
    parts = [length for start, length in ranges_of_query(made, 0) if start < 400]
    assert parts == [67] * 5 + [65]


def test_items_run_heaviest_first() -> None:
    tree = Tree((1, 8, 512), (512, 512, 256))
    made = plan(tree.paths, tree.seq_lens, target(units=1, branching="never"))
    cost = np.maximum(made.items["kv_len"], 0) + 256 * (made.items["kv_len"] < 0)
    shared = made.items["num_queries"] > 1
    assert cost[0] == cost.max() and shared[0]
    assert np.all(cost[:-1] * 1.13 >= cost[1:])  # a bucket spans an eighth of an octave


def test_64_steady_requests_need_few_plans() -> None:
    lens = np.arange(100, 164, dtype=np.int64)
    paths = [[(1, 0, 64), (2 + i % 4, 64, 90)] for i in range(64)]
    planner = Planner(target())
    plans, made = 0, None
    for _ in range(256):
        if made is None or not made.fits(lens.ctypes.data, len(lens)):
            made = planner.plan(paths, lens)
            plans += 1
        lens += 1
    assert plans <= 8


def test_a_growing_tail_is_split_in_time() -> None:
    planner = Planner(target())
    made, plans = None, 0
    for length in range(64, 8193):
        lens = np.array([length], dtype=np.int64)
        if made is None or not made.fits(lens.ctypes.data, 1):
            made = planner.plan([[]], lens)
            plans += 1
        # Never more than 384 tokens beyond twice the chunk that a fresh plan would use.
        if length % 512 == 0:
            fresh = planner.plan([[]], lens).items["kv_len"].max()
            tail = length - made.items["kv_start"].max()
            assert tail <= 2 * max(fresh, 128) + 384
    assert made.num_items >= 8 and plans <= 64


@pytest.mark.parametrize(
    ("paths", "lens", "message"),
    [
        ([[(1, 0, 5), (2, 6, 9)]], [10], r"query 0: node 2 starts at 6 and leaves a gap after 5"),
        ([[(1, 0, 5), (2, 4, 9)]], [10], r"query 0: node 2 starts at 4 and overlaps .* before 5"),
        ([[(1, 1, 5)]], [10], r"node 1 starts at 1 and leaves a gap after 0"),
        ([[(1, 0, 0)]], [10], r"node 1 has the empty or negative span \[0, 0\)"),
        ([[(1, 0, -3)]], [10], r"node 1 has the empty or negative span \[0, -3\)"),
        ([[(1, 0, 11)]], [10], r"node 1 ends at 11 beyond its sequence of 10 tokens"),
        ([[(1, 0, 5), (1, 5, 9)]], [10], r"node 1 stands under node 1, another .* under node -1"),
        ([[(1, 0, 2), (2, 2, 4)], [(2, 0, 2), (1, 2, 4)]], [9, 9], r"query 1: node 2 stands under"),
        ([[(1, 0, 2), (3, 2, 4)], [(2, 0, 3), (3, 3, 5)]], [9, 9], r"query 1: node 3 stands under"),
        ([[]], [-1], r"query 0: sequence length -1 is not in"),
        ([[]], [2**31], r"query 0: sequence length 2147483648 is not in"),
        ([[]], [1, 2], r"paths of 1 queries.*2 sequence lengths"),
        ([[]], [1.5], r"seq_lens is of type float64, must be integers"),
        ([[]], ["1"], r"seq_lens is of type <U1, must be integers"),
        ([[]] * 5, [1] * 5, r"a batch of 5 queries does not fit the plan's 4 rows"),
    ],
)
def test_bad_input_is_named(paths, lens, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(paths, lens, target(max_queries=4))


@pytest.mark.parametrize("path", [[(1, 0)], [1, 2, 3], [("a", 0, 5)], 7, [(1, 0.5, 5)]])
def test_elements_of_another_form_are_named(path) -> None:
    with pytest.raises(TypeError):
        plan([path], [10], target())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"units": 0}, "units is 0"),
        ({"num_q_heads": 30}, "num_q_heads is 30"),
        ({"row_tiles": (16, 16)}, "row_tiles"),
        ({"row_tiles": ()}, "row_tiles"),
        ({"row_tiles": (2,)}, "fewer than the GQA group of 4"),
        ({"kv_tiles": (0, 32)}, "kv_tiles"),
        ({"reread_weight": 0.0}, "reread_weight is 0"),
        ({"partial_bytes": 3}, "partial_bytes is 3"),
        ({"max_items": 10}, "max_items is 10"),
        ({"policy": "magic"}, "policy is 'magic'"),
        ({"split": "never"}, "split is 'never'"),
        ({"branching": "maybe"}, "branching is 'maybe'"),
        ({"branch_rows": (65,)}, "branch_rows has 65, must be from 1 to 64"),
        ({"branch_rows": (0,)}, "branch_rows has 0"),
        ({"branch_limits": (0,)}, "branch_limits has 0, must be positive"),
        ({"max_segments": -1}, "max_segments is -1"),
        ({"max_branch_tokens": -1}, "max_branch_tokens is -1"),
    ],
)
def test_targets_are_checked(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        target(**overrides)


@pytest.mark.parametrize("head_dim", [65, 0, -8, 520])
def test_head_dims_that_the_cpu_does_not_have(head_dim: int) -> None:
    message = f"head_dim is {head_dim}, the CPU executor takes multiples of 8 up to 512: pad"
    with pytest.raises(ValueError, match=message):
        Target.cpu(threads=2, num_q_heads=8, num_kv_heads=2, head_dim=head_dim, max_queries=4)


@pytest.mark.parametrize("head_dim", [8, 80, 512])
def test_head_dims_that_the_cpu_has(head_dim: int) -> None:
    """The bounds of the target are the executor's."""
    heads = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": head_dim}
    made = plan([[]], [3], Target.cpu(threads=2, max_queries=4, **heads))
    k_cache = torch.randn(4, 2, head_dim)
    table, rows = torch.arange(3, dtype=torch.int32)[None], torch.tensor([0])
    out = decode(
        torch.randn(1, 8, head_dim), k_cache, k_cache, table, rows, rows + 3, made, scale=1.0
    )
    assert out.isfinite().all()


SMALL = """\
<Plan: 3 queries, 8 query and 2 KV heads, 5 items (2 shared), 8 partial results>
tree:
  tokens [0, 600) of queries 0-2
    tokens [600, 900) of queries 0, 2
      tokens [900, end of sequence) of query 0
      tokens [900, end of sequence) of query 2
    tokens [600, end of sequence) of query 1
items, in the order in which they begin:
"""


def test_a_printed_plan_shows_its_tree_and_its_items() -> None:
    paths = [[(1, 0, 600), (2, 600, 900)], [(1, 0, 600)], [(1, 0, 600), (2, 600, 900)]]
    made_for = target(units=1, num_q_heads=8, num_kv_heads=2, policy="naive", branching="never")
    made = plan(paths, [950, 640, 910], made_for)
    assert repr(made) == SMALL.splitlines()[0]
    assert str(made).startswith(SMALL)
    items = str(made).removeprefix(SMALL).splitlines()
    assert len(items) == made.num_items
    first = made.items[0]
    assert (first["kv_start"], first["kv_len"], first["num_queries"]) == (0, 600, 3)
    assert (
        items[0].split()
        == (
            f"item 0: light queries 0-2 tokens [0, 600) in the row of query {first['row']} "
            f"tile of {first['row_tile']} rows, to partials 0, 3, 5"
        ).split()
    )
    private = plan([[]], [5], target())
    assert "to output" in str(private) and repr(private).startswith("<Plan: 1 query, 32 query and")


def test_a_split_node_is_printed_once() -> None:
    made = plan([[(1, 0, 4096)]] * 2, [4100] * 2, target(branching="never"))
    assert made.num_shared_items > 1
    assert str(made).count("of queries 0-1\n") == 1
    assert "  tokens [0, 4096) of queries 0-1\n    tokens [4096, end of sequence) of" in str(made)


@settings(max_examples=100, deadline=None)
@given(batches(), targets())
def test_any_plan_prints_every_node_within_bounds(batch: Batch, made_for: Target) -> None:
    made = plan(batch.paths, batch.seq_lens, made_for)
    lines = str(made).splitlines()
    assert lines[0] == repr(made) and len(lines) <= 2 * 25 + 3
    if made.num_items:
        at = lines.index("items, in the order in which they begin:")
        more = made.num_items - 24
        assert len(lines) - at - 1 == min(made.num_items, 25)
        assert lines[-1].startswith(f"  ... and {more} more item" if more > 0 else "  item ")
        if at - 2 < 25 and "..." not in "".join(lines[1:at]):
            listed = [line.rpartition(" of quer")[2].partition(" ")[2] for line in lines[2:at]]
            runs = [run.split("-") for queries in listed for run in queries.split(", ")]
            shown = {query for run in runs for query in range(int(run[0]), int(run[-1]) + 1)}
            assert shown == set(made.members["query"].tolist())


def test_a_large_plan_prints_a_page() -> None:
    tree = Tree((1, 8, 512), (512, 512, 256))
    made = plan(tree.paths, tree.seq_lens, target(branching="never"))
    text = str(made)
    assert len(text) < 12_000 and f"... and {made.num_items - 24} more items" in text
    assert "more nodes\n" in text and "(" in repr(made) and "\n" not in repr(made)


def test_a_degraded_plan_says_so() -> None:
    made = plan([[(1, 0, 90)]] * 4, [100] * 4, target(max_queries=4, max_items=4, max_partials=0))
    assert made.degraded and repr(made).endswith(f"degraded: {made.degraded}>")


def test_clipped_paths_share_what_both_have() -> None:
    # Query 2 is protected to token 30 of node 1: it shares these and keeps the rest private.
    paths = [[(1, 0, 80)], [(1, 0, 80)], [(1, 0, 80)]]
    made = Planner(target(units=1, policy="naive", branching="never")).plan(
        paths, [90, 90, 90], limits=[80, 80, 30]
    )
    assert ranges_of_query(made, 0) == [(0, 30), (30, 50), (80, -1)]
    assert ranges_of_query(made, 2) == [(0, 30), (30, -1)]


def test_sglangs_six_field_tuples() -> None:
    info = [(7, -1, 0, 40, 40, 2), (9, 7, 40, 60, 20, 0)]
    made = Planner(target(policy="naive", branching="never")).plan(
        [info, info, None], [70, 70, 10], limits=[60, 60, 0], fields=(0, 2, 3)
    )
    assert ranges_of_query(made, 1) == [(0, 60), (60, -1)]
    assert ranges_of_query(made, 2) == [(0, -1)]
