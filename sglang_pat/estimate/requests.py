# SPDX-License-Identifier: Apache-2.0
"""The requests to estimate for: from prompts as text, as JSON lines, or from a trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_pat.dump import PathNodes

Symbols = npt.NDArray[np.int64]

TRACE_BLOCK = 512  # tokens of a block in Mooncake's traces
_MAX_TOKENS = 2**24
_FORM = '{"prompt": "..."}, {"messages": [...]} or {"input_ids": [...]}'
_TRACE_FORM = (
    f'{{"input_length": 700, "output_length": 90, "hash_ids": [1, 2]}}, an id for each '
    f"{TRACE_BLOCK} tokens"
)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt. ``symbols`` [n]: its token ids, or the names of its blocks; ``length``: its tokens;
    ``output``: tokens of its answer."""

    symbols: Symbols
    length: int
    output: int


def open_tokenizer(name: str) -> Any:
    """The one of ``transformers`` for a folder or a name on Hugging Face. Raises ValueError."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"--tokenizer {name}: {error}") from None


def read_prompts(file: Path, tokenizer: Any, output_tokens: int) -> list[Request]:
    """One request a line: of a ``.txt`` file its text, else JSON with ``prompt``, ``messages`` (and
    ``tools``) or ``input_ids``, which may stand in a ``body`` as in OpenAI's batch files. The
    answer has ``output_tokens``, or ``max_completion_tokens`` or ``max_tokens`` if that is less.

    Raises OSError for a file that cannot be read, ValueError that names the line.
    """
    found = []
    for where, given in _lines(file, _FORM):
        body = given["body"] if isinstance(given.get("body"), dict) else given
        try:
            tokens = _tokens(body, tokenizer)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not 0 < len(tokens) <= _MAX_TOKENS:
            raise ValueError(f"{where}: {len(tokens):,} tokens, must be 1 to {_MAX_TOKENS:,}")
        limits = [body.get(key) for key in ("max_completion_tokens", "max_tokens")]
        output = min([output_tokens, *(n for n in limits if type(n) is int and n > 0)])
        found.append(Request(np.array(tokens, dtype=np.int64), len(tokens), output))
    return found


def read_trace(file: Path) -> list[Request]:
    """One request a line in Mooncake's format: ``hash_ids`` has a name for each block of 512
    tokens; equal names stand for equal blocks after equal ones. Times of arrival are not looked at.

    Raises OSError for a file that cannot be read, ValueError that names the line.
    """
    found = []
    for where, given in _lines(file, _TRACE_FORM):
        length: Any = given.get("input_length")
        output: Any = given.get("output_length")
        names: Any = given.get("hash_ids")
        good = _are_whole([length, output]) and _are_whole(names)
        if not (good and 0 < length <= _MAX_TOKENS and len(names) == -(-length // TRACE_BLOCK)):
            raise ValueError(f"{where} must have a form as {_TRACE_FORM}")
        found.append(Request(np.array(names, dtype=np.int64), length, max(1, output)))
    return found


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


def _lines(file: Path, form: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The object in each line that is not blank, and where it stands in words."""
    lines = file.read_text(encoding="utf-8").splitlines()
    if not any(map(str.strip, lines)):
        raise ValueError(f"{file} has no requests; write one a line, as {form}")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = {"prompt": line} if file.suffix == ".txt" else json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number} is not JSON ({error})") from None
        if not isinstance(given, dict):
            raise ValueError(f"{file}, line {number} must be an object, as {form}")
        yield f"{file}, line {number}", given


def _are_whole(values: object) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)


def _tokens(given: dict[str, Any], tokenizer: Any) -> list[int]:
    ids, text, messages = (given.get(key) for key in ("input_ids", "prompt", "messages"))
    if isinstance(ids, list) and _are_whole(ids):
        return ids
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
