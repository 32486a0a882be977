# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate``: K/V reads that pat would save on given prompts, and the first text of a
prompt that keeps the text behind it from being shared (docs/estimate.md)."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_pat.dump import PathNodes
from sglang_pat.explain.command import add_target, make_target

if TYPE_CHECKING:
    from sglang_pat import Target

Symbols = npt.NDArray[np.int64]
Decode = Callable[[Symbols], str]

# Options, their defaults, the most, and what they mean.
_NUMBERS = (
    ("concurrency", 64, 16_384, "requests that decode at a time, neighbours in the file"),
    ("output_tokens", 256, 2**24, "of an answer, or the request's max_tokens if that is less"),
)
_STEPS = 16  # batches that are planned, evenly spaced over the file
_SHOWN = 3  # differences
_TRACE_BLOCK = 512  # tokens of a block in Mooncake's traces
_MAX_TOKENS = 2**24  # of a prompt
_FORM = '{"prompt": "..."}, {"messages": [...]} or {"input_ids": [...]}'
_TRACE_FORM = (
    '{"input_length": 700, "output_length": 90, "hash_ids": [1, 2]}, an id for each '
    f"{_TRACE_BLOCK} tokens"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` the options of the subcommand."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='one request a line: {"prompt": TEXT}, {"messages": [...]} or {"input_ids": [...]}; '
        "of a .txt file each line is a prompt",
    )
    source.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests in Mooncake's format: input_length, output_length and hash_ids",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="of the model, for prompts as text: a folder or a name on Hugging Face (default: no)",
    )
    for name, default, _, what in _NUMBERS:
        option, words = "--" + name.replace("_", "-"), f"{what} (default: {default})"
        parser.add_argument(option, type=int, metavar="N", default=default, help=words)
    add_target(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints the estimate for the options. Raises OSError for a file that cannot be read, and
    ValueError that says which option or line is wrong, and what would do."""
    for name, _, most, _ in _NUMBERS:
        if not 0 < (value := getattr(arguments, name)) <= most:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {value}, must be from 1 to {most:,}")
    target, machine = make_target(arguments, arguments.concurrency)
    differences: list[Difference] = []
    if arguments.trace is not None:
        unit, requests = _TRACE_BLOCK, _read(arguments.trace, _TRACE_FORM, _traced)
    else:
        tokenizer = None if arguments.tokenizer is None else _open_tokenizer(arguments.tokenizer)
        prompt = partial(_prompt, tokenizer=tokenizer, output_tokens=arguments.output_tokens)
        unit, requests = 1, _read(arguments.prompts, _FORM, prompt)
        differences = find_differences(requests, None if tokenizer is None else tokenizer.decode)
    alone, read, shared = reads_of(requests, unit, arguments.concurrency, target)
    print(
        f"{len(requests):,} prompts of {fmean(one.length for one in requests):,.0f} tokens, "
        f"{min(arguments.concurrency, len(requests))} at a time, planned for {machine}\n"
        f"shared with another of the batch: {shared:,.0f} tokens of a prompt\n"
        f"K/V tokens read a step: {read:,.0f} with pat instead of {alone:,.0f}, "
        f"{1 - read / alone:.0%} saved"
    )
    for found in differences[:_SHOWN]:
        print(
            f"{len(found.prompts) + 1} prompts, from number {found.first + 1} on, differ at token "
            f"{found.start:,}, before {found.common:,} equal tokens\n"
            f"  {' and '.join(map(_quoted, found.texts))}"
        )
    if len(differences) > _SHOWN:
        print(f"and {len(differences) - _SHOWN} more such differences")


def _quoted(text: str) -> str:
    words = " ".join(text.split())
    return json.dumps(words if len(words) <= 60 else f"{words[:57]}...", ensure_ascii=False)


class Request(NamedTuple):
    """A prompt. ``symbols`` [n]: its token ids, or the names of its blocks; ``length``: its tokens;
    ``output``: tokens of its answer."""

    symbols: Symbols
    length: int
    output: int


def _read(file: Path, form: str, parse: Callable[[dict[str, Any]], Request]) -> list[Request]:
    """What ``parse`` makes of each line: of a ``.txt`` file its text, else JSON."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            given = {"prompt": line} if file.suffix == ".txt" else json.loads(line)
            if not isinstance(given, dict):
                raise ValueError(f"must be an object, as {form}")
            one = parse(given)
            if not 0 < one.length <= _MAX_TOKENS:
                raise ValueError(f"{one.length:,} tokens, must be 1 to {_MAX_TOKENS:,}")
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        found.append(one)
    if not found:
        raise ValueError(f"{file} has no requests; write one a line, as {form}")
    return found


def _traced(given: dict[str, Any]) -> Request:
    """Of Mooncake's format: ``hash_ids`` has a name for each block of 512 tokens; equal names stand
    for equal blocks after equal ones. Times of arrival are not looked at."""
    length, output, names = (
        given.get(key) for key in ("input_length", "output_length", "hash_ids")
    )
    numbers = _whole_numbers([length, output])
    blocks = _whole_numbers(names)
    if not (numbers and blocks is not None and len(blocks) == -(-numbers[0] // _TRACE_BLOCK)):
        raise ValueError(f"must have a form as {_TRACE_FORM}")
    return Request(np.array(blocks, dtype=np.int64), numbers[0], max(1, numbers[1]))


def _prompt(given: dict[str, Any], tokenizer: Any, output_tokens: int) -> Request:
    """Of ``prompt``, ``messages`` and ``tools``, or ``input_ids``, which may stand in a ``body`` as
    in OpenAI's batch files. The answer has ``output_tokens``, or ``max_completion_tokens`` or
    ``max_tokens`` if that is less."""
    body = given["body"] if isinstance(given.get("body"), dict) else given
    tokens = _tokens(body, tokenizer)
    limits = [body.get(key) for key in ("max_completion_tokens", "max_tokens")]
    output = min([output_tokens, *(n for n in limits if type(n) is int and n > 0)])
    return Request(np.array(tokens, dtype=np.int64), len(tokens), output)


def _whole_numbers(values: Any) -> list[int] | None:
    """``values``, if they are a list of such."""
    good = isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)
    return values if good else None


def _open_tokenizer(name: str) -> Any:
    """The one of ``transformers`` for a folder or a name on Hugging Face. Raises ValueError."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"--tokenizer {name}: {' '.join(f'{error}'.split())}") from None


def _tokens(given: dict[str, Any], tokenizer: Any) -> list[int]:
    ids, text, messages = (given.get(key) for key in ("input_ids", "prompt", "messages"))
    if (whole := _whole_numbers(ids)) is not None:
        return whole
    if not isinstance(text, str) and not isinstance(messages, list):
        raise ValueError(f"must have a form as {_FORM}")
    if tokenizer is None:
        raise ValueError("is text: name the model's tokenizer with --tokenizer FOLDER_OR_NAME")
    if isinstance(text, str):
        return list(tokenizer.encode(text))
    try:
        text = tokenizer.apply_chat_template(
            [_as_sglang_has_it(message) for message in messages or ()],
            tools=given.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
        )
    except Exception as error:  # templates raise errors of many kinds
        raise ValueError(f"the chat template does not take the messages: {error}") from None
    return list(tokenizer.encode(text, add_special_tokens=False))


def _as_sglang_has_it(message: Any) -> Any:
    """A message as SGLang gives it to the chat template. The OpenAI SDK writes None as the content
    of an answer that only calls tools, and the arguments of calls as JSON text (SGLang 0.5.23,
    entrypoints/openai/serving_chat.py, ``normalize_assistant_tool_call_arguments``)."""
    if not isinstance(message, dict):
        return message
    message["content"] = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        with suppress(ValueError, TypeError, KeyError):  # a model's mistake, which SGLang leaves
            arguments = json.loads(call["function"]["arguments"])
            if isinstance(arguments, dict):
                call["function"]["arguments"] = arguments
    return message


def reads_of(
    requests: Sequence[Request], unit: int, concurrency: int, target: Target
) -> tuple[float, float, float]:
    """Mean K/V tokens of a batch, of one layer and KV head, that are read with every request by
    itself and by pat's plan, and the mean tokens of a prompt that another one begins with.

    Plans batches of neighbours. Prompts are taken to be in the cache as a whole, and the requests
    of a batch to be evenly spread over their answers. ``unit``: tokens of a symbol.
    """
    from sglang_pat.planner import Planner

    planner = Planner(target)
    size = min(concurrency, len(requests))
    last = len(requests) - size
    found = []
    for first in sorted({last * step // (_STEPS - 1) for step in range(_STEPS)}):
        batch = requests[first : first + size]
        paths = shared_paths(batch, unit)
        # The token that is being decoded is in the K/V cache, too.
        seq_lens = [
            one.length + (2 * n + 1) * one.output // (2 * size) + 1 for n, one in enumerate(batch)
        ]
        total = sum(seq_lens)
        shared = fmean(path[-1][2] if path else 0 for path in paths)
        found.append((total, planner.plan(paths, seq_lens).kv_tokens_read(total), shared))
    alone, read, shared = map(fmean, zip(*found, strict=True))
    return alone, read, shared


def common_prefix(one: Symbols, other: Symbols) -> int:
    """How many symbols two sequences begin with in common."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count


def shared_paths(requests: Sequence[Request], unit: int) -> list[PathNodes]:
    """The nodes that several of the requests share, as (id, start, end) in tokens, by request.
    ``unit``: tokens of a symbol.

    In the order of their symbols the requests under a node are neighbours, and what neighbours
    have in common is as long as the least that they have in common pairwise.
    """
    order = sorted(range(len(requests)), key=lambda n: requests[n].symbols.astype(">i8").tobytes())
    common = [
        common_prefix(requests[one].symbols, requests[other].symbols)
        for one, other in pairwise(order)
    ]
    paths: list[PathNodes] = [[] for _ in requests]
    nodes, open_ = 0, [(0, len(order))]
    while open_:
        first, last = open_.pop()
        if last - first < 2:
            continue
        least = min(common[first : last - 1])
        above = paths[order[first]]
        start = above[-1][2] if above else 0
        end = min(least * unit, *(requests[n].length for n in order[first:last]))
        if end > start:
            nodes += 1
            for number in order[first:last]:
                paths[number].append((nodes, start, end))
        cuts = [n + 1 for n in range(first, last - 1) if common[n] == least]
        open_ += zip([first, *cuts], [*cuts, last], strict=True)
    return paths


_LEAST_COMMON = 64  # tokens behind the difference that are equal
_TIMES_BEFORE = 0.25  # and how many of them there must be for each token before
_LOOKED_AT = 4096  # first tokens of each prompt in which equal runs are looked for
_WINDOW = 16  # tokens that are equal where an equal run is found; it has 31 or more
_CONTEXT = 6  # tokens on each side of a difference that are shown, so that its words are whole
_LONGEST = 24  # tokens of a difference that are shown

# A prompt, where another begins to differ from it, where what differs ends in both, and how many
# equal tokens follow.
_Partner = tuple[int, int, tuple[int, int], int]


class Difference(NamedTuple):
    """``prompts`` would share a long beginning with prompt ``first``, but for what differs from
    token ``start`` on, before ``common`` equal tokens. ``texts``: what differs, of the first two
    prompts, with some words around it; token ids where no text is known."""

    first: int
    prompts: list[int]
    start: int
    common: int
    texts: tuple[str, str]


def find_differences(requests: Sequence[Request], decode: Decode | None) -> list[Difference]:
    """The differences, the one that costs the most first; of a prompt only the first. Every prompt
    is compared with the first one that has an equal run of tokens, at whatever depth."""
    symbols = [request.symbols for request in requests]
    places: dict[bytes, tuple[int, int]] = {}  # first prompt with a window, and where in it
    found: dict[int, Difference] = {}
    for number, mine in enumerate(symbols):
        partner = _partner(symbols, mine, places)
        if partner is None:
            for at in range(0, min(len(mine), _LOOKED_AT) - _WINDOW, _WINDOW):
                places.setdefault(mine[at : at + _WINDOW].tobytes(), (number, at))
            continue
        first, start, ends, common = partner
        one = found.get(first)
        if one is None:
            of_first = _shown(symbols[first], start, ends[0], decode)
            texts = (of_first, _shown(mine, start, ends[1], decode))
            one = Difference(first, [], start, common, texts)
        one.prompts.append(number)
        found[first] = one._replace(start=min(one.start, start), common=min(one.common, common))
    return sorted(found.values(), key=lambda one: -one.common * len(one.prompts))


def _shown(tokens: Symbols, start: int, end: int, decode: Decode | None) -> str:
    """What differs in a prompt, in words with some around it, or else as token ids."""
    if decode is None:
        return str(tokens[start:end][:_LONGEST].tolist())
    return decode(tokens[max(0, start - _CONTEXT) : min(end, start + _LONGEST) + _CONTEXT])


def _partner(
    symbols: Sequence[Symbols], mine: Symbols, places: dict[bytes, tuple[int, int]]
) -> _Partner | None:
    """The prompt that has a long run of ``mine`` behind what differs; None where what differs costs
    little, or where there is no such prompt."""
    starts: dict[int, int] = {}  # where it begins to differ from another prompt
    found: list[_Partner] = []
    for j in range(min(len(mine), _LOOKED_AT) - _WINDOW + 1):
        first, i = places.get(mine[j : j + _WINDOW].tobytes(), (-1, 0))
        if first < 0:
            continue
        other = symbols[first]
        if first not in starts:
            starts[first] = common_prefix(other, mine)
        start = starts[first]
        if start >= min(i, j):  # they share it already, or one repeats what both begin with
            continue
        back = common_prefix(other[start:i][::-1], mine[start:j][::-1])
        common = back + common_prefix(other[i:], mine[j:])
        if common >= max(_LEAST_COMMON, _TIMES_BEFORE * (max(i, j) - back)):
            found.append((first, start, (i - back, j - back), common))
            if len(found) == _WINDOW:  # of a text that repeats itself, enough to have the best
                break
    return max(found, key=lambda partner: partner[-1], default=None)
