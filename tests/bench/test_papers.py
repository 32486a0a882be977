# SPDX-License-Identifier: Apache-2.0
"""The rules of other papers, each by its paper's words on trees made by hand, and PAT's tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kit.bench import CpuClock, replace_device
from kit.pieces import check_pieces

from benchmarks import papers
from benchmarks.common.forests import PAPER_TREES, Forest, Tree, drawn, forest, samples
from benchmarks.kernel.floor import Heads
from benchmarks.papers import NAMES, measure, padding, plan_by
from benchmarks.tiles import LATENCY_NS, OTHER_REGISTERS, SIZES, Hardware, Tile, main, solve
from sglang_pat import _C, Target
from sglang_pat.dump import PathNodes
from sglang_pat.gpus import GPUS
from sglang_pat.plan_text import ranges
from sglang_pat.target import row_tiles_for

Ranges = list[tuple[int, int]]  # start and tokens of what each item reads
# Node 1 (1,000 tokens, 6 queries) over node 2 (300 tokens, 4 queries) over node 3 (200 tokens, 2
# queries), and 100 tokens of its own for each query.
DEEP: list[PathNodes] = [[(1, 0, 1000), (2, 1000, 1300), (3, 1300, 1500)]] * 2
DEEP += [[(1, 0, 1000), (2, 1000, 1300)]] * 2 + [[(1, 0, 1000)]] * 2
DEEP_LENS = [1600] * 2 + [1400] * 2 + [1100] * 2


def read_by(name: str, batch: Tree | Forest, **machine: Any) -> list[Ranges]:
    """What items read of each query: together its whole sequence, each token once."""
    shape = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    made = plan_by(name, batch, Target.h200(**(shape | machine), max_queries=batch.num_queries))
    found: list[Ranges] = [[] for _ in batch.seq_lens]
    for _, reader, start, tokens, queries in ranges(made):
        length = tokens if tokens >= 0 else batch.seq_lens[reader] - start
        for query in queries:
            found[query].append((start, length))
    check_pieces(found, batch.seq_lens)
    return [sorted(each) for each in found]


def deep(name: str, **machine: Any) -> list[Ranges]:
    return read_by(name, Forest("deep", DEEP, DEEP_LENS), **machine)


def starts(name: str, paths: list[PathNodes], length: int, **machine: Any) -> list[list[int]]:
    found = read_by(name, Forest("equal", paths, [length] * len(paths)), **machine)
    return [[start for start, _ in each] for each in found]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "batch",
    [*PAPER_TREES[3::5], forest("uniform", 0), forest("zipf", 3), drawn(samples, 1)],
    ids=str,
)
def test_every_token_is_read_once(name: str, batch: Tree | Forest) -> None:
    assert all(read_by(name, batch))


def test_pat_naive_packs_each_node_and_cuts_what_is_longer_than_the_mean() -> None:
    nodes = [[(1, 0, 100), (2 + query // 2, 100, 200)] for query in range(4)]
    assert starts("pat-naive", nodes, 300) == [[0, 100, 200]] * 4
    lone = read_by("pat-naive", Forest("lone", [[]] * 10, [300] + [50] * 9))  # a mean of 75
    assert lone == [[(0, 75), (75, 75), (150, 75), (225, 75)]] + [[(0, 50)]] * 9
    # 40 queries of 4 heads are three CTAs of 64 rows: (3 * 800 + 40 * 40) / 43 = 93 tokens.
    shared = read_by("pat-naive", Forest("shared", [[(1, 0, 800)]] * 40, [840] * 40))
    assert shared == [[(start, 89) for start in range(0, 712, 89)] + [(712, 88), (800, 40)]] * 40


def test_paged_attention_reads_each_query_by_itself() -> None:
    assert deep("paged-v1") == [[(0, length)] for length in DEEP_LENS]
    parts = deep("paged-v2")
    assert parts[0] == [(0, 512), (512, 512), (1024, 512), (1536, 64)]
    assert parts[5] == [(0, 512), (512, 512), (1024, 76)]


def test_relay_attention_shares_the_system_prompt_alone() -> None:
    assert deep("relay", num_sms=1) == [[(0, 1000), (1000, n - 1000)] for n in DEEP_LENS]
    # 132 SMs run 264 items at once: 33 for each of the 8 KV heads.
    assert len(read_by("relay", Forest("lone", [[]], [33 * 640]))[0]) == 33


def test_chunk_attention_shares_chunks_of_64_and_reads_sequences_whole() -> None:
    found = deep("chunk")
    assert found[4] == [(64 * i, 64) for i in range(15)] + [(960, 40), (1000, 100)]
    below = [*range(1000, 1300, 64), *range(1300, 1500, 64), 1500]
    assert [start for start, _ in found[0][16:]] == below
    assert starts("chunk", [[]] * 2, 5000) == [[0]] * 2


def test_fasttree_merges_where_less_is_padded_to_tiles_of_16_by_128_or_64_by_32() -> None:
    assert padding(1, 16, 128) == padding(1, 64, 32) == padding(1, 0, 50) == 0.0
    assert padding(4, 17, 20) == pytest.approx(4 * (0.66 * 47 * 20 + 0.33 * 12 * 17))
    # 32 queries on 64 tokens, 16 below each of two nodes of 64, one query head a KV head. Apart: 32
    # idle queries on 64 tokens are 1,351.7, the 64 idle tokens of each 16 queries 337.9. The first
    # to merge fills tiles of 16 and 128, and leaves 16 queries that lack 64 tokens: 337.9. It
    # merges, and so does the second. A tail has 15 idle queries, on twice the tokens if it merges.
    heads = {"num_q_heads": 8, "num_sms": 1}
    paths = [[(1, 0, 64), (2 + query // 16, 64, 128)] for query in range(32)]
    assert starts("fasttree", paths, 256, **heads) == [[0, 128]] * 32
    # 17 and 15: the first would have 47 idle queries on twice the tokens, 3,970.6, and the second
    # would leave 17, with 47 idle ones on 64 tokens where 32 were. Neither merges. Of the 17 tails
    # the first does: it leaves 16 queries, which fill a small tile.
    uneven = [*paths[:16], paths[0], *paths[17:]]
    assert starts("fasttree", uneven, 256, **heads) == [[0, 64]] + [[0, 64, 128]] * 31


def test_fasttree_has_shorter_pieces_in_a_phase_of_few() -> None:
    # 20 pieces of 1,024 tokens and 8 KV heads are 160 items, enough for packs of more than 16
    # queries. 20 tails of 2,048 are 320, fewer than 4 an SM.
    found = starts("fasttree", [[(1, 0, 20_480)]] * 20, 22_528, num_q_heads=8)
    assert found[0] == [*range(0, 20_480, 1024), *range(20_480, 22_528, 128)]
    # 40 tails are 640, enough. A node of 8,192 tokens is 64 items.
    found = starts("fasttree", [[(1, 0, 8192)]] * 40, 10_240, num_q_heads=8)
    assert found[0] == [*range(0, 8192, 128), 8192, 9216]
    # 16 queries belong to the second phase, where 160 items are few and 640 are not.
    for tokens, piece in ((20_480, 128), (81_920, 1024)):
        found = starts("fasttree", [[(1, 0, tokens)]] * 16, tokens + 20, num_q_heads=8)
        assert found[0][1] == piece


def test_a_row_for_each_rule_with_a_right_output(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_device(monkeypatch, papers)
    clock: Any = CpuClock(1.0)
    rows = measure(Tree((1, 3, 12), (300, 200, 90)), Heads(8, 2, 64), clock)
    assert [row["rule"] for row in rows] == list(NAMES)
    assert all(row["error"] < 0.01 and row["family"] == "shared" for row in rows)
    assert [row["over_ours"] for row in rows] == [1 + place / 10 for place in range(len(NAMES))]


A100 = replace(Hardware.of("a100"), bytes_per_s=1.8e12)


def tile(m: int, n: int, **changes: Any) -> Tile:
    found = solve(replace(A100, **changes), 128)
    (chosen,) = [each for each in found if (each.m, each.n) == (m, n)]
    return chosen


def test_the_papers_constraints_by_hand() -> None:
    """Shared memory: Q and K/V tile of 2 bytes an element, intermediate results of 4. Registers of
    64 rows on 128 threads: accumulators of the output, scores, weights of half the size."""
    bytes_ = 64 * 128 * 2 + 64 * 128 * 2 + 64 * 128 * 4
    registers = (64 * 128 + 64 * 64 + 64 * 64 // 2) // 128 + OTHER_REGISTERS
    found = tile(64, 64)
    assert (found.shared_bytes, found.registers, found.broken) == (bytes_, registers, ())
    for name, least, broken in (
        ("shared_per_block", bytes_, "1s"),
        ("registers_per_sm", registers * 128, "1r"),
    ):
        assert broken not in tile(64, 64, **{name: least}).broken
        assert tile(64, 64, **{name: least - 1}).broken == (broken,)
    # The paper's bound: n >= latency x bandwidth / (SMs x blocks x head dim x bytes).
    most = 16 * 108 * tile(64, 16).blocks * 128 * 2 / (LATENCY_NS * 1e-9)
    assert tile(64, 16, bytes_per_s=0.999 * most).broken == ()
    assert tile(64, 16, bytes_per_s=1.001 * most).broken == ("2",)
    assert tile(64, 256).registers > 255 and tile(64, 256).broken == ("1r",)
    assert tile(64, 64).blocks == 2  # 65 KiB each of 164
    assert tile(64, 64, registers_per_sm=20_000).blocks == 1
    assert tile(64, 64, threads_per_sm=128).blocks == 1


def test_the_command_prints_a_grid_for_each_head_dim_and_marks_our_tiles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in GPUS:
        assert main(["--gpu", name]) == 0
        _, *grids = capsys.readouterr().out.split("head dim ")
        for dim, grid in zip(_C.CUDA_HEAD_DIMS, grids, strict=True):
            assert grid.startswith(f"{dim};") and len(grid.split()) > len(SIZES) ** 2
            assert grid.count("*") == len(row_tiles_for(dim))
