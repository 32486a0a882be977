# SPDX-License-Identifier: Apache-2.0
"""Attention decides the tokens of the small hybrid models, in transformers' own code. No server, no
GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="comes with SGLang")

import transformers
from kit.hybrid_models import FAMILIES, make_hybrid
from serving.workloads import VOCAB, random_prompt

TOKENS = 120


def _loaded(folder: Path, family: str) -> Any:
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == VOCAB
    parsed = getattr(transformers, FAMILIES[family]["class"])(**config)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=parsed, dtype=torch.float32
    ).eval()


def _prompt() -> torch.Tensor:
    return torch.tensor([random_prompt(seed=3, length=TOKENS)])


def _chosen(model: Any) -> torch.Tensor:
    """The likeliest token behind each of the prompt's."""
    tokens: torch.Tensor = model(_prompt(), use_cache=False).logits[0].argmax(-1)
    return tokens


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_decides_the_tokens(family: str, tmp_path: Path) -> None:
    loaded = _loaded(make_hybrid(tmp_path / family, family, dtype="float32"), family)
    with_attention = _chosen(loaded)
    assert len(set(with_attention.tolist())) > TOKENS // 3
    assert (with_attention == _prompt()[0]).float().mean() < 0.2  # no token follows itself
    if family == "gpt_oss":
        for layer in loaded.model.layers:
            layer.self_attn.sinks.fill_(-100.0)
        assert (_chosen(loaded) == with_attention).float().mean() < 0.7, "sinks decide nothing"
    for name, weight in loaded.named_parameters():
        if name.endswith("o_proj.weight"):
            weight.zero_()
    assert (_chosen(loaded) == with_attention).float().mean() < 0.3
