# SPDX-License-Identifier: Apache-2.0
"""Requests of a trace in Mooncake's format: names of blocks of 512 tokens instead of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.forests import MOONCAKE_BLOCK
from sglang_pat.estimate.requests import MAX_TOKENS, Prompts, Request, fail, read_lines, whole

FORM = '{"timestamp": 0, "input_length": 700, "output_length": 90, "hash_ids": [1, 2]}'


def read_trace(file: Path) -> Prompts:
    """One request a line: ``input_length`` and ``output_length`` in tokens, and ``hash_ids``, a
    name for each block of 512 tokens; equal names stand for equal blocks after equal ones. Times
    of arrival are not looked at: how many requests run at a time is an option.

    Raises OSError for a file that cannot be read, InputError for another form.
    """
    return Prompts(read_lines(file, "requests", FORM, _request), unit=MOONCAKE_BLOCK)


def _request(given: Any, number: int, where: str) -> Request:
    keys = ("input_length", "output_length", "hash_ids")
    if not isinstance(given, dict) or any(key not in given for key in keys):
        fail(where, f"must be an object with {', '.join(keys)}, as {FORM}")
    length = whole(given["input_length"], f"{where}, input_length", MAX_TOKENS)
    output = max(1, given["output_length"]) if type(given["output_length"]) is int else None
    output = whole(output, f"{where}, output_length", MAX_TOKENS)
    names = given["hash_ids"]
    if not isinstance(names, list) or not all(type(name) is int for name in names):
        fail(where, "hash_ids must be a list of whole numbers, one for each block")
    if len(names) != -(-length // MOONCAKE_BLOCK):
        fail(
            where,
            f"input_length is {length}, but there are {len(names)} hash_ids: must be one for each "
            f"{MOONCAKE_BLOCK} tokens",
        )
    return Request(number, np.array(names, dtype=np.int64), length, output)
