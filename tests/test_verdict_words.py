# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor --model``: what it says of speculation and dtypes, and how it shows what
SGLang itself refuses. No weights, no GPU."""

# ruff: noqa: F401, F811 (fixtures of another module)
from __future__ import annotations

from typing import Any

import pytest
from kit import models as kit_models

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from test_verdict import ask, sglang_knows_pat

from sglang_pat.srt import layers

NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
CHAINS = (*NGRAM, "--speculative-ngram-max-bfs-breadth", "1")


def test_capped_logits_are_not_verified_on_a_gpu(ask: Any) -> None:
    verdict = ask(kit_models.GEMMA2, *CHAINS)
    assert (verdict.status, verdict.workspace) == ("nothing to gain", None)
    assert verdict.layers == {layers.SLIDING: [0, 2], layers.CAPPED: [1, 3]}
    assert ask(kit_models.GEMMA2 | {"attn_logit_softcapping": None}, *CHAINS).ok


def test_what_to_change_of_speculation(ask: Any) -> None:
    other = ("--prefill-attention-backend", "fa3")
    mode = "--speculative-attention-mode"
    (advice,) = ask(kit_models.LLAMA, *CHAINS, *other).idle
    assert advice.way_out == f"set {mode} decode"
    assert ask(kit_models.LLAMA, *CHAINS, *other, mode, "decode").status == "served"


def test_words_of_sglang_are_not_cut(ask: Any) -> None:
    found = [line for line in ask(kit_models.LLAMA4).lines() if line[0] == "refused"]
    ((_, reason, way_out),) = found
    assert reason.endswith("is required for Llama4 model but got pat")
    assert way_out == "choose another --attention-backend"
    text = kit_models.LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    ((_, reason, _),) = [line for line in ask(text).lines() if line[0] == "refused"]
    assert reason.endswith("- Prefill: pat - Decode: pat")


@pytest.mark.parametrize("gpu", ["H100", ""])
def test_models_of_fp32(gpu: str, ask: Any) -> None:
    verdict = ask(kit_models.LLAMA, "--dtype", "float32", gpu=gpu)
    if not gpu:
        assert verdict.status == "served" and verdict.kv_dtype == "float32"
        return
    assert verdict.refusals == [
        "the model is torch.float32, on cuda pat takes bfloat16, float16: set one as --dtype"
    ]


@pytest.mark.parametrize(
    ("flags", "stored"),
    [((), "bfloat16"), (("--kv-cache-dtype", "fp8_e4m3"), "float8_e4m3fn")],
)
def test_the_dtype_of_k_and_v_is_said(flags: tuple[str, ...], stored: str, ask: Any) -> None:
    verdict = ask(kit_models.LLAMA, *flags)
    (server, *_) = verdict.lines()
    assert server[1].endswith(f"on H100, K/V in {stored}")
    assert verdict.as_json()["kv_dtype"] == stored
