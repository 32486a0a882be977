# SPDX-License-Identifier: Apache-2.0
"""What the compiler must do with the forward kernels for Hopper (docs/kernels.md): ``make canary``.

Not in the suite, because it tests nvcc: it is for a change of the kernels or of nvcc's version.
"""

from __future__ import annotations

import re

import pytest
from kit.machine_code import cuobjdump

from sglang_pat import _C

pytestmark = pytest.mark.skipif(
    "sm_90a" not in getattr(_C, "CUDA_CODE", ()), reason="built without code for Hopper"
)
FETCHED = 64 << 10  # bytes of a kernel that a launch fetches
# (2 dtypes) x (K/V of 16 bits, fp8) x (3 head dims) x (plain, transformed, chains, trees)
KERNELS = 48
DECODE = "_ZN3pat14forward_kernelI{}Lb0ELi128ELb0ELNS_6DraftsE0EEEvNS_13ForwardParamsE"


@pytest.mark.parametrize("dtype", ["13__nv_bfloat16", "6__half"])
def test_what_most_units_need_comes_first(dtype: str) -> None:
    """Of decode steps at head dim 128: producers, units of few rows, the loop of wgmma."""
    code = cuobjdump("-sass", "-arch", "sm_90a", "-fun", DECODE.format(dtype))
    places: dict[str, list[int]] = {}
    for address, opcode in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\d+ )?([A-Z]\w*)", code):
        places.setdefault(opcode, []).append(int(address, 16))
    copies, few_rows, wgmma = places["LDGSTS"], places["HMMA"], places["HGMMA"]
    assert copies[-1] < few_rows[0] <= few_rows[-1] < wgmma[0] < wgmma[-1] < FETCHED


def test_no_kernel_spills() -> None:
    """None has a stack in local memory."""
    usage = cuobjdump("-res-usage", "-arch", "sm_90a")
    stacks = re.findall(r"Function (\S*forward_kernel\S*):\s+REG:\d+ STACK:(\d+)", usage)
    assert len(stacks) == KERNELS
    assert not [name for name, size in stacks if size != "0"]
