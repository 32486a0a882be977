# SPDX-License-Identifier: Apache-2.0
"""Prompts as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sglang_pat.estimate.requests import (
    MAX_SAMPLES,
    MAX_TOKENS,
    Prompts,
    Request,
    fail,
    read_lines,
    whole,
)
from sglang_pat.estimate.tokenizing import Tokenizer

FORM = (
    '{"prompt": "..."}, {"messages": [{"role": "user", "content": "..."}]} or '
    '{"input_ids": [1, 2, 3]}, each with "output_tokens" and "n" if they are known'
)
_KINDS = ("prompt", "messages", "input_ids")
_LARGEST_ID = 2**31 - 1


class Body(NamedTuple):
    """The object that says what the prompt of a line is, the line's number and place in words."""

    given: dict[str, Any]
    number: int
    where: str


def read_bodies(file: Path) -> list[Body]:
    """One request a line: ``prompt`` (text), ``messages`` (a conversation, and ``tools`` beside it)
    or ``input_ids`` (token ids), which may stand in a ``body``, as in the batch files of OpenAI's
    interface. Needs no tokenizer, which takes seconds to open.

    Raises OSError for a file that cannot be read, InputError for lines of another form.
    """
    return read_lines(file, "prompts", FORM, _body)


def prompts_of(bodies: Sequence[Body], tokenizer: Tokenizer | None, output_tokens: int) -> Prompts:
    """The requests of ``read_bodies``. ``output_tokens`` of the answer is as given here where a
    line does not say, or its ``max_completion_tokens`` or ``max_tokens`` if that is less; ``n``
    answers are asked for at once, 1 by default. Other keys are not looked at.

    Raises InputError for values of another form, or for text without a tokenizer.
    """
    return Prompts([_request(*body, tokenizer, output_tokens) for body in bodies])


def _body(given: Any, number: int, where: str) -> Body:
    if isinstance(given, dict) and isinstance(given.get("body"), dict):
        given = given["body"]  # a line of a batch file of OpenAI's
    if not isinstance(given, dict) or sum(kind in given for kind in _KINDS) != 1:
        fail(where, f"must be an object with one of {', '.join(_KINDS)}, as {FORM}")
    return Body(given, number, where)


def _request(
    given: dict[str, Any],
    number: int,
    where: str,
    tokenizer: Tokenizer | None,
    output_tokens: int,
) -> Request:
    tokens = _tokens(given, where, tokenizer)
    if not 0 < len(tokens) <= MAX_TOKENS:
        fail(where, f"the prompt has {len(tokens):,} tokens, must have 1 to {MAX_TOKENS:,}")
    for name in ("max_completion_tokens", "max_tokens"):
        if type(given.get(name)) is int and given[name] > 0:
            output_tokens = min(output_tokens, given[name])
    output = whole(given.get("output_tokens", output_tokens), f"{where}, output_tokens", MAX_TOKENS)
    samples = whole(given.get("n", 1), f"{where}, n", MAX_SAMPLES)
    return Request(number, np.array(tokens, dtype=np.int64), len(tokens), output, samples)


def _tokens(given: dict[str, Any], where: str, tokenizer: Tokenizer | None) -> list[int]:
    if "input_ids" in given:
        ids = given["input_ids"]
        good = isinstance(ids, list) and all(
            type(token) is int and 0 <= token <= _LARGEST_ID for token in ids
        )
        if not good:
            fail(where, f"input_ids must be a list of whole numbers from 0 to {_LARGEST_ID:,}")
        return list(ids)
    if tokenizer is None:
        fail(
            where,
            "is text, which needs the model's tokenizer: give it with --tokenizer FOLDER_OR_NAME, "
            'or the prompts as token ids, {"input_ids": [...]}',
        )
    if "prompt" in given:
        if not isinstance(given["prompt"], str):
            fail(where, f"prompt is {type(given['prompt']).__name__}, must be text")
        return tokenizer.encode(given["prompt"])
    messages = given["messages"]
    good = isinstance(messages, list) and all(
        isinstance(message, dict) and "role" in message for message in messages
    )
    if not good or not messages:
        fail(where, 'messages must be a list of {"role": ..., "content": ...}')
    return tokenizer.chat([*map(_as_sglang_has_it, messages)], given.get("tools"))


def _as_sglang_has_it(message: dict[str, Any]) -> dict[str, Any]:
    """A message as SGLang gives it to the chat template: a conversation that was written down from
    the OpenAI SDK has None as the text of an answer that only calls tools, and the arguments of
    calls as JSON in a text.

    Source: ``_process_messages`` and ``normalize_assistant_tool_call_arguments`` in SGLang 0.5.23,
    entrypoints/openai/serving_chat.py.
    """
    found = {**message}
    if found.get("content", "") is None:
        found["content"] = ""
    if found["role"] == "assistant" and isinstance(found.get("tool_calls"), list):
        found["tool_calls"] = [*map(_with_parsed_arguments, found["tool_calls"])]
    return found


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:  # a model's mistake, which SGLang leaves as it is
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
