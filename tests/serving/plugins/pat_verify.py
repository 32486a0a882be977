# SPDX-License-Identifier: Apache-2.0
"""NGRAM speculation on a CPU, in plain torch, for the tests' plugin (``PAT_TEETH_CPU``).

What SGLang's NGRAM worker calls is Triton, CUDA or sgl_kernel, none of which runs here: where the
platform interface has a seam it is replaced through that, elsewhere by name.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
from torch import Tensor


def replace() -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from sglang_pat.srt.platform import PatCpuPlatform

    PatCpuPlatform.get_speculative_worker_cls = _worker_cls
    PatCpuPlatform.get_speculative_cache_locs_fn = lambda self: slots_of_drafts
    # It moves the K/V of accepted tokens in torch then.
    MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: setattr(
        pool, "use_native_move_kv_cache", True
    )


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


def links_of_masks(
    tree_mask,
    verified_seq_len,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    batch_size,
    draft_token_num,
):
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


def slots_of_drafts(*, req_pool_indices, req_to_token, start_offset, draft_token_num, **_):
    """Slots [R * T] at the T positions from ``start_offset`` on of each request's row."""
    positions = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], positions].flatten().long()


def write_slots(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size
):
    """Write new slots, one request's behind the other's, to its row's positions [start, end)."""
    counts = (end_offset - start_offset).tolist()
    bounds = zip(req_pool_indices, start_offset, end_offset, strict=True)
    for (row, start, end), slots in zip(bounds, out_cache_loc.split(counts), strict=True):
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)


def accept_greedily(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
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


def front_of_windows(num_front: Tensor, out_cache_loc: Tensor, front_out_cache_loc: Tensor) -> None:
    """Write the first ``num_front`` [R] slots of each request's window, packed; 0 behind them."""
    windows = out_cache_loc.view(len(num_front), -1)
    chosen = windows[torch.arange(windows.shape[1]) < num_front[:, None]]
    front_out_cache_loc[: len(chosen)] = chosen


def slots_of_accepted(accept_index, out_cache_loc, accept_out_cache_loc, size):
    """Write the slots of the accepted drafts, packed; 0 behind them."""
    flat = accept_index.flatten()
    chosen = out_cache_loc[flat[flat >= 0].long()]
    accept_out_cache_loc[: len(chosen)] = chosen
