# SPDX-License-Identifier: Apache-2.0
"""What ``sglang-pat estimate`` says of prompts or a trace: text for people, data for JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_pat.estimate.differences import Difference
from sglang_pat.estimate.planning import Estimate
from sglang_pat.estimate.requests import Prompts
from sglang_pat.estimate.step import LAYER_S, StepModel
from sglang_pat.estimate.verdict import Verdict
from sglang_pat.explain.text import counted, numbers

_PIECES = 4  # of a difference that are shown
_PIECE_LETTERS = 40


@dataclass(frozen=True, slots=True)
class Result:
    """``machine``: the GPU in words. ``differences``: None where prompts have no tokens to compare;
    ``moved``: the estimate with what differs at the end of the prompts, if anything does;
    ``memory_bytes``: of the GPU."""

    requests: Prompts
    concurrency: int
    machine: str
    kv_dtype: str
    model: StepModel
    found: Estimate
    verdict: Verdict
    differences: list[Difference] | None
    moved: Estimate | None
    memory_bytes: int


def text(result: Result, picture: Sequence[str]) -> str:
    """The report; ``picture``: the lines of the tree."""
    found = result.found
    lines = [
        *_head(result),
        "",
        *_numbers(result),
        *_memory(result),
        "",
        *textwrap.wrap(f"verdict: {result.verdict}", 100, subsequent_indent="  "),
        "",
        f"tree of a typical step: {counted(len(found.typical.seq_lens), 'request')}, "
        f"{found.typical.unpacked:,} K/V tokens, {found.typical.held:,} of them different",
        *(f"  {line}" for line in picture),
    ]
    if result.differences is not None:
        lines += ["", *_differences(result)]
    return "\n".join(lines)


def _head(result: Result) -> list[str]:
    lengths = [request.length for request in result.requests.requests]
    answers = len(result.requests.queue())
    least, most = min(lengths), max(lengths)
    tokens = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    several = f", {answers:,} answers" if answers > len(lengths) else ""
    fewer = ""
    if answers < result.concurrency:
        fewer = f" (no more are there; --concurrency is {result.concurrency})"
    return [
        f"{counted(len(lengths), 'prompt')} of {tokens} tokens{several}, "
        f"{min(result.concurrency, answers)} at a time{fewer}",
        head_of_model(result.model, result.kv_dtype, result.machine),
    ]


def head_of_model(model: StepModel, kv_dtype: str, machine: str) -> str:
    """The line that says for which model and machine was planned."""
    target = model.target
    ranks = f" on each of {model.tp}" if model.tp > 1 else ""
    return (
        f"{model.model.name}: {model.model.attention_layers} layers with attention, "
        f"{target.num_q_heads}/{target.num_kv_heads} heads of {target.head_dim}{ranks}, K/V in "
        f"{kv_dtype}; planned for {machine}"
    )


def _numbers(result: Result) -> list[str]:
    found, model = result.found, result.model
    read, unpacked = found.mean("read"), found.mean("unpacked")
    slowest_s = found.mean("slowest_s") + found.mean("rest_s")
    gigabytes = model.model.bytes_read(round(found.queries)) / model.tp / 1e9
    saved = f"{found.saved:.0%} saved" if read < unpacked else "nothing saved"
    rest = "a step that you measured" if model.base_s else f"{LAYER_S * 1e6:.0f} us a layer"
    rows = [
        ("", "with pat", "without", ""),
        ("K/V tokens read a step", f"{read:,.0f}", f"{unpacked:,.0f}", saved),
        (
            "time per token, ms",
            _ms(found.packed_step_s),
            _ms(found.unpacked_step_s),
            f"{found.ratio:.2f}; without pat {_ms(slowest_s)} if no read came from the L2",
        ),
        (
            "  of it attention",
            _ms(found.mean("packed_s")),
            _ms(found.mean("unpacked_s")),
            f"by the cost model, at {model.target.bytes_per_s / 1e12:.2f} TB/s",
        ),
        (
            "  the rest",
            _ms(found.mean("rest_s")),
            _ms(found.mean("rest_s")),
            f"{gigabytes:.1f} GB of weights, their products, {rest}",
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{name:<{widths[0]}}  {one:>{widths[1]}}  {other:>{widths[2]}}  {note}".rstrip()
        for name, one, other, note in rows
    ]
    return [
        *lines,
        f"(mean of {counted(len(found.steps), 'step')}; every time is modelled, none is measured: "
        "docs/estimate.md)",
    ]


def _memory(result: Result) -> list[str]:
    """A warning where so many requests would not fit the GPU."""
    most = max(step.held for step in result.found.steps)
    needed = result.model.bytes_needed(most)
    if needed <= result.memory_bytes:
        return []
    return [
        f"note: {most:,} K/V tokens and the weights take {needed / 1e9:.0f} GB of a GPU that has "
        f"{result.memory_bytes / 1e9:.0f}: a server would run fewer at a time; lower --concurrency"
    ]


def _differences(result: Result) -> list[str]:
    if not result.differences:
        return ["no prompts were found that a timestamp or an id keeps from sharing"]
    lines = ["prompts that share little, because a few tokens near their start differ"]
    for difference in result.differences:
        places = [result.requests.requests[number].line for number in difference.cuts]
        kind = difference.kind or "tokens"
        lines.append(
            f"  {numbers('line', 'lines', places)}: {kind} at token {difference.start:,}, and "
            f"at least {counted(difference.common, 'equal token')} behind"
        )
        shown = list(dict.fromkeys(difference.pieces.values()))
        words = ", ".join(_piece(piece, difference.kind) for piece in shown[:_PIECES])
        more = f" and {len(shown) - _PIECES:,} more" if len(shown) > _PIECES else ""
        lines.append(f"    {words}{more}")
    if result.moved is not None:
        lines.append(
            f"  at the end of the prompt instead: {max(0.0, result.moved.saved):.0%} of the K/V "
            f"reads saved, {_ms(result.moved.packed_step_s)} ms a token with pat instead of "
            f"{_ms(result.found.packed_step_s)}"
        )
    return lines


def _piece(piece: str, kind: str) -> str:
    words = " ".join(piece.split())
    if len(words) > _PIECE_LETTERS:
        words = words[:_PIECE_LETTERS] + "..."
    return f'"{words}"' if kind else f"[{words}]" if words else "[none]"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def data(result: Result) -> dict[str, Any]:
    """The same as plain data, to be written as JSON. Times in ms, tokens of a step and layer."""
    lines = [request.line for request in result.requests.requests]
    found = {
        "prompts": len(result.requests.requests),
        "concurrency": result.concurrency,
        "machine": result.machine,
        "kv_dtype": result.kv_dtype,
        "tp": result.model.tp,
        "model": asdict(result.model.model),
        "target": asdict(result.model.target),
        **_sums(result.found),
        "verdict": asdict(result.verdict),
        "steps": [
            {
                "lines": [lines[number] for number in step.numbers],
                "kv_tokens_read": step.read,
                "kv_tokens_unpacked": step.unpacked,
                "kv_tokens_held": step.held,
                "packed_ms": (step.packed_s + step.rest_s) * 1e3,
                "unpacked_ms": (step.unpacked_s + step.rest_s) * 1e3,
            }
            for step in result.found.steps
        ],
        "differences": None,
        "moved": None if result.moved is None else _sums(result.moved),
    }
    if result.differences is not None:
        found["differences"] = [
            {
                "kind": difference.kind,
                "start": difference.start,
                "common": difference.common,
                "prompts": [
                    {"line": lines[number], "end": cut.end, "text": difference.pieces[number]}
                    for number, cut in difference.cuts.items()
                ],
            }
            for difference in result.differences
        ]
    return found


def _sums(found: Estimate) -> dict[str, float]:
    return {
        "kv_tokens_read": found.mean("read"),
        "kv_tokens_unpacked": found.mean("unpacked"),
        "kv_tokens_held": found.mean("held"),
        "kv_reads_saved": found.saved,
        "modelled_ms": found.packed_step_s * 1e3,
        "modelled_unpacked_ms": found.unpacked_step_s * 1e3,
        "modelled_unpacked_without_l2_ms": (found.mean("slowest_s") + found.mean("rest_s")) * 1e3,
        "modelled_attention_ms": found.mean("packed_s") * 1e3,
        "modelled_attention_unpacked_ms": found.mean("unpacked_s") * 1e3,
        "modelled_rest_ms": found.mean("rest_s") * 1e3,
        "ratio": found.ratio,
    }
