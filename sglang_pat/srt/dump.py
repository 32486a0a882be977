# SPDX-License-Identifier: Apache-2.0
"""The next batches of a server in a file (``SGLANG_PAT_DUMP``): paths, lengths and their plans.

Without the variable, and once the file is complete, a step tests one attribute. Nothing here may
stop or delay a step: what goes wrong costs a batch or the rest of the dump, and a thread of its own
writes the file. Only the thread waits for the disk, and it holds the interpreter's lock for no
longer than a call: lines are ready when it gets them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson
import torch

from sglang_pat.config import PatConfig
from sglang_pat.dump import KIND, VERSION
from sglang_pat.target import Target

if TYPE_CHECKING:
    from sglang_pat.planner import Plan
    from sglang_pat.srt.step import MicroBatch

logger = logging.getLogger("sglang_pat")

MAX_NODES = 10_000  # of a batch's paths, of all requests together
MAX_WAITING = 16 << 20  # bytes of lines that wait for the disk
_PACKAGES = ("sglang-pat", "sglang", "torch")


class LineWriter:
    """Writes lines to a new file at ``path``, for its user alone, in a thread that ends with the
    process. Raises OSError if there is something already or the file cannot be made.

    ``failed``: whether the file took no more; said once.
    """

    def __init__(self, path: str) -> None:
        self.failed = False
        self._path = path
        # With O_EXCL what is there, a FIFO or a link included, is neither opened nor followed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file: BinaryIO = os.fdopen(os.open(path, flags, 0o600), "wb")
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()
        # In bytes. Each is changed by one thread alone.
        self._given = self._written = 0
        threading.Thread(target=self._run, name="sglang-pat-dump", daemon=True).start()

    def put(self, line: bytes) -> bool:
        """Have ``line`` written; False if too many bytes wait already, and it is not."""
        if self._given - self._written + len(line) > MAX_WAITING:
            return False
        self._given += len(line)
        self._lines.put(line)
        return True

    def finish(self, line: bytes) -> None:
        """Have the last line written, and the file closed."""
        self._lines.put(line)
        self._lines.put(None)

    def _run(self) -> None:
        try:
            with self._file as file:
                for line in iter(self._lines.get, None):
                    file.write(line)
                    file.flush()
                    self._written += len(line)
        except OSError as error:
            self.failed = True
            logger.warning("sglang_pat: %s ends early: %r", self._path, error)
        else:
            logger.info("sglang_pat: %s is complete", self._path)


class Tap:
    """Hands the next ``batches`` batches for which a plan is made to ``lines``; those that are left
    out count, too."""

    def __init__(self, lines: LineWriter, batches: int) -> None:
        self._lines = lines
        self._batches = batches
        self._left_out: Counter[str] = Counter()

    def take(self, state: MicroBatch, seq_lens: torch.Tensor, plan: Plan) -> Tap | None:
        """Dump a step for which ``plan`` was made. ``seq_lens`` [B] int64, CPU: its
        least lengths, those of rows without a request included. Returns the tap of the next steps,
        None if no more is wanted. Raises nothing."""
        try:
            self._dump(state, seq_lens.tolist(), plan)
        except Exception as error:  # such as a request that is no more as SGLang has them
            logger.debug("sglang_pat: a step that cannot be dumped", exc_info=True)
            self._leave_out(f"not readable: {type(error).__name__}")
        self._batches -= 1
        if not self._batches:
            end = {"end": "complete", "left_out": self._left_out}
            self._lines.finish(orjson.dumps(end) + b"\n")
        return self if self._batches and not self._lines.failed else None

    def _dump(self, state: MicroBatch, seq_lens: list[int], plan: Plan) -> None:
        paths: list[list[tuple[int, int, int]]] = [[] for _ in seq_lens]
        if state.has_paths:  # else the batch was planned unshared
            paths = state.planner.last_paths()
        if sum(map(len, paths)) > MAX_NODES:
            self._leave_out(f"more than {MAX_NODES:,} nodes")
            return
        of_plan = {
            "items": plan.num_items,
            "shared_items": plan.num_shared_items,
            "kv_tokens_read": plan.kv_tokens_read(sum(seq_lens)),
        }
        line = orjson.dumps({"paths": paths, "seq_lens": seq_lens, "plan": of_plan})
        if not self._lines.put(line + b"\n"):
            self._leave_out("the disk was too slow")

    def _leave_out(self, why: str) -> None:
        if not self._left_out:
            logger.warning("sglang_pat: a batch is not in the dump: %s", why)
        self._left_out[why] += 1


def make_tap(runner: Any, config: PatConfig, target: Target) -> Tap | None:
    """The tap of a model runner whose plans are made for ``target``; None without a new file to
    write, and on all ranks but the first, which have the same batches or a copy's."""
    if not config.dump or not _is_first_rank():
        return None
    try:
        lines = LineWriter(config.dump)
    except OSError as error:
        logger.warning(
            "sglang_pat: no dump: %s; SGLANG_PAT_DUMP must name a new file in a folder that the "
            "server may write to",
            error,
        )
        return None
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    header = {KIND: VERSION, "date": now, **describe(runner, config, target)}
    lines.put(orjson.dumps(header) + b"\n")
    logger.info(
        "sglang_pat: dumps the next %d batches with a new plan to %s",
        config.dump_batches,
        config.dump,
    )
    return Tap(lines, config.dump_batches)


def describe(runner: Any, config: PatConfig, target: Target) -> dict[str, Any]:
    """The header of a dump but for its date: the machine, the versions, and what plans are made
    for."""
    device = str(runner.device)
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "versions": {name: _version(name) for name in _PACKAGES},
        "num_q_heads": target.num_q_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "draft_tokens": target.draft_tokens,
        "kv_dtype": str(runner.kv_cache_dtype).removeprefix("torch."),
        "page_size": runner.page_size,
        "policy": config.policy,
        "target": asdict(target),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def _is_first_rank() -> bool:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return not (parallel.tp_rank or parallel.pp_rank or parallel.dp_rank)
