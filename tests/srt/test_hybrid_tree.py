# SPDX-License-Identifier: Apache-2.0
"""Plans from SGLang's unified prefix cache with its Mamba component, over real pools on the CPU:
paths of full K/V are read whatever happens to the states, which nothing computes. No server, no
GPU."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.trees import target
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import mamba_checkpoint_pool
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import (
    checkpoint_kv_cache,
    match_kv_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.rust_tree_core import adapter
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components import mamba
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from benchmarks.host.live import text
from sglang_pat import _C
from sglang_pat.planner import Plan, Planner
from sglang_pat.slots import ranges
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.radix import check_plan
from sglang_pat.srt.step import StepPlanner, known
from sglang_pat.stats import Stats

TARGET = target(num_sms=1, cuts=("branches",))
CHUNK = 16  # tokens between the states of a prefill that the tree can hold
SYSTEM = 100  # tokens that requests share; not a multiple of CHUNK
CONFIGURATION = {
    "exec": SimpleNamespace(
        mamba=SimpleNamespace(mamba_max_states_per_path=-1, enable_mamba_extra_buffer_lazy=False)
    ),
    "serving": SimpleNamespace(strip_thinking_cache=False),
    "spec": SimpleNamespace(speculative_algorithm=None),
}


class HybridCache:
    """A prefix cache of a model with state spaces, and a step planner on it.

    ``core``: the tree core. ``strategy``: SGLang's ``--mamba-radix-cache-strategy``. With
    ``no_buffer`` the tree holds the state at the end of a prefill, with ``extra_buffer`` one at a
    multiple of ``CHUNK``, and the prompt only up to there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, core: str, strategy: str) -> None:
        # In place of the configuration that a server publishes, what is read of it here.
        context = type(runtime_context._CONTEXT)
        monkeypatch.setattr(context, "config_bag", lambda _, name: CONFIGURATION[name])
        for module in (mamba, adapter):
            monkeypatch.setattr(module, "mamba_cache_chunk_size", lambda: CHUNK)
        monkeypatch.setattr(mamba, "mamba_checkpoint_grid", lambda page: CHUNK)
        pool = "maybe_init_int8_mamba_checkpoint_pool"
        monkeypatch.setattr(mamba_checkpoint_pool, pool, lambda **_: None)
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
            size=112,
            mamba_size=80,
            mamba_spec_state_size=112,
            max_context_len=1024,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]),
            mamba_layer_ids=[0, 2],
            enable_mamba_extra_buffer=self.buffered,
        )
        self.allocator = TokenToKVPoolAllocator(20_000, torch.float32, "cpu", None, False)
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
        self.steps = StepPlanner(TARGET, Stats())

    def prefill(self, tokens: list[int]) -> Any:
        """A request whose prefill has run and was not processed yet: it holds what it matched."""
        ids = array("q", tokens)
        req: Any = Req(f"request of {tokens[-1]}", "", ids, SamplingParams())
        req.full_untruncated_fill_ids = ids
        match_kv_cache(req, self.tree, max_prefix_len=len(tokens) - 1, cow_mamba=True)
        req.lock = self.tree.lock(req.last_node)
        held = req.prefix_len
        (row,) = self.table.alloc([req])
        prefix = self.tree.path_device_indices(req.last_node)[:held]
        self.table.write((row, slice(0, held)), prefix)
        slots = self.allocator.alloc(len(tokens) - held)
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

    def admit(self, tokens: list[int]) -> Any:
        """A request after its prefill: the prompt is in the tree, the lock where it ends."""
        req = self.prefill(tokens)
        checkpoint_kv_cache(req, self.tree)
        return req

    def release(self, req: Any) -> None:
        """End a request, as the scheduler does."""
        req.finished_reason = FINISH_LENGTH(length=0)
        release_kv_cache(req, self.tree, checkpoint=True)

    def path(self, req: Any) -> list[tuple[int, int, int]]:
        """A request's path as SGLang tells it: node id, start and end in tokens."""
        (path,) = self.tree.tree_core.collect_path_info([req.lock.node])
        return [(node.node_id, node.path_start, node.path_end) for node in path]

    def plan(self, reqs: list[Any]) -> Plan:
        """The plan of a decode step of requests, compared with SGLang's own paths and slots."""
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        lens = torch.tensor([len(req.full_untruncated_fill_ids) + 1 for req in reqs])
        made = self.steps.plan(LiveBatch(reqs, self.tree, rows), known(lens))
        assert made is not None and not self.steps._stats.fallbacks
        check_plan(made, reqs, self.steps.view, self.table.req_to_token, rows)
        limits = [req.kv.cache_protected_len for req in reqs]
        paths, bounds = [self.path(req) for req in reqs], np.array(limits, np.int64)
        expected = _C.Planner.plan(Planner(TARGET), paths, bounds, lens.numpy())
        for found, wanted in zip(
            *(sorted(map(str, ranges(plan))) for plan in (made, expected)), strict=True
        ):
            assert found == wanted
        return made


@pytest.fixture(
    params=[
        f"{core}-{kind}" for core in ("rust", "python") for kind in ("no_buffer", "extra_buffer")
    ]
)
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> HybridCache:
    return HybridCache(monkeypatch, *request.param.split("-"))


def test_a_prefix_is_shared_as_far_as_the_tree_holds_it(cache: HybridCache) -> None:
    """With the extra buffer up to where the request that came second left a state, rounded down to
    ``CHUNK``. A prefix of which only the states are gone is shared again."""
    rng = random.Random(0)
    system = text(rng, SYSTEM)
    reqs = [cache.admit([*system, *text(rng, 40)]) for _ in range(3)]
    for count in (3, 4):
        segments = cache.plan(reqs).segments
        shared = segments["kv_len"][segments["num_queries"] == count].sum()
        assert shared == (SYSTEM // CHUNK * CHUNK if cache.buffered else SYSTEM)
        cache.tree.evict(EvictParams(num_tokens=0, mamba_num=80))
        reqs.append(cache.admit([*system, *text(rng, 40)]))


@pytest.mark.parametrize("seed", range(2))
def test_plans_follow_splits_and_evictions(cache: HybridCache, seed: int) -> None:
    """Requests come, also for a further turn or one chunk, end and are evicted; paths are
    remembered from step to step."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[]]
    reqs: list[Any] = []
    splits = shared = turns = 0
    for step in range(14):
        before = [len(cache.path(req)) for req in reqs]
        fresh = []
        for _ in range(3):
            start = rng.choice(prompts)
            own = text(rng, rng.randrange(2, 50))
            prompts.append(
                [*start[: rng.choice([len(start), rng.randrange(len(start) + 1)])], *own]
            )
            fresh.append(cache.prefill(prompts[-1]))
            turns += fresh[-1].kv.mamba_cow_src_index is not None  # its state is the tree's
        cache.plan([*reqs, *fresh])  # as under overlap scheduling
        for req in fresh:
            checkpoint_kv_cache(req, cache.tree)
        reqs += fresh
        after = [len(cache.path(req)) for req in reqs[: len(before)]]
        splits += sum(a > b for a, b in zip(after, before, strict=True))
        cache.steps = cache.steps if step % 2 else StepPlanner(TARGET, Stats())
        shared += cache.plan(reqs).num_shared_items
        while len(reqs) > 8:
            cache.release(reqs.pop(rng.randrange(len(reqs))))
        if step % 3 == 2:
            cache.tree.evict(
                EvictParams(num_tokens=rng.randrange(300), mamba_num=rng.randrange(12))
            )
        cache.plan(reqs)
    assert splits and shared and turns
