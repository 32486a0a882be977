# SPDX-License-Identifier: Apache-2.0
"""The K/V cache's dtype that a quantized checkpoint asks for, as SGLang reads it. No server, no
GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import BF16, E4M3, model_config

from sglang_pat.srt import stock as checkpoint


@pytest.mark.parametrize(
    ("quantization", "section", "expected"),
    [
        (None, {"kv_cache_quant_algo": "FP8"}, BF16),  # SGLang does not read it there
        ("modelopt_fp8", {"kv_cache_quant_algo": "FP8"}, E4M3),
        ("modelopt_fp8", {"kv_cache_scheme": {"type": "float", "num_bits": 8}}, E4M3),
        ("modelopt_fp4", {"kv_cache_scheme": "float8"}, E4M3),
        ("modelopt_fp4", {"kv_cache_scheme": {"type": "int", "num_bits": 8}}, BF16),
        ("modelopt_fp8", {}, BF16),
        ("fp8", {"kv_cache_quant_algo": "FP8"}, E4M3),
        # SGLang reads schemes of this form with ModelOpt's methods only.
        ("fp8", {"kv_cache_scheme": {"type": "float", "num_bits": 8}}, BF16),
        ("fp8", {}, BF16),
    ],
)
def test_the_dtype_that_a_checkpoint_declares_counts_unless_an_option_does(
    quantization: str | None, section: dict[str, Any], expected: torch.dtype
) -> None:
    model = model_config(quantization=quantization, hf_config={"quantization_config": section})
    assert checkpoint.kv_cache_dtype("auto", model) == expected
    assert checkpoint.kv_cache_dtype("bf16", model) == BF16


def test_what_modelopt_writes_beside_the_configuration_counts(tmp_path: Path) -> None:
    model = model_config(quantization="modelopt_fp8", model_path=str(tmp_path))
    assert checkpoint.kv_cache_dtype("auto", model) == BF16
    section = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    assert checkpoint.kv_cache_dtype("auto", model) == E4M3


def test_of_a_model_by_name_the_file_in_the_local_cache_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not fetched: a name that is not in the cache has no such file."""
    model = model_config(quantization="modelopt_fp8", model_path="some/model", revision="abc")
    cached = tmp_path / "hf_quant_config.json"
    cached.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    known = {("some/model", cached.name, "abc"): str(cached)}

    def look_up(name: str, file: str, revision: str) -> str | None:
        return known.get((name, file, revision))

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", look_up)
    assert checkpoint.kv_cache_dtype("auto", model) == E4M3
    known.clear()
    assert checkpoint.kv_cache_dtype("auto", model) == BF16
