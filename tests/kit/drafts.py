# SPDX-License-Identifier: Apache-2.0
"""Cases whose queries have several draft tokens, for both executors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kit.cases import Case, case
from kit.pieces import Piece, forest

# Tokens of tails before the draft tokens: none, and up to around the blocks of the CPU executor and
# around the tiles of the kernels.
AROUND_BLOCKS = (0, 0, 1, 7, 63, 64, 130)
AROUND_TILES = (0, 1, 7, 28, 31, 60, 62, 63, 64, 120, 130)


def drafted(
    parts: Any,
    heads: tuple[int, int],
    draft_tokens: int,
    *args: Any,
    before: tuple[int, ...] = AROUND_TILES,
    **options: Any,
) -> Case:
    """``case`` with tails that hold the draft tokens behind ``before`` others."""
    options.setdefault("tails", tuple(draft_tokens + more for more in before))
    return case(parts, heads, *args, draft_tokens=draft_tokens, **options)


def skip_unless_rows_fit(group: int, draft_tokens: int, head_dim: int) -> None:
    if group * draft_tokens > (64 if head_dim == 256 else 128):
        pytest.skip("more packed rows a query than fit")


def drafted_forest(seed: int, heads: tuple[int, int], draft_tokens: int) -> list[Piece]:
    """Random pieces of as many queries as an item by hand holds, 12 at most."""
    queries = min(12, 512 * heads[1] // (heads[0] * draft_tokens))
    return forest(np.random.default_rng(seed), queries)


def chains(num_queries: int, draft_tokens: int) -> torch.Tensor:
    """The masks of drafts that are chains, int64 [B, T]."""
    seen = torch.ones(draft_tokens, draft_tokens, dtype=torch.int64).tril()
    return (seen << torch.arange(draft_tokens)).sum(-1).repeat(num_queries, 1)


def custom_mask(masks: torch.Tensor, prefix: torch.Tensor | None = None) -> torch.Tensor:
    """Masks int64 [B, T] as SGLang has them: bool, flat, a cell for each draft token, behind one
    for each of a query's ``prefix`` tokens where these are given."""
    cells = (masks[:, :, None] >> torch.arange(masks.shape[1]) & 1).bool()  # [B, T, T]
    lens = [0] * len(masks) if prefix is None else prefix.tolist()
    ones = (torch.ones(masks.shape[1], length, dtype=torch.bool) for length in lens)
    return torch.cat([torch.cat(two, 1).flatten() for two in zip(ones, cells, strict=True)])
