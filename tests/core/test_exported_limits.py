# SPDX-License-Identifier: Apache-2.0
"""What the extension says of its limits is what it does, and Python has no limits of its own."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from kit.cases import case, execute
from kit.machine_code import cuobjdump
from kit.pieces import Piece

from sglang_pat import _C
from sglang_pat.target import Target

HEADS: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "max_queries": 4}
needs_cuda = pytest.mark.skipif(not hasattr(_C, "decode_cuda"), reason="built with PAT_CUDA=OFF")


@needs_cuda
def test_head_dims_and_groups_of_the_cuda_kernels() -> None:
    served = []
    for head_dim in range(0, 2 * max(_C.CUDA_HEAD_DIMS) + 1, 4):
        with suppress(ValueError):
            # One half, two stages and one Q buffer: 4096 bytes and three tiles of 64 tokens.
            assert _C.cuda_min_shared_bytes(head_dim) == 4096 + 3 * 64 * 2 * head_dim
            served.append(head_dim)
    assert tuple(served) == _C.CUDA_HEAD_DIMS
    given: dict[str, Any] = {"head_dim": 64, "scale": 1.0, "logit_cap": 0.0}
    given |= {"k_stride_slot": 64, "v_stride_slot": 64, "num_kv_heads": 1}
    _C.check_decode_cuda(num_q_heads=_C.CUDA_MAX_GROUP, **given)
    with pytest.raises(ValueError, match=f"from 1 to {_C.CUDA_MAX_GROUP}"):
        _C.check_decode_cuda(num_q_heads=_C.CUDA_MAX_GROUP + 1, **given)


@needs_cuda
def test_the_extension_holds_the_code_that_it_names() -> None:
    """Every kernel file has all code, but for MLA's, of sm_90a alone, and head dim 256 on sm_120,
    where it is refused: its files, one for each type of K and V, lack that cubin."""
    named = Counter(
        f"{kind}_{name}"
        for flag, kind in (("-lelf", "sm"), ("-lptx", "compute"))
        for name in re.findall(r"\.sm_(\w+)\.", cuobjdump(flag))
    )
    assert tuple(sorted(named, key=list(_C.CUDA_CODE).index)) == _C.CUDA_CODE
    named["sm_90a"] -= "sm_90a" in named  # MLA's
    assert len({count for code, count in named.items() if code != "sm_120"}) == 1
    if "sm_120" in named:
        assert named["sm_120"] == named["sm_100"] - 2
    dims = {
        code: set(re.findall(r"forward_kernel\w*Li(\d+)E", cuobjdump("-res-usage", "-arch", code)))
        for code in named
        if code.startswith("sm_")
    }
    most = {"64", "128", "256"}
    assert dims == {code: most - ({"256"} if code == "sm_120" else set()) for code in dims}


def test_head_dims_of_the_cpu_executor() -> None:
    step, most = _C.CPU_HEAD_DIM_STEP, _C.CPU_MAX_HEAD_DIM
    for head_dim in (step, most):
        execute(case([Piece((0,), 0, 3)], (2, 1), head_dim))
        Target.cpu(threads=1, head_dim=head_dim, **HEADS)
        tiles = (64,) if head_dim == most else (16, 64, 128)
        assert Target.h200(head_dim=head_dim, **HEADS).row_tiles == tiles
    assert Target.h200(head_dim=256, **HEADS).row_tiles == (16, 64)
    for head_dim in (step + 1, step // 2, most + step):
        with pytest.raises(ValueError, match=f"head_dim is {head_dim}"):
            execute(case([Piece((0,), 0, 3)], (2, 1), head_dim))
        with pytest.raises(ValueError, match=f"multiples of {step} up to {most}"):
            Target.cpu(threads=1, head_dim=head_dim, **HEADS)
