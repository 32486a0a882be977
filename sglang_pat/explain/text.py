# SPDX-License-Identifier: Apache-2.0
"""An explained plan as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from sglang_pat.explain.parts import Explanation, Item, Merge, TreeNode

_MAX_RUNS = 6
# What can be printed by itself.
PARTS = ("tree", "items", "merge", "sums", "structs")


def numbers(one: str, several: str, values: Sequence[int]) -> str:
    """ "query 3", "queries 0-15, 20": ascending numbers, as runs; of many runs the first ones."""
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][1] == value - 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs[:_MAX_RUNS]]
    if len(runs) > _MAX_RUNS:
        shown.append(f"... ({len(values)} in all)")
    return f"{one if len(values) == 1 else several} {', '.join(shown)}"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def node_line(node: TreeNode) -> str:
    name = "tail" if node.id is None else f"node {node.id}"
    readers = numbers("query", "queries", node.queries)
    to = numbers("item", "items", node.items)
    return f"{name}: tokens [{node.start}, {node.end}) of {readers} -> {to}"


def merge_line(merge: Merge) -> str:
    if merge.slots:
        return (
            f"query {merge.query}: {numbers('partial', 'partials', merge.slots)} of items "
            f"{', '.join(map(str, merge.items))}"
        )
    if merge.items:
        return f"query {merge.query}: nothing to merge, item {merge.items[0]} writes the output"
    return f"query {merge.query}: no tokens, the output is zeros"


def write_text(found: Explanation, machine: str, max_lines: int, part: str = "all") -> str:
    """The whole drawing, or one of its ``PARTS``. ``machine``: what the plan is made for, in words;
    ``max_lines``: of each list at most, 0 for all."""
    sections = {
        "tree": _tree_section,
        "items": _items_section,
        "merge": _merge_section,
        "sums": lambda found, _limit: ["sums", *sum_lines(found, machine)],
        "structs": _structs_section,
    }
    if part != "all":
        return "\n".join(_indented(sections[part](found, max_lines)))
    target, plan = found.target, found.plan
    lines = [
        f"{counted(len(found.seq_lens), 'request')}, {target.num_q_heads} query and "
        f"{target.num_kv_heads} KV heads of dim {target.head_dim}, planned for {machine}"
    ]
    if plan.degraded:
        lines.append(f"a simpler plan than the rules ask for: {plan.degraded}")
    for name in PARTS[:-1]:  # the structs say the same once more
        lines += ["", *_indented(sections[name](found, max_lines))]
    return "\n".join(lines)


def _indented(section: Sequence[str]) -> list[str]:
    return [section[0], *(f"  {line}" for line in section[1:])]


def _limited(title: str, rows: Iterable[str], count: int, limit: int) -> list[str]:
    """The title, and ``limit`` of ``count`` rows, 0 for all."""
    lines = [title, *islice(rows, limit or count)]
    if 0 < limit < count:
        lines.append(f"... and {count - limit:,} more: --lines 0 shows all")
    return lines


def _tree_section(found: Explanation, limit: int) -> list[str]:
    rows = ("  " * node.depth + node_line(node) for node in found.nodes)
    return _limited("pack tree, and what reads each node", rows, len(found.nodes), limit)


def _items_section(found: Explanation, limit: int) -> list[str]:
    title = (
        f"items, in the order in which they begin; each runs {_times(found.target.num_kv_heads)}"
    )
    rows = _item_rows(found.items[: limit or None])
    count = sum(len(item.ranges) for item in found.items) + 1  # and the heads of the columns
    return _limited(title, rows, count, limit and limit + 1)


def _merge_section(found: Explanation, limit: int) -> list[str]:
    rows = map(merge_line, found.merges)
    return _limited("merge, in this order", rows, len(found.merges), limit)


def _structs_section(found: Explanation, limit: int) -> list[str]:
    """The plan's arrays, field by field under the names of csrc/plan.h."""
    plan = found.plan
    lines = [f"the plan's arrays, {plan.nbytes:,} bytes with the header"]
    for name, array in (
        ("Item", plan.items),
        ("ItemSegments", plan.item_segments),
        ("Member", plan.members),
        ("QuerySplits", plan.queries),
        ("Segment", plan.segments),
    ):
        names = array.dtype.names or ()
        rows = (
            f"{name} {index}: "
            + ", ".join(f"{field} {value}" for field, value in zip(names, row, strict=True))
            for index, row in enumerate(array.tolist())
        )
        lines += _limited("", rows, len(array), limit)[1:]
    return lines


def _times(kv_heads: int) -> str:
    return "once per KV head" if kv_heads > 1 else "once, for the one KV head"


def _item_rows(items: Sequence[Item]) -> Iterable[str]:
    table = [("item", "kind", "queries", "tokens", "packed rows", "to")]
    for item in items:
        for number, part in enumerate(item.ranges):
            grows = "+" if part.grows else ""
            tokens = f"[{part.start}, {part.end}{grows}) of query {part.row_of}"
            readers = numbers("", "", part.queries).strip()
            if number:  # of a branch
                table.append(("", "", readers, tokens, "", ""))
                continue
            rows = f"{item.rows} in a tile of {item.row_tile}, {item.size}"
            slots = sorted(slot for slot in item.partials.values() if slot is not None)
            to = [numbers("partial", "partials", slots)] if slots else []
            to += ["output"] if None in item.partials.values() else []
            cells = (f"{item.index}", item.kind, readers, tokens, rows, " and ".join(to))
            table.append(cells)
    widths = [max(len(row[column]) for row in table) for column in range(6)]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def sum_lines(found: Explanation, machine: str) -> list[str]:
    """What the plan reads, writes and takes, in six lines; ``machine`` as in ``write_text``."""
    plan, target = found.plan, found.target
    read, alone = found.tokens_read, found.tokens_alone
    ratio = f", {alone / read:.2f} x fewer" if read < alone else ""
    units = plan.num_items * target.num_kv_heads
    bounds = [
        f"query {query} has {low} to {high}"
        for query, (low, high) in enumerate(
            zip(plan.min_seq_lens[:3].tolist(), plan.max_seq_lens[:3].tolist(), strict=True)
        )
    ]
    if plan.num_queries > len(bounds):
        bounds.append("...")
    return [
        f"K/V tokens read: {read:,} instead of {alone:,}{ratio} (the batch holds "
        f"{found.tokens_held:,}), for each layer and KV head",
        f"K/V bytes read: {size(read * found.token_bytes)} instead of "
        f"{size(alone * found.token_bytes)}, a layer",
        f"partial results: {plan.num_partials:,} slots of {target.num_q_heads} heads, "
        f"{size(found.partial_bytes)} written and read again, a layer",
        f"work units: {counted(plan.num_items, 'item')} x {target.num_kv_heads} KV heads = "
        f"{units:,}, for {machine}",
        f"the plan: {plan.nbytes:,} bytes; it holds while {', '.join(bounds)} tokens",
    ]


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
