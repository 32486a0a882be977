# SPDX-License-Identifier: Apache-2.0
"""One server per backend, all alive at the same time on the same GPUs, and runs of SGLang's own
client, ``sglang.benchmark.serving``, in this process: it takes some ten seconds to import, a run
takes as many."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.serving.loads import PROGRAM, Load
from sglang_pat.demo.server import Server, ServerError

PAGE = 256  # tokens of the largest page
DYING_S = 2.0  # between a failed scheduler and the end of its server
_DETAILS = {"server_info", "errors", "input_lens", "output_lens", "ttfts", "itls"}
_DETAILS |= {"generated_texts"}


class ClientError(RuntimeError):
    """The client ended without a result, or a request failed."""


@contextmanager
def serve(
    model: Path,
    backends: Sequence[str],
    arguments: Sequence[str],
    *,
    device: str,
    pool_tokens: int,
    logs: Path,
    ready_s: float,
) -> Iterator[dict[str, Server]]:
    """A server of ``model`` for each backend, started at the same time with the same arguments.

    Raises:
        ServerError: one did not start, its K/V pool has not ``pool_tokens``, or it ended while a
            request to it failed.
    """
    # While they start, servers of several GPUs take each other's growth for ranks out of balance.
    env = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    if device == "cpu":
        env |= {"OMP_WAIT_POLICY": "PASSIVE"}  # spinning threads would starve the other servers
    how: dict[str, Any] = {"device": device, "args": arguments, "env": env, "ready_s": ready_s}
    servers = {
        backend: Server(model, backend=backend, log=logs / f"server-{backend}.log", **how)
        for backend in backends
    }
    try:
        for server in servers.values():
            server.start()
        import_module(PROGRAM[0])  # takes seconds: meanwhile
        for backend, server in servers.items():
            server.wait_until_ready()
            pool = server.get("/server_info")["max_total_num_tokens"]
            if pool + PAGE <= pool_tokens:  # SGLang rounds it down to whole pages
                raise ServerError(
                    f"{backend} has a K/V pool of {pool} tokens instead of {pool_tokens}: not all "
                    "servers fit the GPU; lower --pool-tokens, name fewer --backends or raise --tp"
                )
        yield servers
    except (ClientError, OSError):
        time.sleep(DYING_S)
        for server in servers.values():
            server.check_alive()
        raise
    finally:
        with ThreadPoolExecutor() as threads:
            list(threads.map(Server.stop, servers.values()))


def ask(load: Load, *, port: int, seed: int, folder: Path) -> dict[str, Any]:
    """What the client wrote of one run on the server at ``port``: its names, milliseconds and
    tokens/s; under ``steady`` its steady state. ``folder``: for its files and what it prints.

    Raises:
        ClientError: see there.
    """
    client = import_module(load.program[0])
    result, steady, log = (folder / n for n in ("result.jsonl", "steady.jsonl", "client.log"))
    for file in (result, steady):
        file.unlink(missing_ok=True)
    own = (
        *("--host", "127.0.0.1", "--port", str(port), "--seed", str(seed), "--disable-tqdm"),
        *("--output-file", str(result), "--output-details"),
        *("--steady-state-output-file", str(steady)),
    )
    # The client keeps generated prompts in the home folder, under a name that does not tell
    # vocabularies apart: prompts of another model would be found.
    at_home = mock.patch.dict(os.environ, HOME=str(folder))
    with at_home, log.open("a") as said, redirect_stdout(said), redirect_stderr(said):
        try:
            client.cli_main([*load.program[1:], *load.arguments, *own])
        except (Exception, SystemExit) as error:
            raise ClientError(f"SGLang's client failed ({error}), see {log}") from error
    found: dict[str, Any] = json.loads(result.read_text())
    _check(found, load, log)
    return {name: each for name, each in found.items() if name not in _DETAILS} | {
        "steady": json.loads(steady.read_text())
    }


def _check(found: dict[str, Any], load: Load, log: Path) -> None:
    """Raise ClientError for a request that failed or did not get the tokens that it asked for: a
    stream that ends with an error counts as a success with the client."""
    failed = [error for error in found["errors"] if error]
    if failed:
        raise ClientError(f"{len(failed)} requests failed, the first one so: {failed[0]}")
    lengths = found["output_lens"]
    least, most = load.output or (0, max(lengths, default=0))
    short = sum(not least <= length <= most for length in lengths)
    if short or not all(found["ttfts"]):
        raise ClientError(
            f"{short} of {len(lengths)} requests did not get the tokens that they asked for, "
            f"{found['ttfts'].count(0.0)} none: see the servers' logs beside {log}"
        )
