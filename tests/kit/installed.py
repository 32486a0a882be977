# SPDX-License-Identifier: Apache-2.0
"""A program: plans and decodes on the CPU with the installed package and numpy alone, and compares
with attention by its definition. Prints where the package is, and the largest error."""

from __future__ import annotations

import numpy as np

import sglang_pat
from sglang_pat import _C, Node, Target, plan

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}


def main() -> None:
    """Decode three requests, of which two share 512 tokens."""
    target = Target.cpu(threads=2, max_queries=4, **HEADS)
    prompt = Node(id=1, start=0, end=512)
    made = plan([[prompt], [prompt], None], [520, 600, 40], target)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 4, 64), np.float32)
    k, v = rng.standard_normal((2, 2000, 2, 64), np.float32)
    table = np.stack([rng.permutation(2000)[:640] for _ in range(3)]).astype(np.int32)
    table[1, :512] = table[0, :512]
    rows, lens, out = np.arange(3), np.array([520, 600, 40]), np.empty_like(q)
    _C.decode_cpu(
        plan=made.data_ptr,
        plan_bytes=made.nbytes,
        **{
            name: _address(a)
            for name, a in {"q": q, "k_cache": k, "v_cache": v, "out": out}.items()
        },
        lse=0,
        req_to_token=(table.ctypes.data, 640, 3, 640),
        rows=rows.ctypes.data,
        seq_lens=lens.ctypes.data,
        num_slots=2000,
        num_queries=3,
        v_head_dim=64,
        dtype=_C.DTYPES["float32"],
        partial_dtype=_C.DTYPES["float32"],
        scale=0.125,
        logit_cap=0.0,
        num_threads=2,
        **HEADS,
    )
    worst = 0.0
    for query, length in enumerate(lens):
        slots = table[query, :length]
        for head in range(4):
            logits = k[slots, head // 2] @ q[query, head] * 0.125
            weights = np.exp(logits - logits.max())
            expected = weights @ v[slots, head // 2] / weights.sum()
            worst = max(worst, float(np.abs(out[query, head] - expected).max()))
    print(sglang_pat.__file__, worst)


def _address(array: np.ndarray) -> tuple[int, int, int]:
    """Address and first two strides, in elements."""
    return array.ctypes.data, array.strides[0] // 4, array.strides[1] // 4


if __name__ == "__main__":
    main()
