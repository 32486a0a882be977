# SPDX-License-Identifier: Apache-2.0
"""Which backend a model runner gets: ours over the right base, or SGLang's own. No server, no GPU.

The model is a real module with SGLang's attention layers; the runner and the pools are stubs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.semantics import HOME, definitions
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs
from transformers import PretrainedConfig

from sglang_pat.srt import base, factory, survey

BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM = 8, 2, 64


def _layer(layer_id: int, **arguments: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, 1.0, KV_HEADS, layer_id=layer_id, **arguments)


def _pool(layers: int, sliding: tuple[int, ...] = ()) -> SimpleNamespace:
    """A pool of one slot a layer; ``sliding``: layers whose K/V are in its window's part."""
    cache = {layer: torch.zeros(1, KV_HEADS, DIM, dtype=BF16) for layer in range(layers)}
    pool = SimpleNamespace(
        device="cpu", get_key_buffer=cache.__getitem__, get_value_buffer=cache.__getitem__
    )
    if sliding:
        pool.layers_mapping = {layer: (layer, layer in sliding) for layer in range(layers)}
    return pool


def _runner(
    layers: list[RadixAttention],
    *,
    sliding: tuple[int, ...] = (),
    args: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **changes: Any,
) -> SimpleNamespace:
    """A runner of a model with these layers; ``args``: of the server, ``config``: the model's."""
    model = {
        "hf_config": PretrainedConfig(architectures=["LlamaForCausalLM"]),
        "attention_arch": AttentionArch.MHA,
        "is_encoder_decoder": False,
        "is_generation": True,
        "has_asymmetric_kv": False,
        "has_attention_sinks": False,
        "dtype": BF16,
        "quantization": None,
        "num_attention_heads": HEADS,
        "get_num_kv_heads": lambda ranks: KV_HEADS // ranks,
        "head_dim": DIM,
    }
    options = {"device": "cpu", "attention_backend": "pat"} | (args or {})
    values = {
        "model": torch.nn.ModuleList(layers),
        "model_config": SimpleNamespace(**(model | (config or {}))),
        "server_args": ServerArgs(model_path="dummy", **options),
        "device": options["device"],
        "dtype": BF16,
        "kv_cache_dtype": BF16,
        "token_to_kv_pool": _pool(len(layers), sliding),
        "is_draft_worker": False,
        "draft_attention_backend": None,
        "init_new_workspace": False,
    }
    return SimpleNamespace(**(values | changes))


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(attn_tp_size=1)
    )


class Ours:
    """In place of the class that ``extend`` makes: notes its arguments."""

    def __init__(self, runner: Any, config: Any, found: survey.Survey, **arguments: Any) -> None:
        self.survey, self.arguments = found, arguments


class Bed:
    """Makes backends without kernels, and notes what they and their reporters are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.extended: type | None = None
        self.reported: list[bool] = []
        monkeypatch.setattr(factory.refusals, "refuse_unsafe", lambda _: None)
        monkeypatch.setattr(factory, "extend", self._extend)
        monkeypatch.setattr(
            factory, "start_reporter", lambda _, *, serving: self.reported.append(serving)
        )
        for name in ("torch_native", "fa3", "triton"):
            monkeypatch.setitem(ATTENTION_BACKENDS, name, lambda _, name=name: f"stock {name}")

    def _extend(self, cls: type) -> Callable[..., Ours]:
        self.extended = cls
        return Ours

    def make(self, runner: Any) -> Any:
        return factory.make_pat_backend(runner)


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    return Bed(monkeypatch)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# The survey.


def test_layers_are_decided_before_the_first_forward() -> None:
    found = survey.survey_layers(_runner([_layer(0), _layer(1, sliding_window_size=128)]))
    assert found.reasons == {0: "", 1: "a sliding window"}
    assert str(found) == "1 of 2 attention layers (1 with a sliding window)"
    assert not found.serves_none


def test_llama_4_attends_in_chunks_where_it_has_rope() -> None:
    # As models/llama4.py makes them: every fourth layer without rope, and nothing else tells.
    layers = [_layer(i, use_irope=(i + 1) % 4 != 0) for i in range(8)]
    found = survey.survey_layers(_runner(layers))
    ours = [layer for layer, reason in found.reasons.items() if not reason]
    assert ours == [3, 7]
    assert found.reasons[0] == "chunked attention (use_irope)"


def test_a_layer_in_the_sliding_pool_is_the_bases() -> None:
    found = survey.survey_layers(_runner([_layer(0), _layer(1)], sliding=(0,)))
    assert found.reasons == {0: "its K/V in the sliding-window pool", 1: ""}


def test_a_layer_without_kv_in_the_pool_is_left_open(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_pat")
    runner = _runner([_layer(0), _layer(1)], token_to_kv_pool=_pool(1))
    assert survey.survey_layers(runner).reasons == {0: ""}
    assert "attention layer 1 has no K/V in the pool" in caplog.text


def test_of_two_modules_of_one_id_the_reason_counts() -> None:
    windowed = _layer(0, sliding_window_size=128)
    for layers in ([windowed, _layer(0)], [_layer(0), windowed]):
        assert survey.survey_layers(_runner(layers)).reasons == {0: "a sliding window"}


def test_the_heads_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(attn_tp_size=2)
    )
    assert survey.heads_of(_runner([])) == (HEADS // 2, KV_HEADS // 2, DIM)


# What is made.


def test_a_served_model_extends_the_base(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    made = bed.make(_runner([_layer(0), _layer(1, sliding_window_size=128)]))
    assert bed.extended is not None and bed.extended.__name__ == "TorchNativeAttnBackend"
    assert made.survey.reasons == {0: "", 1: "a sliding window"}
    assert made.arguments == {"packs": True}
    assert not _warnings(caplog) and not bed.reported


def test_a_server_that_cannot_pack_is_served_and_warned(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    made = bed.make(_runner([_layer(0)], args={"disable_radix_cache": True}))
    assert made.arguments == {"packs": False}
    (warning,) = _warnings(caplog)
    assert "packs nothing" in warning and "drop --disable-radix-cache" in warning


QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}


@pytest.mark.parametrize(
    ("layer", "changes", "warned"),
    [
        ({}, {"args": {"speculative_algorithm": "NGRAM"}}, "--speculative-algorithm NGRAM"),
        ({}, {"args": {"disaggregation_mode": "prefill"}}, "never decodes"),
        ({}, {"config": {"is_generation": False}}, "embedding or reward"),
        ({}, {"config": {"hf_config": PretrainedConfig(architectures=["X"], **QSA)}}, "(QSA)"),
        ({"use_irope": True}, {}, "none of 1 attention layers (1 with chunked attention"),
    ],
)
def test_where_nothing_is_ours_the_backend_is_sglangs(
    layer: dict[str, Any],
    changes: dict[str, Any],
    warned: str,
    bed: Bed,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert bed.make(_runner([_layer(0, **layer)], **changes)) == "stock torch_native"
    (warning,) = _warnings(caplog)
    assert warned in warning and "serves nothing" in warning
    assert bed.reported == [False] and bed.extended is None


def test_fp8_in_the_pool_counts_whatever_the_options_say(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    runner = _runner(
        [_layer(0)],
        args={"device": "cuda", "prefill_attention_backend": "triton"},
        kv_cache_dtype=torch.float8_e4m3fn,
    )
    assert bed.make(runner) == "stock triton"
    assert "fp8_e4m3, as the checkpoint asks for" in _warnings(caplog)[0]


def test_a_draft_is_sglangs_without_a_warning(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    args = {"speculative_algorithm": "NGRAM"}
    runner = _runner([_layer(0)], args=args, is_draft_worker=True)
    assert bed.make(runner) == "stock torch_native"
    assert not _warnings(caplog) and not bed.reported
    # SGLang makes the draft's further backends by this name.
    assert runner.draft_attention_backend == "torch_native"


def test_a_draft_whose_backend_was_named_keeps_the_name(bed: Bed) -> None:
    runner = _runner([_layer(0)], is_draft_worker=True, draft_attention_backend="triton")
    bed.make(runner)
    assert runner.draft_attention_backend == "triton"


def test_a_server_without_anything_for_us_is_not_surveyed(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "survey_layers", lambda _: pytest.fail("surveyed"))
    assert bed.make(_runner([_layer(0)], config={"is_generation": False})) == "stock torch_native"


# The base.

HOPPER = {"is_hopper_with_cuda_12_3": True, "is_sm90": True, "is_sm100": False}
OLDER = {"is_hopper_with_cuda_12_3": False, "is_sm90": False, "is_sm100": False}
GPU = {"device": "cuda"}


@pytest.fixture
def gpu_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of SGLang's source, where importing them would load kernels."""

    def module(name: str) -> SimpleNamespace:
        defined = definitions(name.removeprefix(f"{HOME}."))
        return SimpleNamespace(**{cls: type(cls, (), {}) for cls in defined})

    monkeypatch.setattr(base, "import_module", module)


@pytest.mark.usefixtures("gpu_modules")
@pytest.mark.parametrize(
    ("facts", "args", "name", "cls", "arguments"),
    [
        (HOPPER, {}, "fa3", "FlashAttentionBackend", {}),
        (
            OLDER | {"has_flashinfer": True},
            {},
            "flashinfer",
            "FlashInferAttnBackend",
            {"init_new_workspace": False},
        ),
        (OLDER | {"has_flashinfer": False}, {}, "triton", "TritonAttnBackend", {}),
        (
            HOPPER,
            {"attention_backend": "triton", "decode_attention_backend": "pat"},
            "triton",
            "TritonAttnBackend",
            {},
        ),
        (
            HOPPER,
            {"prefill_attention_backend": "fa4", "decode_attention_backend": "pat"},
            "fa4",
            "FlashAttentionBackend",
            {"fa_impl_ver": 4},
        ),
    ],
)
def test_the_base_by_gpu_and_options(
    facts: dict[str, bool],
    args: dict[str, Any],
    name: str,
    cls: str,
    arguments: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with override_platform(**facts):
        found = base.base_of(_runner([], args=GPU | args))
    assert (found.name, found.cls.__name__, found.arguments) == (name, cls, arguments)
    assert not _warnings(caplog)


@pytest.mark.usefixtures("gpu_modules")
@pytest.mark.parametrize("named", ["trtllm_mha", "torch_native"])
def test_what_cannot_be_extended_gives_way_to_the_default(
    named: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = GPU | {"attention_backend": named, "decode_attention_backend": "pat"}
    with override_platform(**HOPPER):
        assert base.base_of(_runner([], args=args)).name == "fa3"
    (warning,) = _warnings(caplog)
    assert f"cannot extend '{named}'" in warning and warning.endswith("run on fa3")


def test_a_default_that_cannot_be_extended_is_an_error() -> None:
    facts = {"is_hopper_with_cuda_12_3": False, "is_sm100": True}
    with override_platform(**facts), pytest.raises(RuntimeError) as refused:
        base.base_of(_runner([], args=GPU))
    assert "cannot extend 'trtllm_mha'" in str(refused.value)
    assert "--decode-attention-backend pat" in str(refused.value)


@pytest.mark.usefixtures("gpu_modules")
def test_flashinfer_is_of_the_version_that_sglang_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = _runner([], args=GPU | {"prefill_attention_backend": "flashinfer"})
    assert base.base_of(runner).name == "flashinfer"
    for newer in ("99.0", "99.0+cu130"):
        monkeypatch.setattr(base.metadata, "version", lambda _, found=newer: found)
        assert base.base_of(runner).name == "flashinfer"
    monkeypatch.setattr(base.metadata, "version", lambda _: "0.0.1")
    with pytest.raises(RuntimeError, match=r"flashinfer_python is 0\.0\.1, SGLang needs \d"):
        base.base_of(runner)
    monkeypatch.setenv("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    assert base.base_of(runner).name == "flashinfer"
