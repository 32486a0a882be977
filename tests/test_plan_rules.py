# SPDX-License-Identifier: Apache-2.0
"""Which packs pay: the rules of policies and splits on trees made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from kit.trees import (
    Batch,
    batch_of,
    ranges_of_query,
    target,
)

from benchmarks.common.trees import PAPER_TREES
from sglang_pat.explain.tree import Tree
from sglang_pat.planner import plan
from sglang_pat.target import Target


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
        num_sms=1,
        item_overhead_s=1e-12,
        reread_weight=1.0,
        row_tiles=(16, 32, 64),
        branching="never",
    )
    best = modelled_bytes(batch, target(policy="bytes", **common))
    assert best <= modelled_bytes(batch, target(policy="paper", **common))
    assert best <= modelled_bytes(batch, target(policy="naive", **common))


def test_the_papers_rule_on_a_hand_made_tree() -> None:
    # Node 1 (32 tokens, 10 queries) over node 2 (8 queries) and node 3 (2 queries): 4 * 8 >= 32
    # merges node 2 into node 1's tokens, 4 * 2 < 32 leaves node 3 apart. Tails (4 * 1) stay apart
    # from nodes longer than 4 tokens and merge into node 3, which has 4.
    paths = [[(1, 0, 32), (2, 32, 92)]] * 8 + [[(1, 0, 32), (3, 32, 36)]] * 2
    lens = [100] * 8 + [50] * 2
    made = plan(paths, lens, target(policy="paper", num_sms=1, branching="never"))
    assert ranges_of_query(made, 0) == [(0, 92), (92, -1)]
    assert ranges_of_query(made, 9) == [(0, 32), (32, -1)]
    naive = plan(paths, lens, target(policy="naive", num_sms=1, branching="never"))
    assert ranges_of_query(naive, 0) == [(0, 32), (32, 60), (92, -1)]
    assert ranges_of_query(naive, 9) == [(0, 32), (32, 4), (36, -1)]


def test_the_papers_equations_count_what_a_pack_took_over() -> None:
    # Node 1 (32 tokens, 17 queries) gives way to node 2 (12 queries): 4 * 12 >= 32. The pack of
    # node 2 then has 32 + 20 tokens, and to node 3 (10 queries) equation 2 gives 4 * 10 - 52 < 0
    # more than equation 1, so they are two packs. By its own 20 tokens node 2 would have merged.
    paths = [[(1, 0, 32), (2, 32, 52), (3, 52, 152)]] * 10
    paths += [[(1, 0, 32), (2, 32, 52)]] * 2 + [[(1, 0, 32)]] * 5
    lens = [160] * 10 + [60] * 2 + [40] * 5
    common = dict(num_sms=1, item_overhead_s=1e-12, branching="never")
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
        made = plan(paths, lens, target(policy="paper", num_sms=1, branching="never"))
        return ranges_of_query(made, 0)[0]

    assert first_pack(32) == (0, 92)
    assert first_pack(33) == (0, 33)


def test_the_paper_charges_a_read_that_nobody_makes() -> None:
    # 100 tokens over 30 queries in node 2, which merges (4 * 30 >= 100), and 5 in node 3. Without
    # these five nobody would read the 100 tokens by themselves, yet equation 2 as written charges
    # that read: 4 * 5 - 100 < 0, so they keep a pack. The byte rule sees that it goes away.
    paths = [[(1, 0, 100), (2, 100, 400)]] * 30 + [[(1, 0, 100), (3, 100, 400)]] * 5
    common = dict(num_sms=1, item_overhead_s=1e-12, row_tiles=(16, 32, 64, 128), branching="never")
    made = plan(paths, [440] * 35, target(policy="paper", **common))
    assert ranges_of_query(made, 0) == [(0, 400), (400, -1)]
    assert ranges_of_query(made, 30) == [(0, 100), (100, 300), (400, -1)]
    by_bytes = plan(paths, [440] * 35, target(policy="bytes", **common))
    assert ranges_of_query(by_bytes, 30) == [(0, 400), (400, -1)]


def test_the_byte_rule_counts_group_tiles_and_partials() -> None:
    def splits(shared: int, queries: int, **overrides) -> int:
        common = dict(num_sms=1, item_overhead_s=1e-12, reread_weight=1.0, branching="never")
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
    alone = target(num_q_heads=64, num_sms=1, item_overhead_s=1e-12, branching="never")
    made = plan([[(1, 0, 400)]] * 17, [440] * 17, alone)
    assert sorted(made.queries["num_splits"].tolist()) == [1] + [2] * 16


def test_mean_split_keeps_items_under_the_mean() -> None:
    lens = [8192] * 2 + [1024] * 14
    made = plan([[]] * 16, lens, target(split="mean"))
    mean = sum(lens) / 16
    assert made.num_items == 2 * 5 + 14  # 8192 / 1920 rounded up
    assert made.segments["kv_len"].max() <= mean


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


# Node 1 (1,000 tokens, 6 queries) over node 2 (300 tokens, 4 queries), which is over node 3 (200
# tokens, 2 queries). Each query has 100 tokens of its own but the last, which ends with node 1.
DEEP = [[(1, 0, 1000), (2, 1000, 1300), (3, 1300, 1500)]] * 2
DEEP += [[(1, 0, 1000), (2, 1000, 1300)]] * 2 + [[(1, 0, 1000)]] * 2
DEEP_LENS = [1600] * 2 + [1400] * 2 + [1100, 1000]


def deep(**rules: Any) -> list[list[tuple[int, int]]]:
    """Start and length of what each query's items read, by the rules."""
    made = plan(DEEP, DEEP_LENS, target(branching="never", **rules))
    assert not made.degraded
    return [ranges_of_query(made, query) for query in range(len(DEEP))]


def test_the_root_alone_is_packed() -> None:
    found = deep(policy="root", split="none")
    assert found[0] == found[1] == found[2] == found[3] == found[4] == [(0, 1000), (1000, -1)]
    assert found[5] == [(0, 1000)]
    made = plan(DEEP, DEEP_LENS, target(branching="never", policy="root", split="none"))
    assert made.kv_tokens_read(sum(DEEP_LENS)) == 1000 + 2 * 600 + 2 * 400 + 100


def test_queries_alone_are_whole_or_in_partitions() -> None:
    whole = deep(policy="queries", split="none")
    assert whole == [[(0, -1)]] * 6
    parts = deep(policy="queries", split="fixed", split_tokens=512)
    assert parts[0] == [(0, 512), (512, 512), (1024, 512), (1536, -1)]
    assert parts[5] == [(0, 512), (512, -1)]
    made = plan(DEEP, DEEP_LENS, target(branching="never", policy="queries", split="none"))
    assert made.num_shared_items == 0 and made.num_partials == 0
    assert made.kv_tokens_read(sum(DEEP_LENS)) == sum(DEEP_LENS)


def test_chunks_cut_only_what_several_queries_read() -> None:
    found = deep(policy="naive", split="chunks", split_tokens=256)
    node_1 = [(0, 256), (256, 256), (512, 256), (768, 232)]
    node_2, node_3 = [(1000, 256), (1256, 44)], [(1300, 200)]
    assert found[0] == [*node_1, *node_2, *node_3, (1500, -1)]
    assert found[2] == [*node_1, *node_2, (1300, -1)]
    assert found[5] == node_1
    # What one query reads stays whole, however long.
    made = plan([[]] * 2, [5000, 300], target(policy="naive", split="chunks", split_tokens=64))
    assert [ranges_of_query(made, query) for query in range(2)] == [[(0, -1)]] * 2


def test_fixed_pieces_cut_everything() -> None:
    found = deep(policy="naive", split="fixed", split_tokens=64)
    assert [length for start, length in found[0] if start < 1000] == [64] * 15 + [40]
    assert [start for start, _ in found[0] if start >= 1500] == [1500, 1564]
    # Of one pack there are at most 512 pieces.
    made = plan([[]], [100_000], target(policy="queries", split="fixed", split_tokens=64))
    pieces = ranges_of_query(made, 0)
    assert len(pieces) <= 512 and {length for _, length in pieces[:-1]} == {196}


@pytest.mark.parametrize("tokens", [0, -1])
def test_pieces_have_tokens(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"split_tokens is {tokens}, must be positive"):
        target(split_tokens=tokens)


@pytest.mark.parametrize("split", ["fixed", "chunks", "phases"])
def test_pieces_of_any_size_lose_no_token(split: str) -> None:
    for tokens in (2**31 - 1, 2**31 - 1000):
        found = deep(policy="naive", split=split, split_tokens=tokens)
        assert found[0] == [(0, 1000), (1000, 300), (1300, 200), (1500, -1)]
    with pytest.raises(ValueError, match="split_tokens is 2147483648, must be at most 2147483647"):
        target(split=split, split_tokens=2**31)


def test_sequences_of_any_length_lose_no_token() -> None:
    longest = 2**30
    for split in ("cost", "mean", "fixed", "phases"):
        rules = {"split": split, "max_items": 4096, "max_partials": 8192}
        made = plan([[]], [longest], target(policy="naive", branching="never", **rules))
        pieces = ranges_of_query(made, 0)
        starts = [start for start, _ in pieces]
        ends = [start + length for start, length in pieces[:-1]]
        assert starts == [0, *ends] and pieces[-1][1] == -1 and starts[-1] < longest


ONE_KV_HEAD = {"num_q_heads": 8, "num_kv_heads": 1, "branching": "cost"}


def shares(tree: Tree, **options: Any) -> bool:
    made_for = target(**(ONE_KV_HEAD | options))
    return plan(tree.paths, tree.seq_lens, made_for).num_shared_items > 0


def test_few_queries_that_share_little_get_items_of_their_own() -> None:
    """Two queries on half of their tokens: packed, they are no narrow units and start later."""
    few = Tree((1, 2), (512, 512))
    made = plan(few.paths, few.seq_lens, target(**ONE_KV_HEAD))
    assert made.num_shared_items == 0 and not made.degraded
    assert made.kv_tokens_read(sum(few.seq_lens)) == 2048
    assert all(ranges_of_query(made, query)[0][0] == 0 for query in range(2))
    assert shares(Tree((1, 2), (512, 512)), num_q_heads=4)  # narrow units though shared


@pytest.mark.parametrize("other", [{"branching": "never"}, {"policy": "naive"}, {"split": "mean"}])
def test_only_the_default_rules_share_nothing(other: dict[str, Any]) -> None:
    assert not shares(Tree((1, 2), (512, 512)))
    assert shares(Tree((1, 2), (512, 512)), **other)


def test_what_is_read_often_or_by_many_is_shared() -> None:
    short = Tree((1, 4), (96, 96))
    assert not shares(short)
    assert shares(Tree((1, 12), (4096, 416)))  # 5.9 reads of a token in the mean
    many, fewer = (Tree((1, count), (64, 480)) for count in (161, 160))
    assert shares(many) and not shares(fewer)


@pytest.mark.parametrize(
    "tree", ["1,8,512_32,512,256", "1,1024_2048,32", "1,16,32,64,128,1024_256,128,64,32,32,32"]
)
def test_k_and_v_of_8_bits_have_branches_where_those_of_16_bits_do(tree: str) -> None:
    """wgmma multiplies both as they are, so a branch costs what its bytes do."""
    batch = Tree.parse(tree)
    options: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    for kv_bytes in (2, 1):
        made_for = Target.h200(max_queries=batch.num_queries, kv_bytes=kv_bytes, **options)
        assert plan(batch.paths, batch.seq_lens, made_for).branch_tokens > 0
