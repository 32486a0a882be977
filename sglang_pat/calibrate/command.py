# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``sglang-pat calibrate``."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_pat import _C, gpus, profiles
from sglang_pat.bench.common.document import read, value, write
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.calibrate import chosen, plans, rates, tiles
from sglang_pat.calibrate.fit import FACTORS, Fitted, Measured, fit
from sglang_pat.calibrate.machine import CalibrationError, Machine
from sglang_pat.profiles import Fit, Profile

TERMS = (
    "unique_tokens",
    "reread_tokens",
    "wide_tokens",
    "branches",
    "longest_branch_tokens",
    "partials",
    "items",
    "longest_item_tokens",
)
RUN_AGAIN = (
    "  If something else ran on this GPU, stop it and calibrate again: the rates may be off, too."
)
_SPEEDS = ("bytes_per_s", "flops_per_s")
_RATES = (*_SPEEDS, "item_overhead_s", "reread_weight")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` the options of the subcommand."""
    parser.add_argument(
        "--heads",
        type=value(Heads.parse),
        default=Heads(32, 8),
        metavar="Q/KV[/DIM]",
        help="query heads, KV heads and head dim to measure with (default: 32/8/128)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where to write the profile (default: the user's cache, where servers look for it)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every measured plan, too (default: no)"
    )
    parser.add_argument(
        "--tiles",
        action="store_true",
        help="measure nothing: print which tiles a kernel can have on the GPU, by the three "
        "constraints of the PAT paper, and which of them ours have",
    )
    parser.add_argument(
        "--gpu",
        choices=tuple(tiles.KNOWN),
        help="with --tiles: a GPU that need not be here (default: the one at hand)",
    )
    parser.add_argument(
        "--latency-ns",
        type=float,
        default=tiles.LATENCY_NS,
        metavar="NS",
        help=f"with --tiles: of a load from memory (default: {tiles.LATENCY_NS:.0f})",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="with --tiles: what `bench.kernel --tiles --json FILE` measured of our tiles, too",
    )


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measure the GPU at hand and write its profile; the exit status."""
    if arguments.tiles:
        return print_tiles(arguments)
    if arguments.gpu or arguments.measured:
        print(
            "sglang-pat calibrate: --gpu and --measured go with --tiles; a profile is of the GPU "
            "at hand",
            file=sys.stderr,
        )
        return 2
    from sglang_pat.calibrate.gpu import CudaMachine, reason_against_a_gpu

    reason = reason_against_a_gpu()
    if not reason and find_spec("scipy") is None:
        reason = "the fit needs scipy, which comes with SGLang: pip install scipy"
    if reason:
        print(
            f"sglang-pat calibrate: {reason}. Run it where the server runs; without it plans use "
            "the profile that ships for the GPU, else the vendor's rates",
            file=sys.stderr,
        )
        return 1
    return calibrate(CudaMachine(), arguments)


def print_tiles(arguments: argparse.Namespace) -> int:
    """The tile solver's tables; the exit status."""
    if not arguments.latency_ns > 0:
        print(
            f"sglang-pat calibrate: --latency-ns is {arguments.latency_ns:g}, must be more than 0",
            file=sys.stderr,
        )
        return 1
    if arguments.gpu:
        hardware: Any = tiles.KNOWN[arguments.gpu]
    else:
        import torch

        if not torch.cuda.is_available():
            print(
                f"sglang-pat calibrate: there is no CUDA device that torch {torch.__version__} can "
                f"use: name one with --gpu, {', '.join(tiles.KNOWN)}",
                file=sys.stderr,
            )
            return 1
        hardware = torch.cuda.get_device_properties()
    rate = gpus.profile_of(hardware).costs.bytes_per_s
    lines = tiles.table(hardware, rate, _C.CUDA_HEAD_DIMS, arguments.latency_ns)
    if arguments.measured:
        try:
            lines += ["", *tiles.measured_table(read(arguments.measured, ("tiles",)))]
        except (OSError, ValueError) as error:
            print(f"sglang-pat calibrate: --measured: {error}", file=sys.stderr)
            return 1
    print("\n".join(lines))
    return 0


@dataclass(frozen=True)
class Result:
    """What was measured: the rows that were fitted, those that were not, the fit, and whether the
    profile has its factors or those taken over."""

    profile: Profile
    fitted: Fitted
    rows: Sequence[Measured]
    held_out: Sequence[Measured]
    choice: chosen.Choice


def calibrate(machine: Machine, arguments: argparse.Namespace) -> int:
    """Measure ``machine``, print what was found and write its profile; the exit status."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {line}", flush=True)

    say(f"{machine.device.name}, {machine.device.multi_processor_count} SMs")
    try:
        found = measure(machine, arguments.heads, say)
    except CalibrationError as error:
        print(f"sglang-pat calibrate: {error}", file=sys.stderr)
        return 1
    print("\n".join(["", *report(found)]))
    if arguments.json:
        write(as_data(found), arguments.json)
    path = profiles.write(found.profile, arguments.out or profiles.user_folder())
    print(f"\nwritten: {path}\n(servers that start from now on use it; delete it to undo)")
    return 0


def measure(machine: Machine, heads: Heads, say: rates.Say) -> Result:
    """Rates, then plans, then the fit. Raises ``CalibrationError``."""
    _check(heads)
    # Not the user's profile of before, which may be damaged or wrong.
    vendor = gpus.vendor_profile(machine.device)
    bench = rates.Bench(machine, heads, vendor)
    costs = rates.measure(bench, say)
    bench = replace(bench, profile=replace(vendor, costs=costs))
    rows = plans.measure(bench, plans.FITTED, say)
    held_out = plans.measure(bench, plans.HELD_OUT, say)
    try:
        fitted = fit(rows, costs)
    except ValueError as error:
        raise CalibrationError(str(error)) from None
    others = replace(vendor.costs, **{name: getattr(costs, name) for name in _SPEEDS})
    choice = chosen.choose(bench, fitted.costs, others, fitted.error(held_out), say)
    kept, error_of_kept = others, None
    sources = dict(vendor.sources) | dict.fromkeys(_SPEEDS, "measured")
    if choice.fitted:
        kept = fitted.costs
        error_of_kept = Fit(choice.error, len(rows), len(held_out), fitted.launch_s)
        sources |= dict.fromkeys(_RATES, "measured")
        if costs.item_overhead_s == rates.LEAST_OVERHEAD_S:
            sources["item_overhead_s"] = "chosen"
        sources |= {name: "fitted" for name in FACTORS if name not in fitted.absent}
    device = machine.device
    profile = replace(
        bench.profile,
        costs=kept,
        sources=sources,
        fit=error_of_kept,
        clocks_mhz=device.clocks_mhz,
        versions=device.versions,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["sglang-pat", *sys.argv[1:]]),
    )
    return Result(profile, fitted, rows, held_out, choice)


def _check(heads: Heads) -> None:
    """Raises CalibrationError for heads that the CUDA kernels do not have."""
    if heads.dim not in _C.CUDA_HEAD_DIMS or heads.q // heads.kv > _C.CUDA_MAX_GROUP:
        raise CalibrationError(
            f"--heads is {heads}: the CUDA kernels have head dims "
            f"{', '.join(map(str, _C.CUDA_HEAD_DIMS))} and up to {_C.CUDA_MAX_GROUP} query heads "
            "a KV head"
        )


def report(found: Result) -> list[str]:
    """Rates, factors, what they mean in microseconds, and the errors."""
    costs, choice = found.fitted.costs, found.choice
    not_kept = "" if choice.fitted else ", not kept"
    sources = {
        name: "as given" if name in found.fitted.absent else f"fitted{not_kept}" for name in FACTORS
    }
    target = found.rows[0].target
    partial_us = costs.merge_factor * target.native.partial_cost_bytes() / costs.bytes_per_s * 1e6
    further_us = costs.item_overhead_s / target.num_sms * 1e6 + partial_us
    heads = f"{target.num_q_heads}/{target.num_kv_heads}/{target.head_dim}"
    return [
        f"bandwidth        {costs.bytes_per_s / 1e12:8.3f} TB/s",
        f"products         {costs.flops_per_s / 1e12:8.1f} TFLOP/s",
        f"item overhead    {costs.item_overhead_s * 1e6:8.2f} us on its SM{not_kept}",
        f"reread weight    {costs.reread_weight:8.2f} of a first read, for packing{not_kept}",
        f"reread factor    {costs.reread_factor:8.2f} of a first read ({sources['reread_factor']})",
        f"wide factor      {costs.wide_factor:8.2f} of a first read ({sources['wide_factor']})",
        f"merge factor     {costs.merge_factor:8.2f} of its bytes' time, {partial_us:.4f} us a "
        f"partial of {heads} ({sources['merge_factor']})",
        f"a further piece  {further_us:8.4f} us of all SMs, for one query and KV head",
        f"branch overhead  {costs.branch_overhead_s * 1e6:8.3f} us on its SM "
        f"({sources['branch_overhead_s']})",
        f"launch           {found.fitted.launch_s * 1e6:8.2f} us",
        f"error            {choice.error:8.1%} rms on {len(found.held_out)} plans that were not "
        f"fitted (at most {chosen.MAX_ERROR:.0%}), {found.fitted.error(found.rows):.1%} on "
        f"{len(found.rows)} that were",
        *_worst(found),
        f"factors          {choice}",
        *([] if choice.accurate else [RUN_AGAIN]),
    ]


def _worst(found: Result) -> list[str]:
    """The plans that the fit is furthest from, of those that were not fitted."""
    by_error = sorted(
        found.held_out, key=lambda row: -abs(found.fitted.seconds(row) / row.seconds - 1)
    )
    return [
        f"  {row.label}: {row.seconds * 1e6:.1f} us measured, "
        f"{found.fitted.seconds(row) * 1e6:.1f} modelled"
        for row in by_error[:3]
    ]


def as_data(found: Result) -> dict[str, Any]:
    """Every measured plan with what the model counts of it, for another fit."""
    profile = asdict(found.profile) | {"path": None}
    kinds = (("fitted", found.rows), ("held out", found.held_out))
    rows = [
        {
            "plan": row.label,
            "kind": kind,
            **{name: getattr(row.terms, name) for name in TERMS},
            "measured_us": row.seconds * 1e6,
            "modelled_us": found.fitted.seconds(row) * 1e6,
        }
        for kind, members in kinds
        for row in members
    ]
    return {
        "kind": "calibration",
        "profile": profile,
        "fitted": asdict(found.fitted.costs),
        "launch_s": found.fitted.launch_s,
        "choice": asdict(found.choice),
        "rows": rows,
    }
