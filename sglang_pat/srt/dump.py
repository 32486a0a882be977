# SPDX-License-Identifier: Apache-2.0
"""Steps of a running server for ``sglang-pat dump``: paths, lengths and what the plan was made for.

Without ``SGLANG_PAT_DUMP`` there is no tap, and a step tests one attribute. With it, but with no
dump open, it tests two. Nothing here may stop a step: what goes wrong ends the dump, and is said
once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_pat.config import PatConfig
from sglang_pat.dump.watch import Watch
from sglang_pat.target import Target

if TYPE_CHECKING:
    from sglang_pat.planner import Plan
    from sglang_pat.srt.step import MicroBatch

logger = logging.getLogger("sglang_pat")

_PACKAGES = ("sglang-pat", "sglang", "torch")


class Tap:
    """Hands the steps that a dump wants to a ``Watch``."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def step(
        self,
        state: MicroBatch,
        reqs: Sequence[Any],
        seq_lens: torch.Tensor,
        plan: Plan,
        *,
        made: bool,
    ) -> None:
        """Note a step of ``reqs`` that runs ``plan``; ``seq_lens`` [B] int64, CPU: its least
        lengths, those of rows without a request included. Raises nothing."""
        collection = self._watch.open
        if collection is None:
            return
        try:
            if collection.wants(made=made):
                lens = seq_lens.tolist()
                paths = _paths(state, reqs, len(lens))
                of_plan = {
                    "items": plan.num_items,
                    "shared_items": plan.num_shared_items,
                    "kv_tokens_read": plan.kv_tokens_read(sum(lens)),
                }
                collection.add(paths, lens, made=made, plan=of_plan)
        except Exception as error:  # such as a request that is no more as SGLang has them
            collection.left_out += 1
            self._watch.say_once(f"a batch is not in the dump: {error!r}")


def _paths(
    state: MicroBatch, reqs: Sequence[Any], num_queries: int
) -> list[list[tuple[int, int, int]]]:
    """The paths that the plan of this step was made from."""
    if not state.has_paths or state.handles is None:
        return [[] for _ in range(num_queries)]  # it shares nothing, for a reason that was counted
    return state.view.look_up(reqs, state.handles).as_tuples()


def make_tap(runner: Any, config: PatConfig, target: Target) -> Tap | None:
    """The tap of a model runner whose plans are made for ``target``; None without a folder to dump
    into, and on all ranks but the first, which have the same batches or a copy's."""
    if not config.dump or not _is_first_rank():
        return None
    folder = Path(config.dump)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written to")
    except OSError as error:
        logger.warning("sglang_pat: no dumps, as SGLANG_PAT_DUMP is of no use: %s", error)
        return None
    watch = Watch(folder, describe(runner, config, target))
    watch.start()
    logger.info("sglang_pat: waits in %s for `sglang-pat dump`", folder)
    return Tap(watch)


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
        "preset": config.preset,
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
