# SPDX-License-Identifier: Apache-2.0
"""Models of latents (MLA) on a CPU, for the tests' plugin (``PAT_TEETH_CPU``).

SGLang's torch_native reads K and V of the pool in prefills, too, which for these models holds
latents, while they give K and V by head: here they give latents there, as SGLang's models do in a
prefill that finds part of a prompt in the cache. With ``PAT_TEETH_PARTS=1`` they give q and K in
two parts, as to fa3, which torch_native then joins.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def replace() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Native
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common import utils

    from sglang_pat.srt import support

    absorbed = handlers.AttnForwardMethod.MLA
    handlers.AttentionBackendRegistry.register("torch_native", lambda *_: absorbed)
    if os.environ.get("PAT_TEETH_PARTS") == "1":
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append("torch_native")
        for name in ("forward_extend", "forward_decode"):
            setattr(Native, name, _joined(getattr(Native, name)))
    # Such models do run here.
    support.REFUSED = tuple(row for row in support.REFUSED if "torch_native does" not in row.words)


def _joined(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(
        self: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: Tensor,
        k_rope: Tensor,
    ) -> Tensor:
        whole = torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1)
        return forward(self, *whole, v, layer, forward_batch, save_kv_cache)

    return run
