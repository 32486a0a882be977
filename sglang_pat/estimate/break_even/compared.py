# SPDX-License-Identifier: Apache-2.0
"""Which modelled times were ever compared with measured ones (docs/estimate.md has the rows)."""

from __future__ import annotations

from dataclasses import replace

from sglang_pat.estimate.model import open_model
from sglang_pat.estimate.step import StepModel
from sglang_pat.gpus import GPUS, Machine

# GPU, model, dtype of K/V and GPUs of tensor parallelism. A test compares this with docs/results.
COMPARED = {
    ("h100", "llama3-8b", "bf16", 1),
    ("h200", "llama3-8b", "bf16", 1),
    ("h200", "llama3-8b", "bf16", 2),
    ("h200", "llama3-8b", "fp8_e4m3", 1),
    ("h200", "qwen3-8b", "bf16", 1),
}


def was_compared(machine: Machine, model: StepModel, kv_dtype: str) -> bool:
    """Whether servers with this GPU, these sizes of a model, this dtype of K/V and as many GPUs
    were measured."""
    return any(
        machine == GPUS[gpu]
        and replace(model.model, name=name) == open_model(name)
        and (kv_dtype, model.tp) == (dtype, tp)
        for gpu, name, dtype, tp in COMPARED
    )
