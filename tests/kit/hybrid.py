# SPDX-License-Identifier: Apache-2.0
"""SGLang's unified prefix cache with its Mamba component, over real pools on the CPU: requests are
matched, checkpointed, released and evicted by SGLang's own calls. Nothing computes their states."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pat.srt.hook import LiveBatch

CHUNK = 16  # tokens between the states of a prefill that the tree can hold
STRATEGIES = ("no_buffer", "extra_buffer")


class HybridCache:
    """A prefix cache of a model with state spaces.

    Args:
        core: the tree core, ``rust`` or ``python``.
        strategy: SGLang's ``--mamba-radix-cache-strategy``. With ``no_buffer`` the tree holds the
            state at the end of a prefill, with ``extra_buffer`` one at a multiple of ``CHUNK``, and
            the prompt only up to there.
        states: rows of the pool of states.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        core: str,
        strategy: str,
        *,
        slots: int,
        rows: int,
        context: int,
        states: int,
    ) -> None:
        from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
        from sglang.srt.mem_cache.rust_tree_core import adapter
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_cache.components import mamba
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        _publish(monkeypatch)
        for module in (mamba, adapter):
            monkeypatch.setattr(module, "mamba_cache_chunk_size", lambda: CHUNK)
        monkeypatch.setattr(mamba, "mamba_checkpoint_grid", lambda page: CHUNK)
        monkeypatch.setattr(
            "sglang.srt.mem_cache.mamba_checkpoint_pool.maybe_init_int8_mamba_checkpoint_pool",
            lambda **_: None,
        )
        self.buffered = strategy == "extra_buffer"
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=8,
            n_groups=1,
            num_heads=2,
            head_dim=4,
            state_size=4,
            conv_kernel=4,
        )
        self.table = HybridReqToTokenPool(
            size=rows,
            mamba_size=states,
            mamba_spec_state_size=rows,
            max_context_len=context,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]),
            mamba_layer_ids=[0, 2],
            enable_mamba_extra_buffer=self.buffered,
        )
        self.allocator = TokenToKVPoolAllocator(slots, torch.float32, "cpu", None, False)
        self.tree: Any = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
                tree_core_backend=core,
                enable_mamba_extra_buffer=self.buffered,
            )
        )
        self._count = 0

    def prefill(self, tokens: list[int]) -> Any:
        """A request whose prefill has run and was not processed yet: it holds what it matched."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.mem_cache.common import match_kv_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._count += 1
        ids = array("q", tokens)
        req = Req(f"request-{self._count}", "", ids, SamplingParams())
        req.full_untruncated_fill_ids = ids
        match_kv_cache(req, self.tree, max_prefix_len=len(tokens) - 1, cow_mamba=True)
        req.lock = self.tree.lock(req.last_node)
        held = req.prefix_len
        (row,) = self.table.alloc([req])
        slots = self.allocator.alloc(len(tokens) - held)
        if slots is None:
            raise MemoryError(f"no {len(tokens) - held} free slots; make the cache larger")
        prefix = self.tree.path_device_indices(req.last_node)[:held]
        self.table.write((row, slice(0, held)), prefix)
        self.table.write((row, slice(held, len(tokens))), slots)
        req.kv.cache_protected_len = held
        req.kv.kv_allocated_len = req.kv.kv_committed_len = len(tokens)
        req.extend_end = len(tokens)
        if self.buffered:
            req.kv.mamba_last_track_seqlen = self._tracked(req, len(tokens))
            req.kv.mamba_last_track_idx, req.kv.mamba_next_track_idx = 0, 1
        return req

    def _tracked(self, req: Any, length: int) -> int | None:
        """Where the state is that a prefill keeps, as ScheduleBatch decides it: where full K/V of
        the tree branch off, else behind the last whole chunk of new tokens."""
        held, branch = req.prefix_len, req.mamba_branching_seqlen
        last = held + (length - held) // CHUNK * CHUNK
        if last == held:
            return None
        return branch if branch is not None and held < branch < last else last

    def checkpoint(self, req: Any) -> None:
        """Process a prefill's result: the prompt goes into the tree, the lock to where it ends."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache

        checkpoint_kv_cache(req, self.tree)

    def admit(self, tokens: list[int]) -> Any:
        """A request after its prefill, one token to go."""
        req = self.prefill(tokens)
        self.checkpoint(req)
        return req

    def release(self, req: Any) -> None:
        """End a request, as the scheduler does."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        req.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(req, self.tree, checkpoint=True)

    def evict(self, *, tokens: int = 0, states: int = 0) -> None:
        """Evict so many tokens and states that no request holds."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=tokens, mamba_num=states))

    def path(self, req: Any) -> list[tuple[int, int, int]]:
        """A request's path as SGLang tells it: node id, start and end in tokens."""
        (path,) = self.tree.tree_core.collect_path_info([req.lock.node])
        return [(node.node_id, node.path_start, node.path_end) for node in path]

    def batch(self, reqs: list[Any]) -> tuple[LiveBatch, torch.Tensor]:
        """The decode step of requests: batch and sequence lengths, int64 [B]."""
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        lens = torch.tensor([len(req.full_untruncated_fill_ids) + 1 for req in reqs])
        return LiveBatch(reqs, self.tree, rows), lens


def _publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the configuration that a server publishes, what is read of it here."""
    from sglang.srt import runtime_context

    states = SimpleNamespace(mamba_max_states_per_path=-1, enable_mamba_extra_buffer_lazy=False)
    published = {
        "exec": SimpleNamespace(mamba=states),
        "serving": SimpleNamespace(strip_thinking_cache=False),
        "spec": SimpleNamespace(speculative_algorithm=None),
    }
    context = type(runtime_context._CONTEXT)
    monkeypatch.setattr(context, "config_bag", lambda _, name: published[name])
