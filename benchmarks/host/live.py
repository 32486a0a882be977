# SPDX-License-Identifier: Apache-2.0
"""Decode batches out of SGLang's own prefix caches and requests, without a server."""

from __future__ import annotations

import random
from array import array
from typing import Any

import torch

from sglang_pat.srt.hook import LiveBatch

# Prefix caches by name: the two tree cores of SGLang's unified cache, and the classic RadixCache.
CACHES = ("rust", "python", "classic")


class LiveCache:
    """A real prefix cache over a real row table and slot allocator (no K/V), ``slots`` tokens."""

    def __init__(self, kind: str, *, slots: int, rows: int, context: int) -> None:
        from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.table = ReqToTokenPool(rows, context, "cpu", enable_memory_saver=False)
        self.allocator = TokenToKVPoolAllocator(slots, torch.float32, "cpu", None, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=None if kind == "classic" else kind,
        )
        self.tree: Any = RadixCache(params) if kind == "classic" else UnifiedRadixCache(params)

    def admit(self, tokens: list[int], session: Any = None) -> Any:
        """A request right after its prefill: row written, prompt in the tree, one token to go.

        ``session``: SGLang's streaming session that it is a turn of; ``tokens`` are all of its.
        """
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        ids = array("q", tokens)
        rid = f"request-{len(self.table.free_slots)}"
        req = Req(rid, "", ids, SamplingParams(), session=session)
        req.full_untruncated_fill_ids = ids
        self.prefill([req])
        self.process([req])
        return req

    def end(self, req: Any, output: list[int]) -> list[int]:
        """Ends a request after ``output``: all its tokens go into the tree, and nothing of it is
        locked any more. Returns them."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        tokens = req.full_untruncated_fill_ids
        tokens.extend(output)
        slots = self.allocator.alloc(len(output))
        row = req.kv.req_pool_idx
        self.table.write((row, slice(len(tokens) - len(output), len(tokens))), slots)
        req.finished_reason = FINISH_LENGTH(length=0)
        self.tree.checkpoint(req, up_to=len(tokens))
        self.tree.unlock(req.lock)
        self.table.free(req)
        return list(tokens)

    def prefill(self, reqs: list[Any], most: int | None = None) -> None:
        """Put requests into rows as one prefill does, before its result is processed.

        ``most``: of how many tokens the tree is asked, as if the log-probabilities of those behind
        were wanted; None: of all but the last.
        """
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        held = []
        for req in reqs:
            key = RadixKey(req.full_untruncated_fill_ids[: -1 if most is None else most], None)
            match = self.tree.match_prefix(MatchPrefixParams(key=key, req=req))
            req.last_node = match.last_device_node
            req.lock = self.tree.lock(req.last_node)
            held.append(match.device_prefix_len)
        for req, row, begin in zip(reqs, self.table.alloc(reqs) or (), held, strict=True):
            end = len(req.full_untruncated_fill_ids)
            slots = self.allocator.alloc(end - begin)
            if slots is None:
                raise MemoryError(f"no {end - begin} free slots; make the cache larger")
            if req.lock is not None:  # else the row is the session's, and holds its earlier turns
                prefix = self.tree.path_device_indices(req.last_node)[:begin]
                self.table.write((row, slice(0, begin)), prefix)
                req.kv.cache_protected_len = begin
            self.table.write((row, slice(begin, end)), slots)
            req.kv.kv_allocated_len = req.kv.kv_committed_len = end
            self.tree.maybe_hand_to_session(req)

    def process(self, reqs: list[Any]) -> None:
        """Put the tokens of requests that were prefilled into the tree."""
        for req in reqs:
            self.tree.checkpoint(req, up_to=len(req.full_untruncated_fill_ids))

    def batch(self, reqs: list[Any]) -> tuple[LiveBatch, torch.Tensor]:
        """The decode step of requests: batch and sequence lengths, int64 [B]."""
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        lens = torch.tensor([len(req.full_untruncated_fill_ids) + 1 for req in reqs])
        return LiveBatch(reqs, self.tree, rows), lens


def text(rng: random.Random, tokens: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(1 << 15) for _ in range(tokens)]


def changing_batches(
    kind: str, queries: int
) -> tuple[LiveCache, list[tuple[LiveBatch, torch.Tensor]]]:
    """A cache of ``queries`` + 1 requests under a system prompt and eight tools, and the batches
    that lack one each, with their sequence lengths: as if one had left, and one come."""
    rng = random.Random(0)
    cache = LiveCache(kind, slots=2000 * queries, rows=queries + 1, context=2048)
    system, tools = text(rng, 1000), [text(rng, 300) for _ in range(8)]
    reqs = [cache.admit(system + tools[i % 8] + text(rng, 40)) for i in range(queries + 1)]
    return cache, [cache.batch(reqs[:i] + reqs[i + 1 :]) for i in range(len(reqs))]
