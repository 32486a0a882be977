# SPDX-License-Identifier: Apache-2.0
"""Mamba 2 layers on a CPU, in plain torch, for the tests' plugin (``PAT_TEETH_CPU``).

SGLang's kernels of these layers are Triton and CUDA; those that a model calls are replaced by name,
token by token. All around them is SGLang's: the hybrid backend, the pools of states, the prefix
cache with its Mamba component. Only what a prefill without the extra buffer and a decode step need
is here.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def replace() -> None:
    from sglang.srt.layers.attention.mamba import mamba

    from sglang_pat.srt import support

    # A model names one or the other.
    mamba.causal_conv1d_fn = mamba.causal_conv1d_fn_triton = convolve_prompts
    mamba.causal_conv1d_update = mamba.causal_conv1d_update_triton = convolve_tokens
    mamba.mamba_chunk_scan_combined = scan_prompts
    mamba.selective_state_update = scan_tokens
    # These layers do run here.
    support.REFUSED = tuple(row for row in support.REFUSED if "state spaces" not in row.words)


def convolve_prompts(
    x, weight, bias, *, conv_states, has_initial_state, cache_indices, query_start_loc, **_
):
    """x [channels, tokens of all prompts], weight [channels, width]. A prompt's state gets its last
    inputs."""
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for prompt, slot in enumerate(cache_indices.tolist()):
        tokens = slice(starts[prompt], starts[prompt + 1])
        before = conv_states[slot].to(x.dtype)
        if has_initial_state is None or not has_initial_state[prompt]:
            before = torch.zeros_like(before)
        inputs = torch.cat([before, x[:, tokens]], dim=1)
        conv_states[slot] = inputs[:, -before.shape[1] :]
        out[:, tokens] = F.silu(
            F.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0]
        )
    return out


def convolve_tokens(x, conv_state, weight, bias, activation, *, conv_state_indices):
    """x [requests, channels]: one token each."""
    return convolve_prompts(
        x.T,
        weight,
        bias,
        conv_states=conv_state,
        has_initial_state=torch.ones(len(x)),
        cache_indices=conv_state_indices,
        query_start_loc=torch.arange(len(x) + 1),
    ).T.contiguous()


def scan_prompts(
    x, dt, rates, b, c, *, D, dt_bias, cu_seqlens, initial_states, out, state_dtype, **_
):
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


def scan_tokens(state, x, dt, rates, b, c, D, *, dt_bias, state_batch_indices, out, **_):
    """x, dt and out [requests, heads, dim], rates [heads, dim, size], b and c [requests, groups,
    size]: one token each."""
    step = F.softplus(dt + dt_bias)
    rates = rates[:, :1, :1]  # all of a head are the same
    for row, slot in enumerate(state_batch_indices.tolist()):
        held = state[slot].float()
        out[row] = _advance(held, x[row], step[row], rates, b[row], c[row]) + D * x[row]
        state[slot] = held


def _advance(state, x, step, rates, b, c):
    """One token: ``state`` [heads, dim, size] moves on in place; what it says, [heads, dim]."""
    each = len(x) // len(b)  # heads of a group
    b, c = (part.repeat_interleave(each, 0)[:, None] for part in (b, c))
    state *= torch.exp(step[..., None] * rates)
    state += (step * x)[..., None] * b
    return (state * c).sum(-1)
