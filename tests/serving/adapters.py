# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of random weights, in PEFT's layout, strong enough to change every answer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
# Of what an adapter adds to a matrix, in units of the matrix's own standard deviation.
STRENGTH = 0.5


def make_adapter(path: Path, model: Path, *, seed: int) -> Path:
    """Write an adapter of the attention matrices of the model in the folder ``model``."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,  # scaling alpha / r = 1
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    adapter: dict[str, torch.Tensor] = {}
    for name, matrix in sorted(load_file(model / "model.safetensors").items()):
        if not name.endswith(tuple(f"self_attn.{target}.weight" for target in TARGETS)):
            continue
        rows, columns = matrix.shape
        at = f"base_model.model.{name.removesuffix('.weight')}"
        a = torch.randn(RANK, columns, generator=generator)
        b = torch.randn(rows, RANK, generator=generator)
        # An element of b @ a is a sum of RANK products of unit variance.
        a *= STRENGTH * float(matrix.float().std()) / math.sqrt(RANK)
        adapter[f"{at}.lora_A.weight"] = a.to(matrix.dtype)
        adapter[f"{at}.lora_B.weight"] = b.to(matrix.dtype)
    save_file(adapter, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path
