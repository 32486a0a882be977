# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat explain`` draws the plan that the planner makes: all of it, and nothing else."""

from __future__ import annotations

import random
from collections import Counter
from xml.etree import ElementTree

import pytest

import sglang_pat
from sglang_pat import Target, cli
from sglang_pat.dump import Requests
from sglang_pat.explain.command import make_target
from sglang_pat.explain.parts import Explanation
from sglang_pat.explain.reading import explain, tree_nodes
from sglang_pat.explain.requests import DEFAULT_TREE, parse_tree
from sglang_pat.explain.svg import write_svg
from sglang_pat.explain.text import merge_line, node_line, numbers, write_text
from sglang_pat.target import WITHOUT_BRANCHES

HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_queries": 1024}
TARGETS = {
    "h200": Target.h200(**HEADS),
    "branches": Target.h200(**HEADS, cuts=("branches",)),
    "paper": Target.h200(**HEADS, policy="pat"),
    "small tiles": Target.h200(**HEADS, row_tiles=(16,), cuts=WITHOUT_BRANCHES),
    "cpu": Target.cpu(threads=4, **HEADS),
}


def explained(spec: str | Requests, target: Target = TARGETS["h200"]) -> Explanation:
    requests = parse_tree(spec) if isinstance(spec, str) else spec
    plan = sglang_pat.plan(requests.paths, requests.seq_lens, target)
    return explain(plan, requests, target)


def random_requests(seed: int) -> Requests:
    """A forest of up to 12 nodes and up to 40 requests that end anywhere in it, also inside of a
    node; the batch is in no order."""
    rng = random.Random(seed)
    paths: list[list[tuple[int, int, int]]] = [[]]
    for node in range(rng.randint(0, 12)):
        above = rng.choice(paths)
        start = above[-1][2] if above else 0
        paths.append([*above, (100 + node, start, start + rng.choice([1, 7, 64, 300, 2000]))])
    requests = Requests()
    for _ in range(rng.randint(1, 40)):
        path = list(rng.choice(paths))
        if path and rng.random() < 0.2:
            node, start, end = path[-1]
            path[-1] = (node, start, rng.randint(start + 1, end))
        requests.paths.append(path)
        requests.seq_lens.append((path[-1][2] if path else 0) + rng.choice([0, 1, 40, 900]))
    return requests


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("seed", range(12))
def test_every_token_of_every_query_is_drawn_exactly_once(name: str, seed: int) -> None:
    found = explained(random_requests(seed), TARGETS[name])
    for parts in (
        [(part.start, part.end, part.queries) for item in found.items for part in item.ranges],
        [(node.start, node.end, node.queries) for node in found.nodes],
    ):
        drawn: Counter[tuple[int, int]] = Counter()
        for start, end, queries in parts:
            drawn.update((query, token) for query in queries for token in range(start, end))
        expected = {(q, t) for q, length in enumerate(found.seq_lens) for t in range(length)}
        assert drawn == Counter(expected)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("seed", range(12))
def test_the_sums_are_the_plan_s(name: str, seed: int) -> None:
    found = explained(random_requests(seed), TARGETS[name])
    plan = found.plan
    assert sum(item.tokens for item in found.items) == found.tokens_read
    assert found.tokens_read == plan.kv_tokens_read(sum(found.seq_lens))
    assert found.tokens_alone == sum(found.seq_lens)
    assert len(found.items) == plan.num_items
    assert sum(len(item.queries) for item in found.items) == plan.num_members
    several = [i for i in found.items if any(len(part.queries) > 1 for part in i.ranges)]
    assert len(several) == plan.num_shared_items
    assert sum(len(merge.slots) for merge in found.merges) == plan.num_partials
    sizes = Counter(item.size for item in found.items)
    assert (sizes["wide"], sizes["heavy"]) == (plan.num_wide_items, plan.num_heavy_items)
    assert found.tokens_held <= found.tokens_read


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("seed", range(12))
def test_a_query_merges_what_its_items_wrote_in_the_order_of_tokens(name: str, seed: int) -> None:
    found = explained(random_requests(seed), TARGETS[name])
    for merge in found.merges:
        of_query = [item for item in found.items if merge.query in item.queries]
        assert sorted(merge.items) == [item.index for item in of_query]
        wrote = [found.items[index].partials[merge.query] for index in merge.items]
        assert wrote == (merge.slots or [None] * len(of_query))
        assert len(of_query) != 1 or not merge.slots
        plain = [found.items[i] for i in merge.items if found.items[i].kind != "branch"]
        starts = [item.ranges[0].start for item in plain]
        assert starts == sorted(starts)
    slots = [slot for merge in found.merges for slot in merge.slots]
    assert sorted(slots) == list(range(found.plan.num_partials))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("seed", range(12))
def test_a_node_names_the_items_that_read_it(name: str, seed: int) -> None:
    """Together they read each of its tokens once for each of its queries; each reads some."""
    found = explained(random_requests(seed), TARGETS[name])
    for node in found.nodes:
        read: Counter[tuple[int, int]] = Counter()
        for index in node.items:
            mine = [
                (query, token)
                for part in found.items[index].ranges
                for query in {*part.queries} & {*node.queries}
                for token in range(max(part.start, node.start), min(part.end, node.end))
            ]
            assert mine
            read.update(mine)
        tokens = range(node.start, node.end)
        assert read == Counter((query, token) for query in node.queries for token in tokens)


def test_the_batch_of_the_walkthrough() -> None:
    found = explained(DEFAULT_TREE)
    assert [node_line(node) for node in found.nodes] == [
        "node 1: tokens [0, 512) of queries 0-2 -> items 0-4, 10",
        "node 2: tokens [512, 768) of queries 0-1 -> items 5-6, 8",
        "tail: tokens [768, 808) of query 0 -> item 9",
        "tail: tokens [768, 793) of query 1 -> item 11",
        "tail: tokens [512, 602) of query 2 -> item 7",
    ]
    assert (found.items[3].kind, found.items[7].kind) == ("shared", "tail")
    assert found.items[0].rows == 3 * 32 // 8 and found.items[0].row_tile == 16
    assert merge_line(found.merges[2]) == "query 2: partials 20-26 of items 0, 1, 2, 3, 4, 10, 7"
    assert (found.tokens_read, found.tokens_alone, found.tokens_held) == (923, 2203, 923)
    assert found.token_bytes == 2 * 8 * 128 * 2
    assert found.partial_bytes == 27 * 32 * (128 * 4 + 4)


def test_queries_that_share_nothing_have_items_of_their_own() -> None:
    few = Target.h200(**(HEADS | {"num_q_heads": 8, "num_kv_heads": 1}))
    found = explained("512(512,512)", few)
    assert {item.kind for item in found.items} == {"tail"}
    assert found.tokens_read == found.tokens_alone == 2048


def test_a_node_read_in_several_row_tiles() -> None:
    found = explained("512(16x64(4x20))", TARGETS["small tiles"])
    readers = [found.items[index] for index in found.nodes[0].items]
    # 4 queries of 4 heads fill a tile of 16 rows.
    assert {item.rows for item in readers} == {16} and len({i.queries for i in readers}) == 16


def test_a_branch_writes_the_output_and_names_its_nodes() -> None:
    found = explained(DEFAULT_TREE, TARGETS["branches"])
    (branch,) = found.items
    assert branch.kind == "branch" and branch.tokens == 923
    assert [node.items for node in found.nodes] == [[0]] * 5
    assert merge_line(found.merges[1]) == "query 1: nothing to merge, item 0 writes the output"
    assert write_text(found, "it", 0).count(" of query ") >= len(branch.ranges) == 5


def test_a_node_that_a_path_ends_inside_of_is_cut() -> None:
    requests = Requests([[(7, 0, 100)], [(7, 0, 60)], [(7, 0, 100)]], [110, 90, 120])
    lines = [(n.id, n.start, n.end, n.queries) for n in tree_nodes(requests)]
    assert lines == [
        (7, 0, 60, (0, 1, 2)),
        (7, 60, 100, (0, 2)),
        (None, 100, 110, (0,)),
        (None, 100, 120, (2,)),
        (None, 60, 90, (1,)),
    ]


def test_both_notations_of_a_tree_are_one_batch() -> None:
    nested, levels = explained("32(8x512(4x256))"), explained("1,8,32_32,512,256")
    assert nested.seq_lens == levels.seq_lens == [800] * 32
    assert nested.items == levels.items
    assert parse_tree(" 512 ( 256(40, 25), 90 ) ") == parse_tree(DEFAULT_TREE)
    assert parse_tree("3x7") == Requests([[], [], []], [7, 7, 7])


def test_a_degraded_plan_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    target = Target.h200(**HEADS, max_partials=4, cuts=WITHOUT_BRANCHES)
    found = explained(DEFAULT_TREE, target)
    assert found.plan.degraded
    assert f"a simpler plan than the rules ask for: {found.plan.degraded}" in write_text(
        found, "", 9
    )


@pytest.mark.parametrize("spec", [DEFAULT_TREE, "3x9", "2x700", "512(16x64(4x20))", "64(300x9)"])
@pytest.mark.parametrize("name", ["h200", "branches"])
def test_the_svg_is_xml_that_names_every_item(spec: str, name: str) -> None:
    found = explained(spec, TARGETS[name])
    text = write_svg(found, "a <machine> & more")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    titles = [title.text or "" for title in root.iter(f"{space}title")]
    for item in found.items:
        assert any(title.startswith(f"item {item.index}: {item.kind}") for title in titles)
    for node in found.nodes:
        assert node_line(node) in titles
    if len(found.seq_lens) < 40:  # else not every query has its name there
        assert titles.count(merge_line(found.merges[-1])) == 2
    for attribute in ("href", "src", "url(", "<script", "<image"):
        assert attribute not in text
    assert root.find(f"{space}rect").get("fill") == "#ffffff"  # type: ignore[union-attr]
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    for rect in root.iter(f"{space}rect"):
        x, y, w, h = (float(rect.get(k, "0")) for k in ("x", "y", "width", "height"))
        assert w > 0 and h > 0
        assert x >= 0 and y >= 0 and x + w <= width + 0.1 and y + h <= height + 0.1


def test_rectangles_of_the_svg_do_not_overlap() -> None:
    """Each token of each query has one place among the nodes and one among the items."""
    found = explained(random_requests(5))
    root = ElementTree.fromstring(write_svg(found, "it"))
    maps: dict[bool, list[tuple[float, float, float, float]]] = {True: [], False: []}
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        title = rect.find("{http://www.w3.org/2000/svg}title")
        if title is None or (title.text or "").startswith("query"):
            continue
        x, y, w, h = (float(rect.get(k, "0")) for k in ("x", "y", "width", "height"))
        maps[(title.text or "").startswith("item")].append((x, y, x + w, y + h))
    areas = {k: sum((c - a) * (d - b) for a, b, c, d in rects) for k, rects in maps.items()}
    assert areas[True] == pytest.approx(areas[False], rel=0.01)
    for rects in maps.values():
        assert len(rects) > 5
        for i, (a, b, c, d) in enumerate(rects):
            for e, f, g, h in rects[:i]:
                across = min(c, g) - max(a, e)
                down = min(d, h) - max(b, f)
                assert across < 0.2 or down < 0.2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([3], "query 3"),
        ([0, 1, 2, 7], "queries 0-2, 7"),
        (list(range(0, 20, 2)), "queries 0, 2, 4, 6, 8, 10, ... (10 in all)"),
    ],
)
def test_runs_of_numbers(values: list[int], said: str) -> None:
    assert numbers("query", "queries", values) == said


@pytest.mark.parametrize(("target", "auto"), [("h200", 2), ("cpu", 4)])
def test_kv_in_fp8_are_planned_and_counted_by_the_byte(target: str, auto: int) -> None:
    requests = parse_tree(DEFAULT_TREE)
    for choice, kv_bytes in (("auto", auto), ("fp8_e4m3", 1)):
        flags = ["explain", "--target", target, "--kv-cache-dtype", choice]
        made_for, _ = make_target(cli.make_parser().parse_args(flags), len(requests.seq_lens))
        plan = sglang_pat.plan(requests.paths, requests.seq_lens, made_for)
        found = explain(plan, requests, made_for)
        assert found.token_bytes == 2 * 8 * 128 * kv_bytes
