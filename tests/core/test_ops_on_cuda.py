# SPDX-License-Identifier: Apache-2.0
"""Arguments that decode refuses on CUDA, and what a workspace refuses; seen without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.trees import target

from sglang_pat import _C
from sglang_pat.ops import KV, KV_DTYPES, SAME_KV, check_cuda
from sglang_pat.workspace import Workspace

HEADS = (8, 2)
meta = methodcaller("to", "meta")  # the only other device that every machine has
E4M3 = torch.float8_e4m3fn


def test_no_workspace_without_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_C, "decode_cuda", raising=False)
    with pytest.raises(ValueError, match=r"built without CUDA kernels: install it with PAT_CUDA"):
        Workspace(target(), 100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu"}, "a workspace is on a CUDA device, not on cpu"),
        ({"partial_dtype": torch.half}, "partial_dtype is torch.float16, must be float32 or bf"),
        ({"launch": "fast"}, "launch is 'fast', must be one of queue, streams"),
        ({"max_context": 0}, "max_context is 0, must be 1 or more"),
        ({"max_context": -5}, "max_context is -5, must be 1 or more"),
    ],
    ids=["device", "partial_dtype", "launch", "max_context", "negative max_context"],
)
def test_workspaces_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    """Seen without a GPU: torch, asked for an empty tensor on one, gives only its device."""

    def empty(*_: int, device: str) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device(device))

    monkeypatch.setattr(_C, "decode_cuda", None, raising=False)  # so in a build without CUDA
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(ValueError, match=re.escape(message)):
        Workspace(target(), **({"max_context": 100, "device": "cuda:0"} | changes))


def workspace_of(planned: int | None = 2) -> Workspace:
    """What the checks read of a workspace, on the CPU: for 4 queries of 55 tokens, with a plan of
    ``planned`` queries or none."""
    made: Any = Workspace.__new__(Workspace)
    made.device, made.max_context = torch.device("cpu"), 55
    made.target = target(max_queries=4)
    made.plan = None if planned is None else SimpleNamespace(num_queries=planned)
    return made


def batch(num_rows: int) -> dict[str, torch.Tensor]:
    return {
        "req_to_token": torch.zeros(6, 55, dtype=torch.int32),
        "rows": torch.arange(num_rows),
        "seq_lens": torch.arange(num_rows, dtype=torch.int32),
    }


def test_a_table_s_stride_that_nothing_takes_is_free() -> None:
    """Of a dimension of one, as a table cut to one token has it."""
    table = batch(3)["req_to_token"][:, ::55]
    assert table.shape[1] == 1 and table.stride(1) == 55
    assert workspace_of().check_batch(**(batch(3) | {"req_to_token": table})) == 3


WRONG_BATCHES: list[tuple[str, Callable[[Any], Any], str]] = [
    *(
        (name, meta, f"{name} is on meta, the workspace on cpu")
        for name in ("req_to_token", "rows", "seq_lens")
    ),
    ("req_to_token", lambda t: t[0], "strides (1,), must have 2 dimensions"),
    (
        "req_to_token",
        lambda t: t[:, ::2],
        "(6, 28) and strides (55, 2), must have 2 dimensions, th",
    ),
    ("req_to_token", torch.Tensor.long, "is torch.int64, must be int32"),
    (
        "req_to_token",
        lambda t: t.repeat(1, 2),
        "has 110 tokens a row, the workspace holds 55: make",
    ),
    ("rows", lambda t: t[:, None], "rows has shape (3, 1) and strides (1, 1), must"),
    ("rows", lambda t: t.repeat(2)[::2], "rows has shape (3,) and strides (2,)"),
    ("rows", torch.Tensor.short, "rows is torch.int16, must be int32 or int64"),
    ("rows", lambda t: t[:2], "2 rows and 3 seq_lens: need one of each"),
    ("seq_lens", lambda t: t[None], "seq_lens has shape (1, 3) and strides (3, 1)"),
    ("seq_lens", torch.Tensor.float, "is torch.float32, must be int32 or int64"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG_BATCHES)
def test_wrong_batches_of_a_workspace(
    name: str, change: Callable[[Any], Any], message: str
) -> None:
    given = batch(3)
    with pytest.raises(ValueError, match=re.escape(message)):
        workspace_of().check_batch(**(given | {name: change(given[name])}))


@pytest.mark.parametrize(("planned", "num_rows"), [(2, 1), (2, 5), (None, 5)])
def test_batches_of_a_wrong_size(planned: int | None, num_rows: int) -> None:
    """Smaller than the plan or larger than the buffers; between them there are those that fit."""
    for fitting in (2, 4) if planned else (0, 4):
        assert workspace_of(planned).check_batch(**batch(fitting)) == fitting
    message = (
        f"a batch of {num_rows}: the loaded plan has {planned or 0} queries and the workspace room "
        f"for 4; plan for this batch, or make the workspace for a target of larger max_queries"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        workspace_of(planned).check_batch(**batch(num_rows))


WRONG_ON_CUDA: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({"dtype": torch.float32}, "q is float32, the CUDA kernels take bfloat16 and float16"),
    "v head dim": ({"v_dim": 128}, "v_cache has head dim 128, q 64: must be alike on CUDA"),
    "alignment": ({"shift": 1}, "rows must begin at multiples of 16 bytes; make it contiguous"),
    "alignment of 1 byte": (
        {"kv_dtype": E4M3, "shift": 8},
        "rows must begin at multiples of 16 bytes; make it contiguous",
    ),
    "k_scale": ({"kv_dtype": E4M3, "kv_scales": (float("inf"), 1.0)}, "k_scale is inf"),
    "head dim": ({"dim": 72, "v_dim": 72}, "head_dim is 72, the CUDA kernels have 64, 128 and 256"),
    "ratio": ({"heads": (34, 2)}, "34 query heads on 2 KV heads: the ratio must be a whole number"),
    "scale": ({"scale": float("inf")}, "scale is inf and logit_cap 0, both must be finite"),
    "logit_cap": ({"logit_cap": -1.0}, "logit_cap -1, both must be finite and the cap 0 (off)"),
}


@pytest.mark.skipif(not hasattr(_C, "check_decode_cuda"), reason="built with PAT_CUDA=OFF")
@pytest.mark.parametrize("what", [*WRONG_ON_CUDA, "", "e4m3"])
def test_what_cuda_kernels_do_not_have(what: str) -> None:
    """Told before anything is launched, so without a device."""

    def check(
        dtype: torch.dtype = torch.bfloat16,
        heads: tuple[int, int] = HEADS,
        dim: int = 64,
        v_dim: int = 64,
        shift: int = 0,
        scale: float = 0.125,
        logit_cap: float = 0.0,
        kv_dtype: torch.dtype | None = None,
        kv_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        kv_dtype = kv_dtype or dtype
        q = torch.zeros(3, heads[0], dim, dtype=dtype)
        k = torch.zeros(10 * heads[1] * dim + shift, dtype=kv_dtype)[shift:]
        k = k.view(10, heads[1], dim)
        v = torch.zeros(10, heads[1], v_dim, dtype=kv_dtype)
        number = KV_DTYPES.get(kv_dtype, SAME_KV)
        check_cuda(q, k, v, torch.zeros_like(q), scale, logit_cap, KV(number, *kv_scales))

    if what not in WRONG_ON_CUDA:
        check(kv_dtype=E4M3 if what else None, kv_scales=(0.5, 2.0) if what else (1.0, 1.0))
        return
    changes, message = WRONG_ON_CUDA[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        check(**changes)
