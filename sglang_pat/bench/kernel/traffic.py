# SPDX-License-Identifier: Apache-2.0
"""Bytes that pat and FA3 read from the L2 and move through DRAM, as Nsight Compute counts them,
beside those that the plan counts (figures 5a and 11b of the paper):
``python -m sglang_pat.bench.kernel --traffic``.

``measure`` runs this module under ``ncu``, which leaves caches and clocks alone. The L2 is flushed
before each contestant, by reading, so that what its first kernel leaves there is there for the next
and no line of another's is written back meanwhile.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_pat.bench.common.document import Document
from sglang_pat.bench.common.figures import finish, require
from sglang_pat.bench.common.forests import Forest
from sglang_pat.bench.common.trees import Requests, Tree
from sglang_pat.bench.kernel.clock import FLUSH_BYTES
from sglang_pat.bench.kernel.floor import Heads, kv_bytes, least_bytes
from sglang_pat.bench.kernel.layer import Layer, PatOptions, device_batch
from sglang_pat.bench.kernel.peers import PEERS, usable
from sglang_pat.bench.kernel.plot import bars
from sglang_pat.bench.kernel.report import groups
from sglang_pat.planner import plan

Case = tuple[Heads, bool, Requests]  # heads, slots permuted or not, tree or forest
# What ncu counts and the bytes that one is: DRAM in both directions, sectors read from the L2.
DRAM_METRICS = {"dram__bytes_read.sum": 1, "dram__bytes_write.sum": 1}
L2_METRICS = {"lts__t_sectors_op_read.sum": 32}
METRICS = DRAM_METRICS | L2_METRICS


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one layer; None: did not run."""

    heads: str
    spec: str
    permuted: bool
    least: int  # every slot of the batch, q and the output once
    plan: int  # what the items of the plan read, and the partial states, written and read
    pat_l2: float | None  # read from the L2
    pat_dram: float | None  # read from and written to DRAM
    unpacked: int  # every query its whole sequence, q and the output once
    fa3_l2: float | None
    fa3_dram: float | None
    draft_tokens: int = 1  # of a query: more than 1 in a verify step


def plan_bytes(tree: Requests, heads: Heads, settings: PatOptions) -> tuple[int, int]:
    """What a plan moves if no cache helps, and what attention without packing does."""
    made = plan(tree.paths, tree.seq_lens, settings.target(tree, heads))
    tokens = sum(tree.seq_lens)
    drafts = settings.draft_tokens
    once = least_bytes(tree, heads, draft_tokens=drafts) - kv_bytes(tree.unique_tokens, heads)
    state = settings.partial_dtype.itemsize * heads.dim + 4
    partials = 2 * made.num_partials * drafts * heads.q * state
    packed = kv_bytes(made.kv_tokens_read(tokens), heads) + once + partials
    return packed, kv_bytes(tokens, heads) + once


def to_json(case: Case) -> dict[str, Any]:
    """A case as ``from_json`` takes it: a tree by its notation, a forest whole."""
    heads, permuted, tree = case
    batch = tree.to_json() if isinstance(tree, Forest) else str(tree)
    return {"heads": str(heads), "permuted": permuted, "batch": batch}


def from_json(found: dict[str, Any]) -> Case:
    batch = found["batch"]
    tree = Tree.parse(batch) if isinstance(batch, str) else Forest.from_json(batch)
    return Heads.parse(found["heads"]), found["permuted"], tree


def tag(index: int, name: str) -> str:
    """Name of the NVTX range around what ``name`` launches for case ``index``."""
    return f"sglang_pat.{index}.{name}"


def parse(lines: Iterable[str]) -> dict[tuple[int, str], dict[str, float]]:
    """Counts by metric, by case and name, of ncu's raw CSV: a header, a line of units, a line a
    kernel, among messages. Raises ValueError for output that holds no kernel of ours."""
    table = list(csv.reader(line for line in lines if line.startswith('"')))
    if not table or not METRICS.keys() <= set(table[0]):
        raise ValueError(f"ncu gave no table with {', '.join(METRICS)}: {table[:1]}")
    columns = {metric: table[0].index(metric) for metric in METRICS}
    found: dict[tuple[int, str], dict[str, float]] = {}
    for row in table[1:]:
        match = re.search(r"sglang_pat\.(\d+)\.(\w+)", " ".join(row))
        if match:
            counts = found.setdefault((int(match[1]), match[2]), dict.fromkeys(METRICS, 0.0))
            for metric, column in columns.items():
                counts[metric] += float(row[column].replace(",", ""))
    if not found:
        raise ValueError(f"ncu listed {len(table) - 1} kernels, none in a range of ours")
    return found


def bytes_of(counts: dict[str, float] | None, metrics: dict[str, int]) -> float | None:
    if counts is None:
        return None
    return sum(counts[metric] * size for metric, size in metrics.items())


def measure(cases: Sequence[Case], settings: PatOptions) -> list[Traffic]:
    """One row a case. Raises RuntimeError when ncu is missing or fails."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise RuntimeError("ncu (NVIDIA Nsight Compute) is not on the PATH: --traffic needs it")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ncu.csv")
        asked = Path(folder, "asked.json")
        asked.write_text(json.dumps([to_json(case) for case in cases]))
        command = [ncu, "--nvtx", "--csv", "--page", "raw", "--print-units", "base"]
        command += ["--clock-control", "none", "--cache-control", "none"]
        command += ["--profile-from-start", "off"]
        command += ["--metrics", ",".join(METRICS), "--log-file", str(log)]
        command += [sys.executable, "-m", "sglang_pat.bench.kernel.traffic"]
        command += [str(asked), json.dumps(asdict(settings))]
        done = subprocess.run(command)
        text = log.read_text() if log.exists() else ""
        if done.returncode:
            raise RuntimeError(f"ncu ended with {done.returncode}: {text[-2000:]}")
        moved = parse(text.splitlines())
    rows = []
    for index, (heads, permuted, tree) in enumerate(cases):
        packed, unpacked = plan_bytes(tree, heads, settings)
        pat, fa3 = moved.get((index, "pat")), moved.get((index, "fa3"))
        rows.append(
            Traffic(
                heads=str(heads),
                spec=str(tree),
                permuted=permuted,
                least=least_bytes(tree, heads, draft_tokens=settings.draft_tokens),
                plan=packed,
                pat_l2=bytes_of(pat, L2_METRICS),
                pat_dram=bytes_of(pat, DRAM_METRICS),
                unpacked=unpacked,
                fa3_l2=bytes_of(fa3, L2_METRICS),
                fa3_dram=bytes_of(fa3, DRAM_METRICS),
                draft_tokens=settings.draft_tokens,
            )
        )
    return rows


def table(rows: Iterable[Traffic]) -> list[str]:
    """Megabytes, as text."""
    columns = ("least", "plan", "pat_l2", "pat_dram", "unpacked", "fa3_l2", "fa3_dram")
    lines = [f"{'megabytes':44} heads" + "".join(f"{name:>10}" for name in columns)]
    for row in rows:
        values = [getattr(row, name) for name in columns]
        shown = ["-" if value is None else f"{value / 1e6:.1f}" for value in values]
        lines.append(f"{row.spec:44} {row.heads:5}" + "".join(f"{text:>10}" for text in shown))
    return lines


def draw(rows: Sequence[Traffic], path: Path) -> None:
    """Write a picture: for each of heads and layout a panel of what is read from the L2, with what
    the plan counts, and one of DRAM, as multiples of the least."""
    panels = groups(rows)
    figure = require().Figure(figsize=(12, 6.0 * len(panels)), layout="constrained")
    axes = figure.subplots(2 * len(panels), squeeze=False)[:, 0]
    for i, (title, members) in enumerate(panels):
        specs, least = [row.spec for row in members], [row.least for row in members]
        for axis, level, named in ((axes[2 * i], "l2", "L2"), (axes[2 * i + 1], "dram", "DRAM")):
            moved = {
                name: [getattr(row, f"{name}_{level}") for row in members]
                for name in ("pat", "fa3")
            }
            bars(axis, specs, moved, least, log=level == "l2")
            if level == "l2":
                for name, style in (("plan", "v"), ("unpacked", "^")):
                    counted = [getattr(row, name) / row.least for row in members]
                    axis.plot(counted, f"k{style}", markersize=4, label=f"{name}, counted")
            axis.set_ylabel(f"{named} bytes / least")
            finish(axis, f"{title}: {named}")
    figure.savefig(path, dpi=150)


def show(document: Document, picture: Path | None) -> int:
    """Print and draw a document of kind ``traffic``."""
    rows = [Traffic(**row) for row in document["rows"]]
    print("\n".join(table(rows)))
    if picture:
        draw(rows, picture)
    return 0


def profiled(cases: Sequence[Case], settings: PatOptions) -> None:
    """Launch each contestant of each case once inside an NVTX range, after a run outside."""
    cuda: Any = torch.cuda
    drafts = settings.draft_tokens
    absent = usable([heads for heads, _, _ in cases], ["fa3"], draft_tokens=drafts)
    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for index, (heads, permuted, tree) in enumerate(cases):
        cuda.empty_cache()
        batch = device_batch(tree, heads, permuted, drafts)
        scale = heads.dim**-0.5
        runs = {"pat": Layer(batch, tree, heads, settings, scale).attend}
        if not absent["fa3"]:
            runs["fa3"] = PEERS["fa3"](batch, tree, scale)
        for name, run in runs.items():
            run()
            flush.max()
            cuda.synchronize()
            cuda.profiler.start()
            cuda.nvtx.range_push(tag(index, name))
            run()
            cuda.synchronize()
            cuda.nvtx.range_pop()
            cuda.profiler.stop()


if __name__ == "__main__":
    asked, chosen = Path(sys.argv[1]), json.loads(sys.argv[2])
    profiled([from_json(found) for found in json.loads(asked.read_text())], PatOptions(**chosen))
