# SPDX-License-Identifier: Apache-2.0
"""Runs of SGLang's own client, ``sglang.benchmark.serving``, in this process: it takes some ten
seconds to import, a run takes as many."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.serving.loads import Load

# A run's output tokens/s are those of the longest time in which so much of the most requests that
# were active at the same time were: without its beginning and its end.
STEADY_RATIO = "0.8"
PROGRAM = (
    "sglang.benchmark.steady_state_serving",
    "--steady-state-concurrency-ratio",
    STEADY_RATIO,
)
_DETAILS = (
    "server_info",
    "errors",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "generated_texts",
)


class ClientError(RuntimeError):
    """The client ended without a result, or a request failed."""


def ask(load: Load, *, port: int, seed: int, folder: Path, log: Path) -> dict[str, Any]:
    """What the client wrote of one run on the server at ``port``: its names, milliseconds and
    tokens/s; under ``steady`` its steady state.

    Args:
        folder: for the client's files.
        log: gets what the client prints.

    Raises:
        ClientError: see there.
    """
    from sglang.benchmark import steady_state_serving

    result, steady = folder / "result.jsonl", folder / "steady.jsonl"
    for file in (result, steady):
        file.unlink(missing_ok=True)
    own = (
        *("--host", "127.0.0.1", "--port", str(port), "--seed", str(seed), "--disable-tqdm"),
        *("--output-file", str(result), "--output-details"),
        *("--steady-state-output-file", str(steady)),
    )
    with _at_home(folder), log.open("a") as said, redirect_stdout(said), redirect_stderr(said):
        try:
            steady_state_serving.cli_main([*PROGRAM[1:], *load.arguments, *own])
        except (Exception, SystemExit) as error:
            raise ClientError(f"SGLang's client failed ({error}), see {log}") from error
    found: dict[str, Any] = json.loads(result.read_text())
    _check(found, load, log)
    for name in _DETAILS:
        found.pop(name, None)
    return found | {"steady": json.loads(steady.read_text())}


def _check(found: dict[str, Any], load: Load, log: Path) -> None:
    """Raise ClientError for a request that failed or did not get the tokens that it asked for: a
    stream that ends with an error counts as a success with the client."""
    failed = [error for error in found["errors"] if error]
    if failed:
        raise ClientError(f"{len(failed)} requests failed, the first one so: {failed[0]}")
    lengths = found["output_lens"]
    short = sum(load.output not in (None, length) for length in lengths)
    if short or not all(found["ttfts"]):
        raise ClientError(
            f"{short} of {len(lengths)} requests did not get the tokens that they asked for, "
            f"{found['ttfts'].count(0.0)} none: see the servers' logs beside {log}"
        )


@contextmanager
def _at_home(folder: Path) -> Iterator[None]:
    """The client keeps generated prompts in the home folder, under a name that does not tell
    vocabularies apart: prompts of another model would be found."""
    home = os.environ.get("HOME")
    os.environ["HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("HOME")
        if home is not None:
            os.environ["HOME"] = home
