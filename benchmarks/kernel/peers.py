# SPDX-License-Identifier: Apache-2.0
"""Attention of others over the same batch: FA3 and FlashInfer, called as SGLang calls them with
page size 1, and a cascade made by hand, one FA3 call per tree level.

A batch with draft tokens is a verify step. FA3 gets it as SGLang's backend hands over chains (top k
1): the draft tokens of a query are consecutive rows of q, under a causal mask that ends at the last
one. FlashInfer gets the paged prefill wrapper that SGLang verifies with, and the same causal mask.
SGLang gives it that mask bit by bit for EAGLE and NGRAM, which reads more; for DFLASH as here.

Each maker does its host work (plans, index lists) and returns what a captured layer would run. A
missing package raises ImportError, what a peer cannot do raises its own error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.common.forests import Forest, Tree
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.kv import TreeBatch, quantised
from benchmarks.kernel.layer import device_batch

Run = Callable[[], torch.Tensor]  # returns [B * T, Hq, D]
# Takes a batch, its Tree (a Forest will do for all but `levels`) and the scale of the logits.
Maker = Callable[[TreeBatch, Any, float], Run]

FLASHINFER_WORKSPACE_BYTES = 512 << 20
NO_KERNEL = "sgl-kernel was built without FA3's kernels for this head dim and dtype"
E4M3 = torch.float8_e4m3fn


def _descales(batch: TreeBatch, queries: int) -> dict[str, torch.Tensor]:
    """What FA3 is given beside K and V in fp8, as SGLang gives it: a scale for each of ``queries``
    sequences and KV head, of one number in memory."""
    if batch.k_cache.dtype != E4M3:
        return {}
    shape = (queries, batch.k_cache.shape[1])
    scales = {"k_descale": batch.k_scale, "v_descale": batch.v_scale}
    return {
        name: torch.tensor(scale, device=batch.q.device).expand(shape)
        for name, scale in scales.items()
    }


def _cast(q: torch.Tensor, batch: TreeBatch) -> torch.Tensor:
    """The queries as FA3 takes them, which has K, V and q of one dtype: in every layer, as SGLang
    does it."""
    return q.to(E4M3) if batch.k_cache.dtype == E4M3 else q


def _scheduler_metadata(
    batch: TreeBatch, lens: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """What SGLang has FA3 work out once a decode step for all layers: how it splits the batch.
    Without it FA3 does so in each call, by a kernel of its own. SGLang gives none in verify steps,
    nor with data parallel attention; ``levels`` has none either."""
    found: torch.Tensor = import_module("sgl_kernel.flash_attn").get_scheduler_metadata(
        batch_size=len(lens),
        max_seqlen_q=1,
        max_seqlen_k=int(lens.max()),
        num_heads=batch.q.shape[1],
        num_heads_k=batch.k_cache.shape[1],
        headdim=batch.q.shape[2],
        cache_seqlens=lens,
        qkv_dtype=batch.k_cache.dtype,
        cu_seqlens_q=offsets,
        page_size=1,
        causal=True,
    )
    return found


def fa3(batch: TreeBatch, tree: Forest, scale: float) -> Run:
    """``flash_attn_with_kvcache`` of sgl-kernel, every query over its whole sequence."""
    attend = import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    table = batch.req_to_token[batch.rows].contiguous()
    lens = batch.seq_lens.int()
    k_pages, v_pages = batch.k_cache.unsqueeze(1), batch.v_cache.unsqueeze(1)
    options: dict[str, Any] = _descales(batch, tree.num_queries)
    offsets = query_offsets(batch)
    if batch.draft_tokens > 1:  # SGLang gives it in verify steps only
        options["cu_seqlens_k_new"] = _offsets(lens)
    else:
        options["scheduler_metadata"] = _scheduler_metadata(batch, lens, offsets)

    def run() -> torch.Tensor:
        out: torch.Tensor = attend(
            _cast(batch.q, batch),
            k_pages,
            v_pages,
            page_table=table,
            cache_seqlens=lens,
            cu_seqlens_q=offsets,
            max_seqlen_q=batch.draft_tokens,
            softmax_scale=scale,
            causal=True,
            sinks=batch.sinks,
            **options,
        )
        return out

    return run


def levels(batch: TreeBatch, tree: Tree, scale: float) -> Run:
    """A cascade: FA3 over the nodes of each level, whose queries are consecutive, then
    ``merge_state_v2`` from level to level. The last level, the tails, holds the draft tokens."""
    attend = import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    merge = import_module("sgl_kernel").merge_state_v2
    k_pages, v_pages = batch.k_cache.unsqueeze(1), batch.v_cache.unsqueeze(1)
    table = batch.req_to_token[batch.rows]
    drafts = batch.draft_tokens
    calls: list[tuple[Any, ...]] = []
    start = 0
    for nodes, tokens in zip(tree.nodes, tree.tokens, strict=True):
        # Query i belongs to node i * nodes // queries (Tree.paths): node n's first is the ceiling.
        firsts = [-(-node * tree.num_queries // nodes) * drafts for node in range(nodes + 1)]
        offsets = torch.tensor(firsts, dtype=torch.int32, device=table.device)
        slots = table[offsets[:-1].long() // drafts, start : start + tokens].contiguous()
        lens = torch.full((nodes,), tokens, dtype=torch.int32, device=table.device)
        widest = max(end - first for first, end in pairwise(firsts))
        masked = drafts > 1 and len(calls) == len(tree.nodes) - 1
        calls.append((slots, lens, offsets, widest, masked, _descales(batch, nodes)))
        start += tokens

    def level(q: torch.Tensor, call: tuple[Any, ...]) -> list[torch.Tensor]:
        slots, lens, offsets, widest, masked, descales = call
        out, lse, *_ = attend(
            q,
            k_pages,
            v_pages,
            page_table=slots,
            cache_seqlens=lens,
            cu_seqlens_q=offsets,
            max_seqlen_q=widest,
            softmax_scale=scale,
            causal=masked,
            return_softmax_lse=True,
            **descales,
        )
        return [out, lse.T.contiguous()]  # [B * T, Hq, D] and [B * T, Hq]

    def run() -> torch.Tensor:
        q = _cast(batch.q, batch)
        state = level(q, calls[0])
        for call in calls[1:]:
            state = list(merge(*state, *level(q, call)))
        return state[0]

    return run


def uses_tensor_cores(heads: Heads, kv_dtype: torch.dtype) -> bool:
    """SGLang's rule for FlashInfer's decode."""
    return kv_dtype == E4M3 or heads.q // heads.kv >= 4


def _offsets(lens: torch.Tensor) -> torch.Tensor:
    """int32 [B + 1]: where each of B consecutive sequences of these lengths begins, and the end."""
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def query_offsets(batch: TreeBatch) -> torch.Tensor:
    """int32 [B + 1]: the first row of q of each query, and the end."""
    end = len(batch.rows) * batch.draft_tokens + 1
    return torch.arange(0, end, batch.draft_tokens, dtype=torch.int32, device=batch.q.device)


def flashinfer(batch: TreeBatch, tree: Forest, scale: float) -> Run:
    """``BatchDecodeWithPagedKVCacheWrapper``, or of a verify step
    ``BatchPrefillWithPagedKVCacheWrapper``, planned for this very batch."""
    heads = Heads(batch.q.shape[1], batch.k_cache.shape[1], batch.q.shape[2])
    dtype, device = batch.k_cache.dtype, batch.q.device
    space = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    offsets = _offsets(batch.seq_lens)
    positions = torch.arange(batch.req_to_token.shape[1], device=device)
    slots = batch.req_to_token[batch.rows][positions < batch.seq_lens[:, None]]
    given = (offsets, slots, torch.ones_like(offsets[1:]), heads.q, heads.kv, heads.dim, 1)
    types = {"q_data_type": batch.q.dtype, "kv_data_type": dtype, "sm_scale": scale}
    if batch.draft_tokens > 1:
        prefill = import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper
        wrapper = prefill(space, "NHD", backend="fa2")
        wrapper.plan(query_offsets(batch), *given, causal=True, **types)
    else:
        decode = import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper
        with_tensor_cores = uses_tensor_cores(heads, dtype)
        wrapper = decode(space, "NHD", backend="fa2", use_tensor_cores=with_tensor_cores)
        wrapper.plan(*given, **types)
    pages = (batch.k_cache.unsqueeze(1), batch.v_cache.unsqueeze(1))
    out = torch.empty_like(batch.q)
    scales = {"k_scale": batch.k_scale, "v_scale": batch.v_scale} if dtype == E4M3 else {}

    def run() -> torch.Tensor:
        wrapper.run(batch.q, pages, out=out, **scales)
        return out

    return run


PEERS: dict[str, Maker] = {"fa3": fa3, "flashinfer": flashinfer, "levels": levels}


@cache
def fa3_lacks(dim: int, e4m3: bool) -> bool:
    """Whether sgl-kernel was built without FA3's kernels for a head dim, ``e4m3``: with K and V in
    float8_e4m3fn. A launch of one that is missing ends the process, without a message, so it is
    tried in a new one, which takes some seconds."""
    child = get_context("spawn").Process(target=_try_fa3, args=(dim, e4m3))
    child.start()
    child.join()
    return child.exitcode != 0


def _try_fa3(dim: int, e4m3: bool) -> None:
    with suppress(Exception):  # what is raised there is raised here, too, where it is reported
        _try("fa3", Heads(8, 2, dim), e4m3, 1)


def _try(name: str, heads: Heads, e4m3: bool, draft_tokens: int) -> None:
    tree = Tree((1, 2), (64, 16 + draft_tokens))
    batch = device_batch(tree, heads, draft_tokens=draft_tokens)
    PEERS[name](quantised(batch) if e4m3 else batch, tree, 1.0)()
    torch.cuda.synchronize()


def missing(heads: Iterable[Heads], e4m3: bool, draft_tokens: int) -> dict[str, str]:
    """Tries each peer on two queries, ``e4m3``: with K and V in float8_e4m3fn; ``draft_tokens``: of
    a query. Returns the reasons of those that cannot run, by name. FlashInfer may compile its
    kernels here, those with and those without tensor cores, or those of verify steps."""
    dtype = E4M3 if e4m3 else torch.bfloat16
    kinds = {(uses_tensor_cores(each, dtype), each.dim): each for each in heads}.values()
    found = {}
    for name in PEERS:
        if name != "flashinfer" and any(fa3_lacks(each.dim, e4m3) for each in kinds):
            found[name] = NO_KERNEL
            continue
        try:
            for each in kinds:
                _try(name, each, e4m3, draft_tokens)
        except Exception as error:  # whatever it is, the caller prints it
            found[name] = f"{type(error).__name__}: {error}"
    return found
