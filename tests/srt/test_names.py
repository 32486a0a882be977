# SPDX-License-Identifier: Apache-2.0
"""Where SGLang decides by the name of an attention backend, a server with ``pat`` resolves as one
without it. No server, no weights, no GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kit.hybrid_models import published
from kit.models import (
    EXAONE4,
    GEMMA4,
    GPT_OSS,
    IQUEST_Q1,
    LATENTS,
    LLAMA,
    LLAMA4,
    MINICPM,
    MINIMAX_M3,
    OLMO3,
    STEP3P5,
    write_config,
)

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.server_args import ServerArgs

from sglang_pat.gpus import machine_of
from sglang_pat.srt import stock
from sglang_pat.srt.verdict import _as_if_here

EAGLE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


@pytest.mark.parametrize(
    ("config", "gpu", "base", "flags"),
    [
        (GPT_OSS, "H100", "fa3", {}),
        (GPT_OSS, "B200", "trtllm_mha", {}),
        (GPT_OSS, "A100", "triton", {}),
        (LLAMA4, "H100", "fa3", {}),
        (GEMMA4, "H100", "triton", {}),
        (GEMMA4, "B200", "trtllm_mha", {}),
        (EXAONE4, "H100", "fa3", {}),
        (IQUEST_Q1, "H100", "fa3", {}),
        (OLMO3, "A100", "fa3", {}),
        (MINICPM, "H100", "minicpm_flashattn", {}),
        (published("qwen3_5"), "B200", "trtllm_mha", {}),
        (published("nemotron_h"), "B200", "trtllm_mha", EAGLE),
        (MINIMAX_M3, "H100", "fa3", {}),
        (LLAMA, "B200", "trtllm_mha", {}),
        (STEP3P5, "B200", "fa4", {}),
        (LATENTS, "H100", "fa3", {}),
        (LLAMA, "H100", "triton", {"kv_cache_dtype": "fp8_e5m2"}),
    ],
)
def test_a_server_with_pat_resolves_as_one_without_it(
    config: dict[str, Any], gpu: str, base: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    def resolve(backend: str | None) -> dict[str, Any]:
        # SGLang keeps what it has read from a folder.
        folder = write_config(tmp_path / f"{backend}", config)
        named = {"attention_backend": backend, "device": "cuda", "random_seed": 0}
        args = ServerArgs(model_path=str(folder), **named, **flags)
        stock.let_sglang_choose(args)
        with _as_if_here(machine_of(gpu)):
            args.resolve_once()
        found: dict[str, Any] = args.resolved_dict()
        return {name: value for name, value in found.items() if value != str(folder)}

    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        without = resolve(None)
        assert without["attention_backend"] == base
        assert resolve("pat") == without
