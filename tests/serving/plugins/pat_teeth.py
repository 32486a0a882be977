# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin of the tests: breaks decode attention on command, and adds a radix cache.

Found by SGLang because this folder is on the server's PYTHONPATH. The fault to commit is the
content of the file that ``PAT_TEETH_FAULT`` names, read at every call; empty means none.
``PAT_TEETH_CPU`` are the modules here, by commas, that make what SGLang has for GPUs alone run on a
CPU.
``PAT_TEETH_UNPINNED=1`` leaves host memory unpinned, and ``PAT_TEETH_SLEEP=1`` lets a server sleep:
SGLang pins some memory, and waits for torch's GPU, even on a CPU.
``PAT_TEETH_STEPS_WITHOUT_SHARING`` is how many steps pat lets go by before it says why none shares.
``PAT_TEETH_CUT`` is the only cut that the planner makes on a CPU.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def load() -> None:
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from sglang_pat import ops, stats, target

    register_radix_cache_backend("classic", lambda context: RadixCache(params=context.params))
    if os.environ.get("PAT_TEETH_SLEEP") == "1":
        from sglang.srt.managers.scheduler_components import weight_updater

        weight_updater.torch = SimpleNamespace(
            distributed=torch.distributed,
            inference_mode=torch.inference_mode,
            get_device_module=lambda: torch.cpu,
        )
    if steps := os.environ.get("PAT_TEETH_STEPS_WITHOUT_SHARING"):
        stats.STEPS_WITHOUT_SHARING = int(steps)
    if cut := os.environ.get("PAT_TEETH_CUT"):
        target.WITHOUT_BRANCHES = (cut,)
    if os.environ.get("PAT_TEETH_UNPINNED") == "1":
        _unpin()
    if modules := os.environ.get("PAT_TEETH_CPU"):
        for module in modules.split(","):
            importlib.import_module(module).replace()
    if fault_file := os.environ.get("PAT_TEETH_FAULT"):
        ops.decode = Saboteur(ops.decode, Path(fault_file))


def _unpin() -> None:
    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return make(*args, **kwargs)

        return made

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args: self


class Saboteur:
    """``sglang_pat.ops.decode`` with a fault."""

    def __init__(self, decode: Any, fault_file: Path) -> None:
        self.decode = decode
        self.names = tuple(inspect.signature(decode).parameters)
        self.fault_file = fault_file

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = SimpleNamespace(**dict(zip(self.names, args, strict=False)), **kwargs)
        fault = self.fault_file.read_text().strip()
        return getattr(self, fault or "run")(given)

    def run(self, given: SimpleNamespace) -> torch.Tensor:
        out: torch.Tensor = self.decode(**vars(given))
        return out

    def wrong_scale(self, given: SimpleNamespace) -> torch.Tensor:
        """Logits are a tenth too large."""
        return self.run(SimpleNamespace(**vars(given) | {"scale": 1.1 * given.scale}))

    def drop_pack(self, given: SimpleNamespace) -> torch.Tensor:
        """The first pack of the plan is not computed: its members go without its tokens."""
        out, plan = self.run(given), given.plan
        shared = np.flatnonzero(plan.items["num_queries"] > 1)
        if not len(shared):
            return out
        item = plan.items[shared[0]]
        segment = plan.segments[plan.item_segments["first_segment"][shared[0]]]
        begin, end = int(segment["kv_start"]), int(segment["kv_start"] + segment["kv_len"])
        first = int(item["member_offset"])
        for query in plan.members["query"][first : first + int(item["num_queries"])].tolist():
            slots = given.req_to_token[given.rows[query], : given.seq_lens[query]].long()
            slots = torch.cat([slots[:begin], slots[end:]])
            out[query] = torch.nn.functional.scaled_dot_product_attention(
                given.q[query][:, None],
                given.k_cache[slots].transpose(0, 1),
                given.v_cache[slots].transpose(0, 1),
                scale=given.scale,
                enable_gqa=True,
            )[:, 0]
        return out

    def swap_slot(self, given: SimpleNamespace) -> torch.Tensor:
        """The first query finds another request's slot where one of its own should be."""
        rows, lens = given.rows, given.seq_lens
        if len(rows) > 1:
            given.req_to_token = given.req_to_token.clone()
            given.req_to_token[rows[0], int(lens[0]) // 2] = given.req_to_token[
                rows[-1], int(lens[-1]) - 1
            ]
        return self.run(given)

    def sees_next(self, given: SimpleNamespace) -> torch.Tensor:
        """Each draft token but the last sees the next one, too."""
        return self._in_place_of(given, slice(None, -1), slice(1, None))

    def misses_own(self, given: SimpleNamespace) -> torch.Tensor:
        """Each draft token but the first is hidden from itself."""
        return self._in_place_of(given, slice(1, None), slice(None, -1))

    def _in_place_of(self, given: SimpleNamespace, ours: slice, theirs: slice) -> torch.Tensor:
        """A draft token that is to see what another one sees is computed in the other's place."""
        out, drafts = self.run(given), (len(given.rows), given.plan.draft_tokens)
        if drafts[1] > 1:
            moved = given.q.unflatten(0, drafts).clone()
            moved[:, theirs] = given.q.unflatten(0, drafts)[:, ours]
            changes = {"q": moved.flatten(0, 1), "out": None}
            wrong = self.run(SimpleNamespace(**vars(given) | changes))
            out.unflatten(0, drafts)[:, ours] = wrong.unflatten(0, drafts)[:, theirs]
        return out

    def poison(self, given: SimpleNamespace) -> torch.Tensor:
        """K and V are NaN in every slot that no request of the batch owns. No fault: no effect."""
        batch = zip(given.rows, given.seq_lens, strict=True)
        owned = torch.cat([given.req_to_token[row, :length] for row, length in batch]).long()
        for name in ("k_cache", "v_cache"):
            cache = getattr(given, name)
            poisoned = torch.full_like(cache, torch.nan)
            poisoned[owned] = cache[owned]
            setattr(given, name, poisoned)
        return self.run(given)

    def corrupt_row(self, given: SimpleNamespace) -> torch.Tensor:
        """SGLang's own table gets a wrong slot for good, at token 3 of the last query."""
        out = self.run(given)
        given.req_to_token[given.rows[-1], 3] += 1
        return out
