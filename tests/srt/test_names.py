# SPDX-License-Identifier: Apache-2.0
"""Where SGLang decides by the name of an attention backend, each rule with its place: a server with
``pat`` resolves as one without it, and the name ``pat`` would not. No server, no weights, no GPU.

A rule that is gone from SGLang fails here, too, by what the name would do.
"""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from kit.hybrid_models import published
from kit.models import (
    EXAONE4,
    EXAONE_MOE,
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
from sglang_pat.srt import interface, stock
from sglang_pat.srt.verdict import _as_if_here


class Rule(NamedTuple):
    """``place``: below ``sglang.srt``. ``base``: what SGLang chooses without ``pat``. ``named``:
    what it does with the name instead: words of its refusal, or the fields that get other values.
    ``flags``: beside those of the attention backend."""

    place: str
    config: dict[str, Any]
    gpu: str
    base: str
    named: str | set[str]
    flags: dict[str, Any] | None = None


LISTS = "arg_groups.model_hook.handle_model_specific_adjustments"
PAGES = "arg_groups.overrides._mla_backend_page_constraints"
FA4_PAGES = "arg_groups.overrides._fa4_page_constraint"
OVERRIDES = "arg_groups.model_overrides"
EAGLE = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
RULES = (
    Rule(LISTS, GPT_OSS, "H100", "fa3", "GptOssForCausalLM requires one of"),
    Rule(LISTS, GPT_OSS, "B200", "trtllm_mha", "GptOssForCausalLM requires one of"),
    Rule(LISTS, GPT_OSS, "A100", "triton", "GptOssForCausalLM requires one of"),
    Rule(LISTS, LLAMA4, "H100", "fa3", "is required for Llama4 model"),
    Rule(LISTS, GEMMA4, "H100", "triton", "Gemma4 only supports"),
    Rule(LISTS, GEMMA4, "B200", "trtllm_mha", "Gemma4 only supports"),
    Rule(LISTS, EXAONE4, "H100", "fa3", "is required for Exaone4ForCausalLM"),
    Rule(LISTS, EXAONE_MOE, "H100", "fa3", "is required for ExaoneMoEForCausalLM"),
    Rule(f"{OVERRIDES}.iquest_q1._iquest_q1_overrides", IQUEST_Q1, "H100", "fa3", "requires FA3"),
    Rule(f"{OVERRIDES}.olmo2._olmo2_overrides", OLMO3, "A100", "fa3", set()),
    Rule(f"{OVERRIDES}.minicpm._minicpm_sala_overrides", MINICPM, "H100", "minicpm_flashattn",
         set()),
    Rule(f"{OVERRIDES}.qwen3_5._qwen3_5_hybrid_overrides", published("qwen3_5"), "B200",
         "trtllm_mha", {"page_size"}),
    Rule(f"{OVERRIDES}.nemotron_h._nemotron_h_overrides", published("nemotron_h"), "B200",
         "trtllm_mha", {"page_size", "speculative_draft_attention_backend"}, EAGLE),
    Rule(f"{OVERRIDES}.minimax_m3._minimax_m3_overrides", MINIMAX_M3, "H100", "fa3",
         {"page_size"}),
    Rule(PAGES, LLAMA, "B200", "trtllm_mha", {"page_size"}),
    Rule(FA4_PAGES, STEP3P5, "B200", "fa4", {"page_size"}),
    Rule("arg_groups.model_override_base.get_default_attn_backend", LATENTS, "H100", "fa3", set()),
    Rule("arg_groups.overrides._attention_backend_fa3_fp8_fallback", LLAMA, "H100", "triton",
         set(), {"kv_cache_dtype": "fp8_e5m2"}),
)  # fmt: skip
# What is asked of the resolved names while the server runs, and so is of the base, too: whether a
# hybrid with gated delta nets runs on Blackwell, in which dtype sinks are made, whether relative
# positions can be had, what drafts run on, which access to a quantized K/V cache is checked; with
# latents, how a model prefills, in chunks behind a cached prefix too, and how it gives its queries.
ASKED_LATER = (
    "layers.attention.attention_registry.attn_backend_wrapper",
    "models.gpt_oss.GptOssAttention",
    "models.granite.build_attention_sinks",
    "models.inkling_common.attn.serving_attention_backend",
    "speculative.draft_utils.DraftBackendFactory",
    "speculative.draft_worker_common.resolve_draft_worker_attention_backend",
    "layers.attention.flashinfer_backend.FlashInferAttnBackend",
    "layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend",
    "mem_cache.kv_cache_configurator.KVCacheConfigurator",
    "model_executor.model_runner_components.misc_utils.maybe_disable_chunked_prefix_cache",
    "models.deepseek_v2.DeepseekV2AttentionMLA",
    "models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin",
)


@pytest.fixture
def resolve(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    count = itertools.count()

    def resolved(rule: Rule, backend: str | None, *, ours: bool = True) -> dict[str, Any]:
        folder = write_config(tmp_path / f"model{next(count)}", rule.config)
        named = {"attention_backend": backend, "device": "cuda", "random_seed": 0}
        args = ServerArgs(model_path=str(folder), **named, **(rule.flags or {}))
        if ours:
            stock.let_sglang_choose(args)
        with _as_if_here(machine_of(rule.gpu)):
            args.resolve_once()
        found: dict[str, Any] = args.resolved_dict()
        return {name: value for name, value in found.items() if value != str(folder)}

    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        yield resolved


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.place.rpartition(".")[2])
def test_a_server_with_pat_resolves_as_one_without_it(
    rule: Rule, resolve: Callable[..., dict[str, Any]]
) -> None:
    without = resolve(rule, None)
    assert without["attention_backend"] == rule.base
    assert resolve(rule, "pat") == without
    if isinstance(rule.named, str):
        with pytest.raises((AssertionError, ValueError), match=rule.named):
            resolve(rule, "pat", ours=False)
    else:
        found = resolve(rule, "pat", ours=False)
        changed = {name for name in found if found[name] != without[name]}
        assert changed >= rule.named | {"attention_backend"}


@pytest.mark.parametrize("place", sorted({*ASKED_LATER, *(rule.place for rule in RULES)}))
def test_the_rule_is_where_we_say(place: str) -> None:
    module, _, name = place.rpartition(".")
    definitions, _ = interface.parsed(f"sglang.srt.{module}")
    assert name in definitions, f"sglang.srt.{place} is gone: enter where the rule is now"
    assert "attention_backend" in ast.unparse(definitions[name])
