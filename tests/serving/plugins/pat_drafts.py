# SPDX-License-Identifier: Apache-2.0
"""Attention of the verify step in torch, and mistakes in its mask, which the tests are to notice.

The content of the file that ``PAT_VERIFY_MASK`` names, read at every verify step, is a mistake to
make in the mask, of ``torch_verify`` or of pat: ``sees_next`` shows each draft the next one too,
``misses_own`` hides each draft from itself. ``chain``, for ``torch_verify`` only, takes drafts for
a chain whatever SGLang's mask says. Empty means none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# By mistake: the rows that are wrong, and those whose tokens they see.
ROWS = {
    "sees_next": (slice(None, -1), slice(1, None)),
    "misses_own": (slice(1, None), slice(None, -1)),
}


def make_backend(runner: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class TorchVerifyBackend(TorchNativeAttnBackend):
        """``torch_native``, and attention for the verify step."""

        def forward_extend(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
        ) -> torch.Tensor:
            if not forward_batch.forward_mode.is_target_verify():
                return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            pool = self.token_to_kv_pool
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
            out = attend_drafts(
                q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
                pool.get_key_buffer(layer.layer_id),
                pool.get_value_buffer(layer.layer_id),
                self.req_to_token_pool.req_to_token,
                forward_batch,
                layer.scaling,
            )
            return out.flatten(1)

    return TorchVerifyBackend(runner)


def attend_drafts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    forward_batch: Any,
    scale: float,
) -> torch.Tensor:
    """Attention of all drafts, q [R * T, Hq, D]; k, v [slots, Hkv, D]; request by request. What a
    draft sees is in SGLang's mask: for each request [T, committed tokens + T], all in a row.
    """
    width = forward_batch.spec_info.draft_token_num
    lens = (forward_batch.seq_lens + width).tolist()
    masks = forward_batch.spec_info.custom_mask.split([width * length for length in lens])
    outs = []
    for queries, row, length, mask in zip(
        q.split(width), forward_batch.req_pool_indices, lens, masks, strict=True
    ):
        slots = table[row, :length].long()
        out = torch.nn.functional.scaled_dot_product_attention(
            queries.transpose(0, 1),
            k[slots].transpose(0, 1),
            v[slots].transpose(0, 1),
            attn_mask=_mistaken(mask.view(width, length)),
            scale=scale,
            enable_gqa=True,
        )
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


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


def _mistaken(mask: torch.Tensor) -> torch.Tensor:
    """A request's mask [T, tokens], with the mistake."""
    mistake = _mistake()
    if mistake == "chain":
        return torch.ones_like(mask).tril(mask.shape[1] - mask.shape[0])
    if mistake:
        ours, theirs = ROWS[mistake]
        mask = mask.clone()
        mask[ours] = mask[theirs].clone()
    return mask
