# SPDX-License-Identifier: Apache-2.0
"""An SGLang plugin of the tests: Mamba 2 layers and gated delta nets on a CPU, in plain torch.

``PAT_STATES=1`` switches it on. SGLang's kernels of these layers are Triton and CUDA; those that a
model calls are replaced by name, token by token (of delta nets in pat_delta.py). All around them is
SGLang's: the hybrid backend, the pools of states, the prefix cache with its Mamba component. Only
what a prefill without the extra buffer and a decode step need is here.
"""

from __future__ import annotations

import os
from typing import Any

import pat_delta
import torch
from torch.nn import functional as F


def load() -> None:
    if os.environ.get("PAT_STATES") != "1":
        return
    from sglang.srt.layers.attention.mamba import mamba

    from sglang_pat.srt import support

    # A model names one or the other.
    mamba.causal_conv1d_fn = mamba.causal_conv1d_fn_triton = convolve_prompts
    mamba.causal_conv1d_update = mamba.causal_conv1d_update_triton = convolve_tokens
    mamba.mamba_chunk_scan_combined = scan_prompts
    mamba.selective_state_update = scan_tokens
    pat_delta.replace(convolve_prompts, convolve_tokens)
    # These layers do run here.
    support.REFUSED = tuple(row for row in support.REFUSED if "state spaces" not in row.words)


def convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """x [channels, tokens of all prompts], weight [channels, width]."""
    assert activation == "silu"
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for prompt, slot in enumerate(cache_indices.tolist()):
        tokens = slice(starts[prompt], starts[prompt + 1])
        before = conv_states[slot].to(x.dtype)
        if has_initial_state is None or not has_initial_state[prompt]:
            before = torch.zeros_like(before)
        out[:, tokens] = _convolve(x[:, tokens], before, weight, bias, conv_states[slot])
    return out


def convolve_tokens(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """x [requests, channels]: one token each."""
    assert activation == "silu"
    out = torch.empty_like(x)
    for row, slot in enumerate(conv_state_indices.tolist()):
        before = conv_state[slot].to(x.dtype)
        out[row] = _convolve(x[row, :, None], before, weight, bias, conv_state[slot])[:, 0]
    return out


def _convolve(
    x: torch.Tensor,
    before: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
) -> torch.Tensor:
    """x [channels, tokens] behind the inputs ``before`` it; ``state`` gets the last inputs."""
    inputs = torch.cat([before, x], dim=1)
    state.copy_(inputs[:, -before.shape[1] :])
    return F.silu(F.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0])


def scan_prompts(
    x: torch.Tensor,
    dt: torch.Tensor,
    rates: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    state_dtype: torch.dtype,
    **_: Any,
) -> tuple[None, torch.Tensor, None]:
    """x and out [1, tokens, heads, dim], dt [1, tokens, heads], b and c [1, tokens, groups, size];
    returns the states behind each prompt in the middle."""
    starts = cu_seqlens.tolist()
    _, _, heads, dim = x.shape
    states = torch.zeros(len(starts) - 1, heads, dim, b.shape[-1])
    if initial_states is not None:
        states.copy_(initial_states)
    step = F.softplus(dt + dt_bias)[0]
    for prompt in range(len(starts) - 1):
        for token in range(starts[prompt], starts[prompt + 1]):
            at = (x[0, token], step[token, :, None], rates[:, None, None], b[0, token], c[0, token])
            out[0, token] = _advance(states[prompt], *at) + D[:, None] * x[0, token]
    return None, states.to(state_dtype), None


def scan_tokens(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    rates: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    D: torch.Tensor,
    *,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """x, dt and out [requests, heads, dim], rates [heads, dim, size], b and c [requests, groups,
    size]: one token each."""
    step = F.softplus(dt + dt_bias)
    for row, slot in enumerate(state_batch_indices.tolist()):
        held = state[slot].float()
        out[row] = _advance(held, x[row], step[row], rates, b[row], c[row]) + D * x[row]
        state[slot] = held


def _advance(
    state: torch.Tensor,
    x: torch.Tensor,
    step: torch.Tensor,
    rates: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
) -> torch.Tensor:
    """One token: ``state`` [heads, dim, size] moves on in place; what it says, [heads, dim]."""
    each = len(x) // len(b)  # heads of a group
    b, c = (part.repeat_interleave(each, 0)[:, None] for part in (b, c))
    state *= torch.exp(step[..., None] * rates)
    state += (step * x)[..., None] * b
    return (state * c).sum(-1)
