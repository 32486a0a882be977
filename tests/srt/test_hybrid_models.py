# SPDX-License-Identifier: Apache-2.0
"""Attention decides the tokens of the small hybrid models, in transformers' own code. No server, no
GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="comes with SGLang")

import transformers
from kit.hybrid_models import FAMILIES, make_hybrid
from serving.workloads import VOCAB, random_prompt

TOKENS = 120


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_decides_the_tokens(family: str, tmp_path: Path) -> None:
    folder = make_hybrid(tmp_path / family, family, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == VOCAB
    parsed = getattr(transformers, FAMILIES[family]["class"])(**config)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=parsed, dtype=torch.float32
    ).eval()
    prompt = torch.tensor([random_prompt(seed=3, length=TOKENS)])

    def tokens() -> torch.Tensor:
        chosen: torch.Tensor = loaded(prompt, use_cache=False).logits[0].argmax(-1)
        return chosen

    with_attention = tokens()
    assert len(set(with_attention.tolist())) > TOKENS // 3
    assert (with_attention == prompt[0]).float().mean() < 0.2  # no token follows itself
    for name, weight in loaded.named_parameters():
        if name.endswith("o_proj.weight"):
            weight.zero_()
    assert (tokens() == with_attention).float().mean() < 0.3


@torch.no_grad()
def test_sinks_decide_tokens(tmp_path: Path) -> None:
    config = json.loads(
        (make_hybrid(tmp_path, "gpt_oss", dtype="float32") / "config.json").read_text()
    )
    parsed = transformers.GptOssConfig(**config)
    loaded = transformers.GptOssForCausalLM.from_pretrained(tmp_path, config=parsed).float().eval()
    prompt = torch.tensor([random_prompt(seed=3, length=TOKENS)])
    with_sinks = loaded(prompt, use_cache=False).logits[0].argmax(-1)
    for layer in loaded.model.layers:
        layer.self_attn.sinks.fill_(-100.0)
    without = loaded(prompt, use_cache=False).logits[0].argmax(-1)
    assert (without == with_sinks).float().mean() < 0.7
