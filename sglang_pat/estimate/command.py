# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``sglang-pat estimate``: its options, and what it prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_pat.estimate.break_even.command import add_options, run_break_even
from sglang_pat.estimate.options import DEFAULT_GPU, add_machine, make_model

if TYPE_CHECKING:
    from sglang_pat.estimate.requests import Prompts
    from sglang_pat.estimate.tokenizing import Tokenizer

_DEFAULTS = {"concurrency": 64, "output_tokens": 256, "steps": 16, "lines": 12, "seconds": 10}
# Where the requests must come from for an option to mean anything.
_ONLY_WITH = {
    "concurrency": ("prompts", "trace"),
    "output_tokens": ("prompts",),
    "steps": ("prompts", "trace"),
    "lines": ("prompts", "trace"),
    "seconds": ("url",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` the options of the subcommand."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='one request a line: {"prompt": TEXT}, {"messages": [...]} or {"input_ids": [...]}, '
        'each with "output_tokens" and "n" (answers asked for at once) if they are known',
    )
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests of a trace in Mooncake's format: input_length, output_length and hash_ids",
    )
    source.add_argument(
        "--url",
        metavar="URL",
        help="a running server, as http://localhost:30000: with pat its counters, without what "
        "SGLang's metrics say (--enable-metrics)",
    )
    source.add_argument(
        "--break-even",
        action="store_true",
        help="no requests: from how many shared tokens on pat pays, for 1 to 256 requests on one "
        "prefix",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="of the model: a folder or a name on Hugging Face; prompts as text need it, of token "
        "ids it shows the text (default: no)",
    )
    for name, what in (
        ("concurrency", "requests that decode at a time"),
        (
            "output_tokens",
            "tokens of an answer where a prompt does not say, or its max_tokens if less",
        ),
        ("steps", "decode steps that are planned, evenly spaced over the run"),
    ):
        option = "--" + name.replace("_", "-")
        help_of = f"{what} (default: {_DEFAULTS[name]})"
        parser.add_argument(option, type=int, metavar="N", help=help_of)
    add_machine(parser)
    add_options(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=f"with --url: how long to read its metrics (default: {_DEFAULTS['seconds']})",
    )
    parser.add_argument(
        "--lines",
        type=int,
        metavar="N",
        help="nodes of the tree that are drawn, those that save the most; 0 for all (default: "
        f"{_DEFAULTS['lines']})",
    )
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="draw the plan of a typical step to FILE, as explain does (default: no)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers to FILE, too (default: no)"
    )


def run_estimate(arguments: argparse.Namespace) -> int:
    """Estimates for the options; exit status 0, or 1 with a line that says what is wrong, which
    value it has and what would do."""
    try:
        _check(arguments)
        said = _estimated(arguments)
    except (ValueError, OSError) as error:
        print(f"sglang-pat estimate: {error}", file=sys.stderr)
        return 1
    print(said)
    return 0


def _estimated(arguments: argparse.Namespace) -> str:
    if arguments.break_even:
        return run_break_even(arguments)
    return _of_server(arguments) if arguments.url is not None else _of_prompts(arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Gives options their defaults. Raises InputError that names the option, its value and what is
    allowed."""
    from sglang_pat.estimate.requests import MAX_TOKENS, InputError

    for name, least, most in (
        ("concurrency", 1, 16_384),
        ("output_tokens", 1, MAX_TOKENS),
        ("steps", 1, 1_000),
        ("lines", 0, 1_000_000),
        ("head_dim", 1, 1_024),
        ("layers", 1, 10_000),
        ("tp", 1, 1_024),
        ("seconds", 0, 3_600),
        ("base_ms", 0.001, 1e6),
    ):
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            option = name.replace("_", "-")
            raise InputError(f"--{option} is {value}, must be from {least} to {most:,}")
    source = next(
        name
        for name in ("prompts", "trace", "url", "break_even")
        if getattr(arguments, name) not in (None, False)
    )
    given = "--" + source.replace("_", "-")
    for name, sources in _ONLY_WITH.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, _DEFAULTS[name])
        elif source not in sources:
            option, allowed = name.replace("_", "-"), " and ".join(f"--{each}" for each in sources)
            raise InputError(f"--{option} is for {allowed}; drop it with {given}")
    if arguments.tokenizer is not None and given != "--prompts":
        raise InputError(f"--tokenizer is for --prompts: {given} has no text; drop it")
    if arguments.url is not None and (arguments.svg or arguments.base_ms):
        raise InputError("--svg and --base-ms are for --prompts and --trace; drop them with --url")
    if arguments.break_even and arguments.svg:
        raise InputError("--svg draws the plan of a step of requests: with --break-even use --plot")
    if not arguments.break_even and (arguments.plot or arguments.private is not None):
        raise InputError(f"--plot and --private are for --break-even; drop them with {given}")


def _of_prompts(arguments: argparse.Namespace) -> str:
    from sglang_pat.dump import Requests
    from sglang_pat.estimate import differences, report
    from sglang_pat.estimate.batches import closed_loop
    from sglang_pat.estimate.picture import tree_lines
    from sglang_pat.estimate.planning import estimate
    from sglang_pat.estimate.verdict import judge
    from sglang_pat.explain.reading import explain
    from sglang_pat.srt.machines import known_gpu

    requests, tokenizer = _read(arguments)
    batches = closed_loop(requests.queue(), arguments.concurrency, arguments.steps)
    model, machine = make_model(arguments, max(len(batch.requests) for batch in batches))
    found = estimate(requests, batches, model)
    named = moved = None
    if requests.unit == 1:
        decode = tokenizer.decode if tokenizer is not None else None
        named, behind = differences.find_all(requests.requests, decode)
        if named:
            moved = estimate(replace(requests, requests=behind), batches, model)
    result = report.Result(
        requests,
        arguments.concurrency,
        machine,
        arguments.kv_dtype,
        model,
        found,
        judge(found, model, moved),
        named,
        moved,
        known_gpu(arguments.gpu or DEFAULT_GPU).memory_mib * 2**20,
    )
    typical = found.typical
    explained = explain(typical.plan, Requests(typical.paths, typical.seq_lens), model.target)
    if arguments.svg is not None:
        from sglang_pat.explain.svg import write_svg

        arguments.svg.write_text(write_svg(explained, machine), encoding="utf-8")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report.data(result)) + "\n", encoding="utf-8")

    def words(query: int, start: int, end: int) -> str:
        symbols = requests.requests[typical.numbers[query]].symbols
        return (
            ""
            if tokenizer is None
            else tokenizer.decode(symbols[start : min(end, start + 24)].tolist())
        )

    return report.text(result, tree_lines(explained.nodes, arguments.lines, words))


def _read(arguments: argparse.Namespace) -> tuple[Prompts, Tokenizer | None]:
    if arguments.trace is not None:
        from sglang_pat.estimate.trace import read_trace

        return read_trace(arguments.trace), None
    from sglang_pat.estimate.prompts import prompts_of, read_bodies
    from sglang_pat.estimate.tokenizing import Tokenizer

    bodies = read_bodies(arguments.prompts)
    tokenizer = None if arguments.tokenizer is None else Tokenizer(arguments.tokenizer)
    return prompts_of(bodies, tokenizer, arguments.output_tokens), tokenizer


def _of_server(arguments: argparse.Namespace) -> str:
    from sglang_pat.estimate import live
    from sglang_pat.estimate.server import observe

    seen = observe(arguments.url, arguments.seconds)
    model = None
    if arguments.gpu is not None:
        if arguments.model is None:
            arguments.model = seen.model
        arguments.tp = arguments.tp or seen.tp
        model, _ = make_model(arguments, max(1, round(seen.running or 1)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(live.data(seen, model)) + "\n", encoding="utf-8")
    return live.text(seen, model)
