# SPDX-License-Identifier: Apache-2.0
"""What stays SGLang's own: what flags that name ``pat`` leave open, arguments that are resolved as
without it, the backends that are extended, and the K/V cache's dtype that a checkpoint asks for. No
server, no weights, no GPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import BF16, E4M3, make_runner, model_config
from models.configs import write_config
from sglang.srt import platforms
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.layers.attention import attention_registry as registry
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.server_args import ServerArgs

from sglang_pat.gpus import machine_of
from sglang_pat.srt import stock
from sglang_pat.srt.verdict import _as_if_here


@pytest.mark.parametrize(
    ("given", "left"),  # --attention-backend, --prefill- and --decode-attention-backend
    [
        (("pat", None, None), (None, None, None)),
        ((None, None, "pat"), (None, None, None)),
        ((None, "pat", None), (None, None, None)),
        (("fa3", None, "pat"), ("fa3", None, None)),
        (("fa3", "pat", "pat"), ("fa3", None, None)),
        (("fa3", "triton", "pat"), ("fa3", "triton", None)),
        (("pat", None, "triton"), (None, None, "triton")),
        # What is named for prefill alone is for decode, too.
        (("pat", "triton", None), ("triton", "triton", None)),
    ],
)
def test_flags_that_name_pat_are_left_open(
    given: tuple[str | None, ...], left: tuple[str | None, ...]
) -> None:
    flags = dict(zip(stock._FLAGS, given, strict=True))
    args = ServerArgs(model_path="dummy", device="cuda", **flags)
    assert stock.asks_for_pat(args)
    stock.let_sglang_choose(args)
    view = resolving_view(args)
    assert tuple(getattr(view, name) for name in flags) == left
    # What was asked for stays in the record.
    assert tuple(getattr(args, name) for name in flags) == given and stock.asks_for_pat(args)
    assert (stock.asked_for_decode(args) == "pat") is ("pat" in (given[2] or given[0] or ""))
    named = ServerArgs(model_path="dummy", attention_backend="fa3")
    assert not stock.asks_for_pat(named) and stock.asked_for_decode(named) == "fa3"


@pytest.mark.parametrize(
    ("device", "platform", "base"),
    [("cpu", SRTPlatform, "torch_native"), (None, CpuSRTPlatform, "torch_native"),
     ("cuda", CpuSRTPlatform, None)],
)  # fmt: skip
def test_on_a_cpu_the_base_is_torchs(
    device: str | None, platform: type, base: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own choice there needs kernels that its wheel lacks."""
    monkeypatch.setattr(platforms, "_current_platform", platform())
    args = ServerArgs(model_path="dummy", device=device, attention_backend="pat")
    stock.let_sglang_choose(args)
    assert resolving_view(args).attention_backend == base


@pytest.mark.parametrize("device", stock.EXTENDABLE)
def test_what_can_be_extended_is_what_sglang_makes_under_that_name(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own functions, of which each makes an instance of its class, tell class and
    arguments."""
    for name in stock.EXTENDABLE[device]:
        made = mock.MagicMock()
        module, cls, _ = stock.EXTENDABLE[device][name]
        monkeypatch.setitem(sys.modules, f"{stock._HOME}.{module}", SimpleNamespace(**{cls: made}))
        runner = make_runner([], use_mla_backend=False, args={"device": device})
        asked = {"get_device_capability": lambda: (9, 0), "get_spec": mock.MagicMock()}
        with mock.patch.multiple(registry, **asked):
            registry.ATTENTION_BACKENDS[name](runner)
        base, arguments = stock.base_of(name, runner)
        assert base is made
        made.assert_called_once_with(runner, **arguments)


EAGLE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


@pytest.mark.parametrize(
    ("architecture", "gpu", "base", "flags"),
    [
        ("GptOssForCausalLM", "H100", "fa3", {}),
        ("GptOssForCausalLM", "B200", "trtllm_mha", {}),
        ("GptOssForCausalLM", "A100", "triton", {}),
        ("Llama4ForConditionalGeneration", "H100", "fa3", {}),
        ("Gemma4ForConditionalGeneration", "H100", "triton", {}),
        ("Gemma4ForConditionalGeneration", "B200", "trtllm_mha", {}),
        ("Exaone4ForCausalLM", "H100", "fa3", {}),
        ("IQuestQ1ForCausalLM", "H100", "fa3", {}),
        ("Olmo3ForCausalLM", "A100", "fa3", {}),
        ("MiniCPMSALAForCausalLM", "H100", "minicpm_flashattn", {}),
        ("Qwen3_5ForCausalLM", "B200", "trtllm_mha", {}),
        ("NemotronHForCausalLM", "B200", "trtllm_mha", EAGLE),
        ("MiniMaxM3SparseForCausalLM", "H100", "fa3", {}),
        ("LlamaForCausalLM", "B200", "trtllm_mha", {}),
        ("Step3p5ForCausalLM", "B200", "fa4", {}),
        ("DeepseekV2ForCausalLM", "H100", "fa3", {}),
        ("LlamaForCausalLM", "H100", "triton", {"kv_cache_dtype": "fp8_e5m2"}),
    ],
)
def test_a_server_with_pat_resolves_as_one_without_it(
    architecture: str, gpu: str, base: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    def resolve(backend: str | None) -> dict[str, Any]:
        # SGLang keeps what it has read from a folder.
        folder = write_config(tmp_path / f"{backend}", architecture)
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


# The K/V cache's dtype.

FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
FP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic"}
ALGORITHM = {"kv_cache_quant_algo": "FP8"}
FLOAT_8 = {"kv_cache_scheme": {"type": "float", "num_bits": 8}}


@pytest.mark.parametrize(
    ("quantization", "section", "expected"),
    [
        (None, FP8 | ALGORITHM, BF16),  # SGLang does not read it there
        ("modelopt_fp8", FP8 | ALGORITHM, E4M3),
        ("modelopt_fp8", FP8 | FLOAT_8, E4M3),
        ("modelopt_fp8", FP8, BF16),
        ("modelopt_fp8", {}, BF16),  # SGLang itself refuses it
        ("modelopt_fp4", FP4 | {"kv_cache_scheme": "float8"}, E4M3),
        ("modelopt_fp4", FP4 | {"kv_cache_scheme": {"type": "int", "num_bits": 8}}, BF16),
        ("fp8", BLOCKS | ALGORITHM, E4M3),
        ("fp8", BLOCKS | FLOAT_8, BF16),  # such schemes are read with ModelOpt's methods only
    ],
)
def test_the_dtype_that_a_checkpoint_declares_counts_unless_an_option_does(
    quantization: str | None, section: dict[str, Any], expected: torch.dtype, tmp_path: Path
) -> None:
    """ModelOpt's may be written beside the configuration."""
    model = model_config(quantization=quantization, hf_config={"quantization_config": section})
    assert stock.kv_cache_dtype("auto", model) == expected
    assert stock.kv_cache_dtype("bf16", model) == BF16
    assert model.hf_config.quantization_config == section
    if (quantization, section) == ("modelopt_fp8", FP8 | ALGORITHM):
        beside = tmp_path / "hf_quant_config.json"
        beside.write_text(json.dumps({"quantization": section}))
        model = model_config(quantization=quantization, model_path=str(tmp_path))
        assert stock.kv_cache_dtype("auto", model) == expected
