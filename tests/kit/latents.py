# SPDX-License-Identifier: Apache-2.0
"""Cases of multi-head latent attention: one KV head, V a view of K, q in two parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.common.reference import attention
from kit import cases
from kit.cases import Case
from kit.pieces import Parts
from sglang_pat.target import LATENT_DIMS, Target

K_DIM, V_DIM = LATENT_DIMS
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_dim": K_DIM, "v_head_dim": V_DIM}


@dataclass(frozen=True)
class Latents(Case):
    """``q`` [rows, heads, 512], ``q_rope`` [rows, heads, 64], ``v`` the first part of ``k``."""

    q_rope: torch.Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"q_rope": self.q_rope}

    @property
    def whole_q(self) -> torch.Tensor:
        assert self.q_rope is not None
        return torch.cat([self.q, self.q_rope], dim=-1)

    def to(self, dtype: torch.dtype) -> Latents:
        assert self.q_rope is not None
        k = self.k.to(dtype)
        given = {"k": k, "v": k[..., :V_DIM], "q_rope": self.q_rope.to(dtype)}
        return replace(self, q=self.q.to(dtype), **given)

    def truth(self, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """By definition, of q as a whole."""
        options = super().options | {"draft_tokens": self.draft_tokens, "dtype": dtype}
        return attention(self.whole_q, *self.inputs[1:], **options)


def latents(parts: Parts, num_q_heads: int, *, draft_tokens: int = 1, **options: Any) -> Latents:
    """``cases.case`` with the strides of SGLang's tensors: q by head and then by row, q_rope the
    end of wider rows; and NaN around the rows of K."""
    options |= {"draft_tokens": draft_tokens}
    made = cases.case(parts, (num_q_heads, 1), *LATENT_DIMS, **options)
    num_rows = len(made.q)
    k = torch.full((len(made.k), 2, K_DIM + 8), float("nan"))[:, :1, :K_DIM]
    k.copy_(made.k)
    given = {name: getattr(made, name) for name in Case.__dataclass_fields__}
    given |= {
        "k": k,
        "v": k[..., :V_DIM],
        "q": torch.randn(num_q_heads, num_rows, V_DIM).transpose(0, 1),
    }
    q_rope = torch.randn(num_rows, num_q_heads, 192)[..., 128:]
    return Latents(**given, q_rope=q_rope)


def grown(inputs: Latents, seq_lens: list[int], seed: int = 0) -> Latents:
    """The case with longer sequences, as ``cases.grown``."""
    more: Any = cases.grown(inputs, seq_lens, seed)
    return replace(more, v=more.k[..., :V_DIM])


def target(num_q_heads: int, **overrides: Any) -> Target:
    """An H200 with room for every plan of the tests."""
    room = {"max_queries": 1024, "max_items": 1 << 18, "max_partials": 1 << 18}
    return Target.h200(num_q_heads=num_q_heads, **(HEADS | room | overrides))
