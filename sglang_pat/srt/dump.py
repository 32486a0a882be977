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
from typing import Any, BinaryIO

import orjson
import torch

from sglang_pat.config import PatConfig
from sglang_pat.dump import KIND, VERSION
from sglang_pat.planner import Plan, Planner
from sglang_pat.target import Target

logger = logging.getLogger("sglang_pat")

MAX_NODES = 10_000  # of a batch's paths, of all requests together: a line of some 300 KB
MAX_WAITING = 64  # lines that wait for the disk


class Tap:
    """Writes the next ``batches`` batches for which a plan is made to a new file at ``path``, for
    its user alone, behind a line with ``header``; those that are left out count, too.

    Raises OSError if there is something already or the file cannot be made.
    """

    def __init__(self, path: str, batches: int, header: dict[str, Any]) -> None:
        self._path = path
        self._to_come = batches
        self._left_out: Counter[str] = Counter()
        self._failed = False
        # With O_EXCL what is there, a FIFO or a link included, is neither opened nor followed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file: BinaryIO = os.fdopen(os.open(path, flags, 0o600), "wb")
        self._lines: SimpleQueue[bytes | None] = SimpleQueue()  # None ends the file
        self._lines.put(orjson.dumps(header) + b"\n")
        threading.Thread(target=self._write, name="sglang-pat-dump", daemon=True).start()

    def take(self, planner: Planner | None, seq_lens: torch.Tensor, plan: Plan) -> Tap | None:
        """Dump a step for which ``plan`` was made. ``planner``: has its paths; None if it shares
        nothing. ``seq_lens`` [B] int64, CPU: its least lengths, those of rows without a request
        included. Returns the tap of the next steps, None if no more is wanted. Raises nothing."""
        try:
            why = self._dump(planner, seq_lens.tolist(), plan)
        except Exception as error:  # such as a request that is no more as SGLang has them
            logger.debug("sglang_pat: a step that cannot be dumped", exc_info=True)
            why = f"not readable: {type(error).__name__}"
        if why:
            if not self._left_out:
                logger.warning("sglang_pat: a batch is not in the dump: %s", why)
            self._left_out[why] += 1
        self._to_come -= 1
        if not self._to_come:
            self._lines.put(orjson.dumps({"end": "complete", "left_out": self._left_out}) + b"\n")
            self._lines.put(None)
        return self if self._to_come and not self._failed else None

    def _dump(self, planner: Planner | None, seq_lens: list[int], plan: Plan) -> str:
        """Have a batch written. Returns why it is left out, or ""."""
        paths = [[] for _ in seq_lens] if planner is None else planner.last_paths()
        if sum(map(len, paths)) > MAX_NODES:
            return f"more than {MAX_NODES:,} nodes"
        if self._lines.qsize() >= MAX_WAITING:
            return "the disk was too slow"
        of_plan = {
            "items": plan.num_items,
            "shared_items": plan.num_shared_items,
            "kv_tokens_read": plan.kv_tokens_read(sum(seq_lens)),
        }
        line = orjson.dumps({"paths": paths, "seq_lens": seq_lens, "plan": of_plan})
        self._lines.put(line + b"\n")
        return ""

    def _write(self) -> None:
        try:
            with self._file as file:
                for line in iter(self._lines.get, None):
                    file.write(line)
                    file.flush()
        except OSError as error:
            self._failed = True
            logger.warning("sglang_pat: %s ends early: %r", self._path, error)
        else:
            logger.info("sglang_pat: %s is complete", self._path)


def make_tap(runner: Any, config: PatConfig, target: Target) -> Tap | None:
    """The tap of a model runner whose plans are made for ``target``; None without a new file to
    write, and on all ranks but the first, which have the same batches or a copy's."""
    if not config.dump or not _is_first_rank():
        return None
    device = str(runner.device)
    header = {
        KIND: VERSION,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "versions": {name: _version(name) for name in ("sglang-pat", "sglang", "torch")},
        "num_q_heads": target.num_q_heads,
        "num_kv_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "draft_tokens": target.draft_tokens,
        "kv_dtype": str(runner.kv_cache_dtype).removeprefix("torch."),
        "page_size": runner.page_size,
        "policy": config.policy,
        "target": asdict(target),
    }
    try:
        tap = Tap(config.dump, config.dump_batches, header)
    except OSError as error:
        logger.warning(
            "sglang_pat: no dump: %s; SGLANG_PAT_DUMP must name a new file in a folder that the "
            "server may write to",
            error,
        )
        return None
    logger.info("sglang_pat: the next %d new plans go to %s", config.dump_batches, config.dump)
    return tap


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed as a package"


def _is_first_rank() -> bool:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return not (parallel.tp_rank or parallel.pp_rank or parallel.dp_rank)
