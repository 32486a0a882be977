# SPDX-License-Identifier: Apache-2.0
"""docs/experiments/studies.md and neighbours.md: their tables of times are those of docs/results.

``python tests/test_study_results.py`` prints the tables.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from sglang_pat import _C
from sglang_pat.bench.kernel.report import geomean
from sglang_pat.bench.kernel.studies import drift, packinfer, persistent, report
from sglang_pat.bench.kernel.studies.catalogue import STUDIES
from sglang_pat.bench.kernel.studies.engine import StudyRow, aged_name
from sglang_pat.bench.kernel.studies.lengths import MIXES
from sglang_pat.bench.kernel.studies.ratios import MARGIN, by_family, mean
from sglang_pat.bench.kernel.studies.ratios import ratio as ratio_of
from sglang_pat.bench.kernel.studies.regret import regret
from sglang_pat.config import PRESETS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAGES = ROOT / "docs" / "experiments"
PRESET_NAMES = [name for name in PRESETS if name != "default"]
TREES = ("shared", "private")
FEW_LONG = ("single", "pair", "fork")
DAY = "2026-11-26"  # of the run of every study


def result(name: str) -> Path:
    return RESULTS / f"h200-{DAY}-kernel-study-{name}.json"


def rows_of(name: str, heads: str = "") -> list[StudyRow]:
    document = json.loads(result(name).read_text(encoding="utf-8"))
    found = [StudyRow(**row) for row in document["rows"]]
    return [row for row in found if heads in ("", row.heads)]


def shown(value: float | None) -> str:
    assert value is not None
    return f"{value:.3f}"


def cells(*values: object) -> str:
    return "| " + " | ".join(map(str, values)) + " |"


def ratio(row: StudyRow, name: str, over: str = "default") -> str:
    return shown(ratio_of(row, name, over))


def means(rows: Sequence[StudyRow], names: Iterable[str]) -> list[str]:
    return [shown(mean(rows, name)) for name in names]


def neighbours_table() -> Iterator[str]:
    rows = rows_of("neighbours")
    for family, members in by_family(rows).items():
        yield cells(family, len(members), *means(members, PRESET_NAMES))
    yield cells("all", len(rows), *means(rows, PRESET_NAMES))


def lost_table() -> Iterator[str]:
    """The rows that a preset wins, the most first."""
    lost = []
    for row in rows_of("neighbours"):
        best = min(PRESET_NAMES, key=row.times.__getitem__)
        if MARGIN * row.over_base[best] < 1:
            lost.append((row.over_base[best], row, best))
    for value, row, best in sorted(lost, key=lambda each: each[0]):
        times = f"{row.times['default']:.1f}", f"{row.times[best]:.1f}"
        yield cells(row.spec, f"`{best}`", *times, shown(value), f"{row.noise:.1%}"[:-1] + " %")


def presets_table() -> Iterator[str]:
    """Of neighbours.md."""
    kinds: dict[str, Callable[[StudyRow], bool]] = {
        "shared": lambda row: row.family == "shared",
        "uneven": lambda row: row.family not in TREES + FEW_LONG,
        "few long": lambda row: row.family in FEW_LONG,
        "all": lambda row: True,
    }
    rows = rows_of("neighbours")
    for name in PRESET_NAMES:
        found = [shown(mean([row for row in rows if has(row)], name)) for has in kinds.values()]
        yield cells(f"`{name}`", *found)


def runs_of_neighbours() -> Iterator[tuple[str, tuple[str, str]]]:
    """How each line of neighbours.md on a run starts; the rows that a preset wins, and what follows
    in the line."""
    for gpu, day in (("h200", "2026-11-24"), ("h100", "2026-11-25"), ("h200", DAY)):
        file = f"{gpu}-{day}-kernel-study-neighbours.json"
        document = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        rows = [StudyRow(**row) for row in document["rows"]]
        assert len(rows) == 74 and set(rows[0].rules) == set(PRESETS)
        wins = [(row.over_base[name], name, row.spec) for row in rows for name in PRESET_NAMES]
        lost = {spec for value, _, spec in wins if MARGIN * value < 1}
        value, best, spec = min(wins)
        nearest = min(PRESET_NAMES, key=lambda name: mean(rows, name) or math.inf)
        said = f"{shown(value)} (`{best}`, {spec}) | `{nearest}`, {shown(mean(rows, nearest))} |"
        yield f"| [{gpu.upper()}, {day}](../results/{file}) |", (str(len(lost)), said)


def chunk_table() -> Iterator[str]:
    by_heads = [
        [row for row in rows_of("chunk", heads) if row.family == "shared"]
        for heads in ("32/32", "32/8")
    ]
    for wide, narrow in zip(*by_heads, strict=True):
        assert wide.spec == narrow.spec
        parts = wide.spec.split("_")[1].split(",")
        found = [
            ratio(row, name, over)
            for name, over in (("paged", "chunk"), ("paged", "default"), ("chunk", "default"))
            for row in (wide, narrow)
        ]
        yield cells(f"{int(parts[0]) if len(parts) > 1 else 0:,}", *found)


def completion_table() -> Iterator[str]:
    for shared in (1024, 8192):
        prefix = f"1,32_{shared},"
        found = {
            int(row.spec.removeprefix(prefix)): ratio(row, "paged", "chunk")
            for row in rows_of("chunk", "32/32")
            if row.spec.startswith(prefix) and row.family != "batch"
        }
        yield cells(f"{shared:,}", *(found[own] for own in sorted(found)))


def batch_table() -> Iterator[str]:
    rows = [row for row in rows_of("chunk", "32/32") if row.family == "batch"]
    for row in rows:
        rates = (row.queries / row.times[n] for n in ("default", "chunk", "paged", "flashinfer"))
        yield cells(row.queries, *map(shown, rates))


def partitions_table() -> Iterator[str]:
    rows = rows_of("paged", "32/8")
    for length in (512, 2048, 8192, 32768):
        of_length = [row for row in rows if row.tokens == length * row.queries]
        yield cells(f"{length:,}", *(ratio(row, "paged-v1", "paged") for row in of_length))


def indirection_table() -> Iterator[str]:
    pairs = (
        ("fa3", "fa3-dense"),
        ("fa3/perm", "fa3-dense"),
        ("flashinfer/perm", "flashinfer"),
        ("default/perm", "default"),
        ("default", "fa3-dense"),
        ("default", "sdpa-dense"),
    )
    for name, over in pairs:
        found = []
        for heads in ("32/8", "64/8"):
            rows = rows_of("paged", heads)
            found += [shown(mean(family, name, over)) for family in by_family(rows).values()]
        yield cells(f"`{name}` over `{over}`", *found)


def regret_line(what: str, rows: Sequence[StudyRow]) -> str:
    regrets = [each[0] for row in rows if (each := regret(row, tuple(persistent.ALTERNATIVES)))]
    worse = sum(each > MARGIN for each in regrets)
    found = geomean(regrets), max(regrets), *(mean(rows, name) for name in ("fa3", "flashinfer"))
    return cells(what, len(rows), shown(found[0]), shown(found[1]), worse, *map(shown, found[2:]))


def regret_table() -> Iterator[str]:
    for family, rows in by_family(rows_of("persistent", "32/8")).items():
        yield regret_line(family, rows)
    for heads in ("32/8", "64/8", "32/32"):
        yield regret_line(f"all at {heads}", rows_of("persistent", heads))


def fixed_table() -> Iterator[str]:
    """Each fixed rule, always taken, over the default: 8 requests, the others."""
    rows = rows_of("persistent", "32/8")
    eight = [row for row in rows if row.family.endswith("-b8")]
    fewer = [row for row in rows if "-b" in row.family and row not in eight]
    forests = [row for row in rows if row.family.endswith("forest")]
    for name in persistent.ALTERNATIVES:
        yield cells(name, *(shown(mean(each, name)) for each in (eight, fewer, forests, rows)))


def mixes_table() -> Iterator[str]:
    """Times over the default's, among them those with slots at random places and with K and V
    copied together first; then utilisation."""
    for heads in ("32/8", "32/4"):
        families = by_family(rows_of("packinfer", heads))
        for mix, rows in families.items():
            filled = [
                shown(geomean([row.utilisation[name] for row in rows]))
                for name in ("default", "paged", "packinfer")
            ]
            names = ("paged", "no split", "packinfer", "fa3", "flashinfer", "in place", "copied")
            yield cells(f"{mix}, {heads}", *means(rows, names), *filled)


def capacities_table() -> Iterator[str]:
    """The uneven mixes by the most tokens of a group: small batches, large ones."""
    rules = {int(name.rpartition("-")[2]): name for name in packinfer.RULES if "packinfer-" in name}
    assert sorted(rules) == list(packinfer.CAPACITIES)
    for tokens, name in sorted((rules | {1024: "packinfer"}).items()):
        found = []
        for heads in ("32/8", "32/4"):
            mixed = [row for row in rows_of("packinfer", heads) if row.family in MIXES]
            small = [row for row in mixed if row.queries <= 32]
            large = [row for row in mixed if row.queries >= 64]
            assert len(small) == len(large) == 9
            found += [shown(mean(each, name)) for each in (small, large)]
        yield cells(f"{tokens:,}", *found)


def uneven_table() -> Iterator[str]:
    for heads in ("32/8", "32/4"):
        families = by_family(rows_of("packinfer", heads))
        for mix in MIXES:
            found = []
            for name in ("default", "paged", "fa3", "flashinfer"):
                both = zip(families[mix], families[f"{mix} even"], strict=True)
                found.append(shown(geomean([row.times[name] / o.times[name] for row, o in both])))
            yield cells(f"{mix}, {heads}", *found)


def drift_table() -> Iterator[str]:
    """Plans made some steps ago over new ones: mean, worst row, rows over the limit."""
    for heads in ("32/8", "8/1"):
        rows = rows_of("drift", heads)
        for steps in drift.AGES:
            name = aged_name(steps)
            kept = [row for row in rows if name not in row.outgrown]
            worst = max(kept, key=lambda row: row.over_base[name])
            slow = sum(row.over_base[name] > _C.MOST_DRIFT for row in kept)
            found = shown(mean(kept, name)), f"{shown(worst.over_base[name])} ({worst.spec})"
            yield cells(heads, steps, len(kept), *found, slow, len(rows) - len(kept))


TABLES: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "studies.md": (
        neighbours_table,
        lost_table,
        chunk_table,
        completion_table,
        batch_table,
        partitions_table,
        indirection_table,
        regret_table,
        fixed_table,
        mixes_table,
        capacities_table,
        uneven_table,
        drift_table,
    ),
    "neighbours.md": (presets_table,),
}


@pytest.mark.parametrize(
    ("page", "table"), [(page, table) for page, found in TABLES.items() for table in found]
)
def test_a_table_has_the_measured_times(page: str, table: Callable[[], Iterator[str]]) -> None:
    assert "\n".join(table()) in (PAGES / page).read_text(encoding="utf-8")


def test_the_runs_of_neighbours_are_those_of_their_files() -> None:
    lines = (PAGES / "neighbours.md").read_text(encoding="utf-8").splitlines()
    for start, end in runs_of_neighbours():
        (line,) = (each for each in lines if each.startswith(start))
        found = line.removeprefix(start).partition(" | ")
        assert re.fullmatch("[0-9a-f]{7}", found[0].strip()), line
        counted, _, rest = found[2].partition(" | ")
        assert (counted.split()[0].rstrip(","), rest) == end, line


# Of `plans` a GPU has run 104 of 790 rows.
@pytest.mark.parametrize("name", [name for name in STUDIES if name != "plans"])
def test_a_stored_study_is_whole_and_sound(name: str) -> None:
    """No row left out, every output right; its picture is in the page."""
    document = json.loads(result(name).read_text(encoding="utf-8"))
    rows = rows_of(name)
    assert not document["left_out"] and not report.complaints(rows)
    assert result(name).with_suffix(".png").exists()
    assert f"(../results/{result(name).with_suffix('.png').name})" in (
        PAGES / "studies.md"
    ).read_text(encoding="utf-8")


if __name__ == "__main__":
    for each in (table for found in TABLES.values() for table in found):
        print(each.__name__, *each(), sep="\n")
