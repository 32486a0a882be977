# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets on a CPU, in plain torch, token by token: see pat_states.py, whose convolutions
serve here, too."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def replace(convolve_prompts: Any, convolve_tokens: Any) -> None:
    """Put our functions where Qwen3.5 and SGLang's backend of delta nets call theirs."""
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
    from sglang.srt.models import qwen3_5

    gdn_backend.causal_conv1d_fn = convolve_prompts
    gdn_backend.causal_conv1d_update = convolve_tokens
    gdn_backend.fused_gdn_gating = gates
    TritonGDNKernel.packed_decode = decode_tokens
    TritonGDNKernel.extend = extend_prompts
    qwen3_5.fused_qkvzba_split_reshape_cat_contiguous = split_projections
    qwen3_5.fused_sigmoid_mul = gate_attention
    layernorm_gated.RMSNorm.forward = norm_and_gate


def split_projections(
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    k_heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in one, z [tokens, heads, dim], b and a [tokens, heads]."""
    rest = v_heads * v_dim
    qkv, z = qkvz.split([2 * k_heads * k_dim + rest, rest], dim=-1)
    b, a = ba.split([v_heads, v_heads], dim=-1)
    return qkv.contiguous(), z.reshape(len(z), v_heads, v_dim), b.contiguous(), a.contiguous()


def norm_and_gate(self: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    assert self.norm_before_gate and self.group_size is None
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
    return x * scale * self.weight * F.silu(z)


def gate_attention(out: torch.Tensor, gate: torch.Tensor, **_: Any) -> torch.Tensor:
    return out * gate.reshape(out.shape).sigmoid()


def gates(
    rates_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a state keeps, as a logarithm, and how much of the new value it takes, by token."""
    keeps = -rates_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return keeps[None], b.float().sigmoid()[None]


def extend_prompts(
    _self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """q and k [1, tokens, k heads, dim], v [1, tokens, v heads, dim]. A slot of a new request is
    zeros."""
    out = torch.empty_like(v)
    starts = query_start_loc.tolist()
    for prompt, slot in enumerate(cache_indices.tolist()):
        for token in range(starts[prompt], starts[prompt + 1]):
            at = (part[0, token] for part in (q, k, v, g, beta))
            out[0, token] = _advance(ssm_states[slot], *at)
    return out, None, None


def decode_tokens(
    _self: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    num_v_heads: int,
    head_v_dim: int,
    **_: Any,
) -> torch.Tensor:
    """One token of each request; returns [1, requests, heads, dim]."""
    k_dim = ssm_states.shape[-1]
    of_v = num_v_heads * head_v_dim
    of_k = (mixed_qkv.shape[-1] - of_v) // 2
    q, k, v = mixed_qkv.split([of_k, of_k, of_v], dim=-1)
    g, beta = (part[0] for part in gates(A_log, a, b, dt_bias))
    out = mixed_qkv.new_empty(1, len(mixed_qkv), num_v_heads, head_v_dim)
    for row, slot in enumerate(cache_indices.tolist()):
        heads = q[row].view(-1, k_dim), k[row].view(-1, k_dim), v[row].view(-1, head_v_dim)
        out[0, row] = _advance(ssm_states[slot], *heads, g[row], beta[row])
    return out


def _advance(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """One token: ``state`` [v heads, v dim, k dim] moves on in place; what it says of q."""
    each = len(v) // len(k)
    q, k = (_unit(part.float()).repeat_interleave(each, 0) for part in (q, k))
    held = state.float() * g.exp()[:, None, None]
    error = (v - (held * k[:, None]).sum(-1)) * beta[:, None]
    held += error[..., None] * k[:, None]
    state.copy_(held)
    return (held * q[:, None]).sum(-1) * q.shape[-1] ** -0.5


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
