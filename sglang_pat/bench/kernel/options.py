# SPDX-License-Identifier: Apache-2.0
"""The command line of the kernel benchmark."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sglang_pat.bench.common.document import value, whole_number
from sglang_pat.bench.common.trees import Tree
from sglang_pat.bench.kernel import batches, drafts, ragged, tiles
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import KV_DTYPES, PIECES, PatOptions, options_of
from sglang_pat.bench.kernel.studies.catalogue import STUDIES, cases_of
from sglang_pat.config import PRESETS
from sglang_pat.target import BRANCHINGS, DEFAULT_SPLIT_TOKENS, POLICIES, SPLITS
from sglang_pat.workspace import LAUNCHES

RULES = ("policy", "split", "split_tokens", "branching", "partial", "launch")
# Options that choose or bound what is run, and what they go with.
_BOUNDS = {
    "only": ("ragged", "study"),
    "trace": ("ragged",),
    "budget_s": ("ragged", "batches", "study"),
    "pool_gb": ("ragged", "batches"),
}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang_pat.bench.kernel", description=description)
    add = parser.add_argument
    heads, tree = value(Heads.parse), value(Tree.parse)
    add("--heads", nargs="+", type=heads, metavar="Q/KV", help="as 32/8 (default: all four)")
    add("--trees", nargs="+", type=tree, metavar="TREE", help="as 1,8,512_32,512,256")
    add("--permuted", action="store_true", help="slots at random places of the pool")
    how = "of K and V; beside fp8_e4m3, pat is timed with bfloat16 too (default: bfloat16, or as "
    add("--kv-dtype", choices=tuple(KV_DTYPES), help=f"{how}the server of --batches had it)")
    how = "time verify steps, of so many draft tokens a request, as 4,8 (default: decode steps)"
    add("--draft-tokens", type=value(drafts.parse), metavar="T[,T...]", help=how)
    how = "replay the batches of a server, out of its SGLANG_PAT_DUMP"
    add("--batches", type=Path, metavar="FILE", help=how)
    how = "with --batches: N of them, from the first to the last (default: all)"
    add("--sample", type=value(whole_number), metavar="N", help=how)
    add("--sweep", action="store_true", help="shared length and batch, both layouts, 32/8 heads")
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--traffic", action="store_true", help="L2 and DRAM bytes by ncu beside the plan's")
    instead("--timeline", action="store_true", help="begin, end, SM and item of all that runs")
    instead("--tiles", action="store_true", help="K/V bandwidth by row tile and length, no trees")
    instead("--ragged", action="store_true", help="batches whose requests differ, nine heads")
    how = "what each idea is worth, on the paper's shared trees; takes no rules"
    instead("--ablation", action="store_true", help=how)
    how = "what other papers' rules take on our kernels, and ours beside them; takes no rules"
    instead("--study", choices=tuple(STUDIES), help=how)
    held = (
        "with --ragged; --budget-s and --pool-gb with --batches, --only and --budget-s with --study"
    )
    _add_ragged(parser.add_argument_group(held))
    _add_rules(parser.add_argument_group("rules"))
    how = (
        "before each repeat a layer's matrix products instead of a write of 256 MB: code, too, is "
    )
    add("--cold-code", action="store_true", help=f"{how}in no cache then, as in a server")
    add("--quick", action="store_true", help="five trees, 32/8 heads, fewer repeats")
    add("--json", type=Path, metavar="FILE", help="write rows and conditions")
    add("--plot", type=Path, metavar="FILE", help="draw a PNG (needs matplotlib)")
    add("--from", dest="source", type=Path, metavar="FILE", help="a --json file, instead of a GPU")
    return parser


def _add_ragged(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--only", nargs="+", default=[], metavar="PATTERN", help="rows by name, as 'skew*' or 8/1")
    how = "a Mooncake trace for the family window (default: leave that family out)"
    add("--trace", type=Path, metavar="FILE", help=how)
    how = "start no row that would end later (default: no limit)"
    add("--budget-s", type=float, default=math.inf, metavar="S", help=how)
    how = f"leave out batches with more K and V (default: {ragged.POOL_GB:g})"
    add("--pool-gb", type=float, default=ragged.POOL_GB, metavar="GB", help=how)


def _add_rules(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    only = "the others are for experiments"
    how = f"rules to start from, a rule beside it wins (default: default; {only})"
    add("--preset", choices=tuple(PRESETS), help=how)
    add("--policy", choices=POLICIES, help=f"which packs pay (default: bytes; {only})")
    add("--split", choices=SPLITS, help=f"where items split (default: cost; {only})")
    how = "of a piece, with --split fixed, chunks or phases; of a branch, with --branching groups; "
    how += f"or with a preset of theirs (default: the preset's, or {DEFAULT_SPLIT_TOKENS}; {only})"
    add("--split-tokens", type=value(whole_number), metavar="N", help=how)
    how = "which parts are one item (default: cost; never with another policy or split)"
    add("--branching", choices=BRANCHINGS, help=how)
    partials = ("float32", "bfloat16")
    add("--partial", choices=partials, help="partial outputs (default: float32)")
    how = f"how the forward is launched (default: queue; {only})"
    add("--launch", choices=tuple(LAUNCHES), help=how)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with a message if an option would have no effect."""
    given = [name for name in ("preset", *RULES) if getattr(options, name) is not None]
    if given and (options.ablation or options.study):
        mode = "--ablation" if options.ablation else "--study"
        parser.error(f"{mode} compares fixed rules: leave {_flags(given)} out")
    elsewhere = [
        name for name in ("traffic", "tiles", "ablation", "study") if getattr(options, name)
    ]
    if options.kv_dtype not in (None, "bfloat16") and elsewhere:
        parser.error(f"--{elsewhere[0]} measures bfloat16 only: leave --kv-dtype out")
    untimed = [name for name in ("traffic", "timeline", "tiles") if getattr(options, name)]
    if options.cold_code and untimed:
        parser.error(f"--cold-code times batches only: leave it out with --{untimed[0]}")
    _check_drafts(parser, options)
    _check_batches(parser, options)
    _check_study(parser, options)
    if options.ragged and (options.trees or options.sweep):
        parser.error(
            "--ragged has batches of its own: leave --trees and --sweep out, pick by --only"
        )
    _check_bounds(parser, options)
    found = _resolved(options)[0]
    in_pieces = found.split in PIECES or found.branching == "groups"
    if options.split_tokens and not in_pieces:
        known = ", ".join(PIECES)
        parser.error(f"--split-tokens goes with --split {known} or --branching groups only")


def _flags(names: Sequence[str]) -> str:
    return " and ".join("--" + name.replace("_", "-") for name in names)


def _check_bounds(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name, modes in _BOUNDS.items():
        bounds = getattr(options, name) != parser.get_default(name)
        if bounds and not any(getattr(options, mode) for mode in modes):
            known = " or ".join(f"--{mode}" for mode in modes)
            parser.error(f"{_flags([name])} goes with {known} only")


def _check_drafts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not options.draft_tokens:
        return
    others = [
        name
        for name in ("sweep", "timeline", "tiles", "ragged", "ablation", "study")
        if getattr(options, name)
    ]
    if others:
        parser.error(f"--{others[0]} measures decode steps only: leave --draft-tokens out")
    if options.traffic and len(options.draft_tokens) > 1:
        parser.error("--traffic takes one number of --draft-tokens at a time")
    try:
        drafts.trees(options)
    except ValueError as error:
        parser.error(str(error))


def _check_batches(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not options.batches:
        if options.sample:
            parser.error("--sample goes with --batches only")
        return
    names = ("trees", "draft_tokens", "sweep", "timeline", "tiles", "ragged", "ablation", "study")
    others = [name for name in names if getattr(options, name)]
    if others:
        parser.error(f"--batches has batches of its own: leave {_flags(others[:1])} out")
    try:
        batches.replay(options)
    except (OSError, ValueError) as error:
        parser.error(f"--batches: {error}")


def _check_study(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not options.study:
        return
    others = [name for name in ("trees", "sweep", "permuted") if getattr(options, name)]
    if others:
        parser.error(
            f"--study has batches and layouts of its own: leave --{others[0]} out, pick by --only"
        )
    try:
        cases_of(options)
    except ValueError as error:
        parser.error(str(error))


def settings_of(options: argparse.Namespace) -> PatOptions:
    """What is asked for about pat; with several numbers of draft tokens, for the first."""
    resolved = _resolved(options)[0]
    if options.batches:
        found = batches.replay(options)
        return replace(resolved, kv_dtype=found.kv_dtype, draft_tokens=found.draft_tokens)
    draft_tokens = options.draft_tokens[0] if options.draft_tokens else 1
    kv_dtype = options.kv_dtype or "bfloat16"
    return replace(resolved, kv_dtype=kv_dtype, draft_tokens=draft_tokens)


def remarks_of(options: argparse.Namespace) -> tuple[str, ...]:
    """What a preset, a rule or a dump means beyond its name, a sentence each."""
    of_dump = batches.replay(options).remarks if options.batches else ()
    return _resolved(options)[1] + of_dump


def _resolved(options: argparse.Namespace) -> tuple[PatOptions, tuple[str, ...]]:
    given = {name: str(found) for name in RULES if (found := getattr(options, name)) is not None}
    preset = options.preset or "default"
    if not options.tiles:
        return options_of(preset, given)
    return options_of(preset, {"branching": "never", **given, "split": "mean"}, tiles.Whole)
