# SPDX-License-Identifier: Apache-2.0
"""A program: plans and decodes on the CPU with the installed package and numpy alone, and compares
with attention by its definition. Prints where the package is, and the largest error."""

from __future__ import annotations

import numpy as np

import sglang_pat
from sglang_pat import _C, Node, Target, plan

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
LENS = np.array([520, 600, 40])  # of which the first two share 512 tokens


def main() -> None:
    prompt = Node(id=1, start=0, end=512)
    made = plan([[prompt], [prompt], None], LENS, Target.cpu(threads=2, max_queries=4, **HEADS))
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, 4, 64), np.float32)
    k, v = rng.standard_normal((2, 2000, 2, 64), np.float32)
    table = np.stack([rng.permutation(2000)[:640] for _ in LENS]).astype(np.int32)
    table[1, :512] = table[0, :512]
    rows, out = np.arange(3), np.empty_like(q)
    tensors = {"q": q, "k_cache": k, "v_cache": v, "out": out}
    _C.decode_cpu(
        plan=made.data_ptr,
        plan_bytes=made.nbytes,
        # Addresses and the first two strides, in elements.
        **{n: (a.ctypes.data, a.strides[0] // 4, a.strides[1] // 4) for n, a in tensors.items()},
        lse=0,
        req_to_token=(table.ctypes.data, 640, 3, 640),
        rows=rows.ctypes.data,
        seq_lens=LENS.ctypes.data,
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
    for query, length in enumerate(LENS):
        keys, values = (cache[table[query, :length]].repeat(2, axis=1) for cache in (k, v))
        weights = np.exp(np.einsum("hd,thd->ht", q[query], keys) * 0.125)
        expected = np.einsum("ht,thd->hd", weights, values) / weights.sum(1, keepdims=True)
        worst = max(worst, float(np.abs(out[query] - expected).max()))
    print(sglang_pat.__file__, worst)


if __name__ == "__main__":
    main()
