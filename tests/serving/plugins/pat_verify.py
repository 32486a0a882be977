# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin of the tests: NGRAM speculation on a CPU, in plain torch.

``PAT_VERIFY=1`` switches it on. What SGLang's NGRAM worker calls is Triton, CUDA or sgl_kernel,
none of which runs here: where the platform interface has a seam it is replaced through that,
elsewhere by name.

The content of the file that ``PAT_VERIFY_MASK`` names, read at every verify step, is a mistake to
make in its mask: ``sees_next`` shows each draft the next one too, ``misses_own`` hides each draft
from itself. Empty means none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def load() -> None:
    if os.environ.get("PAT_VERIFY") != "1":
        return
    from sglang_pat import ops
    from sglang_pat.srt.platform import PatCpuPlatform

    PatCpuPlatform.get_speculative_worker_cls = _worker_cls
    PatCpuPlatform.get_speculative_cache_locs_fn = lambda self: slots_of_drafts
    PatCpuPlatform.get_kv_pool_cls = _pool_cls
    ops.decode = mistaking(ops.decode)


def _worker_cls(_platform: object, algorithm: str) -> type | None:
    """SGLang's own NGRAM worker, once what it calls can run on a CPU."""
    if algorithm != "NGRAM":
        return None
    # Its module imports the CUDA kernel of the name below.
    tree = ModuleType("sglang.kernels.ops.speculative.reconstruct_tree")
    tree.reconstruct_indices_from_tree_mask_func = links_of_masks
    sys.modules[tree.__name__] = tree
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative import eagle_utils, spec_utils
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    allocation.assign_req_to_token_pool_func = write_slots
    eagle_utils.verify_tree_greedy_func = accept_greedily
    spec_utils.fill_front_out_cache_loc_func = front_of_windows
    spec_utils.fill_accept_out_cache_loc_func = slots_of_accepted
    return NGRAMWorker


def _pool_cls(_platform: object, *, kind: str) -> type | None:
    """SGLang's pool, which moves the K/V of accepted tokens in torch."""
    if kind != "mha":
        return None
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    class NativePool(MHATokenToKVPool):
        def _init_kv_copy_and_warmup(self) -> None:
            self.use_native_move_kv_cache = True

    return NativePool


def links_of_masks(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write positions [R * T] and links [R, T] of the draft trees whose ancestors are in
    ``tree_mask`` [R * T * T]. -1 is no link."""
    count = draft_token_num
    masks = tree_mask.view(batch_size, count, count).tril(-1)
    positions.copy_((masks.sum(-1) + verified_seq_len[:, None]).flatten())
    retrieve_index.copy_(torch.arange(batch_size * count).view(batch_size, count))
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    for request, ancestors in enumerate(masks.tolist()):
        latest: dict[int, int] = {}  # by parent: the child that came last
        for node in range(1, count):
            parent = max(other for other in range(node) if ancestors[node][other])
            if parent in latest:
                retrieve_next_sibling[request, latest[parent]] = node
            else:
                retrieve_next_token[request, parent] = node
            latest[parent] = node


def slots_of_drafts(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    draft_token_num: int,
    **_others: Any,
) -> torch.Tensor:
    """Slots [R * T] at the T positions from ``start_offset`` on of each request's row."""
    positions = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], positions].flatten().long()


def write_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write new slots, one request's behind the other's, to its row's positions [start, end)."""
    counts = (end_offset - start_offset).tolist()
    bounds = zip(req_pool_indices, start_offset, end_offset, strict=True)
    for (row, start, end), slots in zip(bounds, out_cache_loc.split(counts), strict=True):
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)


def accept_greedily(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow each request's tree [R, T] as long as a draft is the token that the model predicts
    [R, T] after its parent; the token predicted after the last accepted one comes on top."""
    for request, (drafts, predicted) in enumerate(
        zip(candidates.tolist(), target_predict.tolist(), strict=True)
    ):
        children, siblings = (
            links[request].tolist() for links in (retrieve_next_token, retrieve_next_sibling)
        )
        path, node = [0], children[0]
        while node >= 0:
            if drafts[node] == predicted[path[-1]]:
                path.append(node)
                node = children[node]
            else:
                node = siblings[node]
        indices = retrieve_index[request, path]
        accept_index[request, : len(path)] = indices.to(accept_index.dtype)
        predicts[indices] = target_predict[request, path].to(predicts.dtype)
        accept_token_num[request] = len(path) - 1
    return predicts, accept_index, accept_token_num


def front_of_windows(
    num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor
) -> None:
    """Write the first ``num_front`` [R] slots of each request's window, packed; 0 behind them."""
    windows = out_cache_loc.view(len(num_front), -1)
    chosen = windows[torch.arange(windows.shape[1]) < num_front[:, None]]
    front_out_cache_loc[: len(chosen)] = chosen


def slots_of_accepted(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size: int,
) -> None:
    """Write the slots of the accepted drafts, packed; 0 behind them."""
    flat = accept_index.flatten()
    chosen = out_cache_loc[flat[flat >= 0].long()]
    accept_out_cache_loc[: len(chosen)] = chosen


# By mistake: the rows that are wrong, and those whose tokens they see.
ROWS = {
    "sees_next": (slice(None, -1), slice(1, None)),
    "misses_own": (slice(1, None), slice(None, -1)),
}


def mistaking(decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``sglang_pat.ops.decode`` with the mistake in the mask of its draft tokens: a draft that is
    to see what another one sees is computed in the other one's place."""

    def decoded(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        plan: Any,
        *,
        out: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        batch = (k, v, table, rows, seq_lens, plan)
        out = decode(q, *batch, out=out, **kwargs)
        mistake = _mistake()
        if not mistake or plan.draft_tokens == 1:
            return out
        ours, theirs = ROWS[mistake]
        drafts = (len(rows), plan.draft_tokens)
        moved = q.unflatten(0, drafts).clone()
        moved[:, theirs] = q.unflatten(0, drafts)[:, ours]
        wrong = decode(moved.flatten(0, 1), *batch, **kwargs)
        out.unflatten(0, drafts)[:, ours] = wrong.unflatten(0, drafts)[:, theirs]
        return out

    return decoded


def _mistake() -> str:
    """The mistake to make now, or ""."""
    path = os.environ.get("PAT_VERIFY_MASK")
    return Path(path).read_text().strip() if path else ""
