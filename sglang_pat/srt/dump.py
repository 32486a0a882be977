# SPDX-License-Identifier: Apache-2.0
"""The next batches of a server in a file (``SGLANG_PAT_DUMP``): paths, lengths and their plans.
What goes wrong costs the rest of the dump, never a step."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from typing import Any, BinaryIO

import orjson
import torch

from sglang_pat.config import PatConfig
from sglang_pat.dump import KIND, VERSION
from sglang_pat.planner import Plan, Planner
from sglang_pat.target import Target

logger = logging.getLogger("sglang_pat")

BATCHES = 1000  # seconds to minutes of a busy server: beyond its first requests


class Tap:
    """Writes the next ``BATCHES`` batches for which a plan is made to a new file at ``path``, for
    its user alone, behind a line with ``header``.

    Raises OSError if there is something already or the file cannot be made.
    """

    def __init__(self, path: str, header: dict[str, Any]) -> None:
        self._path = path
        self._to_come = BATCHES
        # With O_EXCL what is there, a FIFO or a link included, is neither opened nor followed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file: BinaryIO = os.fdopen(os.open(path, flags, 0o600), "wb")
        self._write(header)

    def take(self, planner: Planner | None, seq_lens: torch.Tensor, plan: Plan) -> Tap | None:
        """Dump a step for which ``plan`` was made. ``planner``: has its paths; None if it shares
        nothing. ``seq_lens`` [B] int64, CPU: its least lengths, those of rows without a request
        included. Returns the tap of the next steps, None if no more is wanted. Raises nothing."""
        try:
            lengths: list[int] = seq_lens.tolist()
            of_plan = {
                "items": plan.num_items,
                "shared_items": plan.num_shared_items,
                "kv_tokens_read": plan.kv_tokens_read(sum(lengths)),
            }
            paths = [[] for _ in lengths] if planner is None else planner.last_paths()
            self._write({"paths": paths, "seq_lens": lengths, "plan": of_plan})
            self._to_come -= 1
            if self._to_come:
                return self
            self._file.close()
            logger.info("sglang_pat: %s is complete", self._path)
        except Exception as error:  # such as a full disk
            logger.warning("sglang_pat: %s ends early: %r", self._path, error)
        return None

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(orjson.dumps(line) + b"\n")
        self._file.flush()


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
        "target": asdict(target),
    }
    try:
        tap = Tap(config.dump, header)
    except OSError as error:
        new = "SGLANG_PAT_DUMP must name a new file in a folder that the server may write to"
        logger.warning("sglang_pat: no dump: %s; %s", error, new)
        return None
    logger.info("sglang_pat: the next %d new plans go to %s", BATCHES, config.dump)
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
