# SPDX-License-Identifier: Apache-2.0
"""The small models of the tests on hybrid models: complete, and such that attention decides the
tokens. The models run in transformers' own code. No server, no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="comes with SGLang")

import transformers
from kit.hybrid_models import FAMILIES, make_hybrid, published_shapes
from serving.workloads import VOCAB, random_prompt

TOKENS = 120


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return make_hybrid(tmp_path_factory.mktemp("model") / family, family, dtype="float32")


def test_weights_are_those_of_a_published_checkpoint(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    wanted = published_shapes(FAMILIES[model.name])
    assert {name: tuple(value.shape) for name, value in weights.items()} == wanted
    assert all(value.isfinite().all() for value in weights.values())
    config = json.loads((model / "config.json").read_text())
    assert config["vocab_size"] == VOCAB and "class" not in config
    again = load_file(make_hybrid(model.parent / "again", model.name) / "model.safetensors")
    for name, value in weights.items():
        assert torch.equal(value.bfloat16(), again[name])


@torch.no_grad()
def test_attention_decides_the_tokens(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    parsed = getattr(transformers, FAMILIES[model.name]["class"])(**config)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, config=parsed, dtype=torch.float32
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
