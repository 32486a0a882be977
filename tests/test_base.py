# SPDX-License-Identifier: Apache-2.0
"""Which backend of SGLang is the base, by GPU and server options, and which cannot be. No server,
no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import HOPPER, OLDER, make_runner, warnings_of
from kit.semantics import HOME, definitions
from sglang.srt.layers.attention import attention_registry
from sglang.srt.runtime_context import override_platform

from sglang_pat.srt import stock as base

GPU = {"device": "cuda"}
B200 = {"is_hopper_with_cuda_12_3": False, "is_sm90": False, "is_sm100": True}


@pytest.fixture
def gpu_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty classes under the names of SGLang's: importing its modules would load kernels."""

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
def test_gpu_and_options_decide_the_base(
    facts: dict[str, bool],
    args: dict[str, Any],
    name: str,
    cls: str,
    arguments: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with override_platform(**facts):
        found = base.base_of(make_runner([], args=GPU | args))
    assert (found.name, found.cls.__name__, found.arguments) == (name, cls, arguments)
    assert not warnings_of(caplog)


@pytest.mark.usefixtures("gpu_modules")
@pytest.mark.parametrize("named", ["torch_native", "flex_attention"])
def test_a_named_backend_that_cannot_be_extended_gives_way_to_the_default(
    named: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = GPU | {"attention_backend": named, "decode_attention_backend": "pat"}
    with override_platform(**HOPPER):
        assert base.base_of(make_runner([], args=args)).name == "fa3"
    (warning,) = warnings_of(caplog)
    assert f"cannot extend '{named}'" in warning and warning.endswith("run on fa3")


def test_a_default_that_cannot_be_extended_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(base._CUDA, "fa3")
    with override_platform(**HOPPER), pytest.raises(RuntimeError) as refused:
        base.base_of(make_runner([], args=GPU))
    assert "cannot extend 'fa3'" in str(refused.value)
    assert "--decode-attention-backend pat" in str(refused.value)


@pytest.mark.usefixtures("gpu_modules")
@pytest.mark.parametrize("pages", [16, 32, 64, 128])
def test_the_base_on_a_b200_is_trtllm_mha_with_its_page_sizes(
    pages: int, caplog: pytest.LogCaptureFixture
) -> None:
    with override_platform(**B200):
        found = base.base_of(make_runner([], args=GPU | {"page_size": pages}))
    assert (found.name, found.cls.__name__) == ("trtllm_mha", "TRTLLMHAAttnBackend")
    assert not found.arguments and not warnings_of(caplog)


@pytest.mark.usefixtures("gpu_modules")
@pytest.mark.parametrize(
    ("facts", "config", "name"),
    [
        ({"has_flashinfer": True}, {}, "flashinfer"),
        ({"has_flashinfer": False}, {}, "triton"),
        ({"has_flashinfer": True}, {"has_attention_sinks": True}, "triton"),
    ],
)
def test_the_base_on_a_b200_with_pages_of_one_token(
    facts: dict[str, bool], config: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner([], args=GPU, config=config)
    with override_platform(**B200 | facts):
        assert base.base_of(runner).name == name
        stock = {name: lambda runner: "made"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_registry, "ATTENTION_BACKENDS", stock)
            assert base.build_stock(runner) == (name, "made")
    warning, again = warnings_of(caplog)
    assert warning == again
    assert f"run on {name}" in warning and "--page-size 64 lets it run them" in warning


@pytest.mark.usefixtures("gpu_modules")
def test_a_flashinfer_older_than_sglang_asks_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner([], args=GPU | {"prefill_attention_backend": "flashinfer"})
    assert base.base_of(runner).name == "flashinfer"
    for newer in ("99.0", "99.0+cu130"):
        monkeypatch.setattr(base.metadata, "version", lambda _, found=newer: found)
        assert base.base_of(runner).name == "flashinfer"
    monkeypatch.setattr(base.metadata, "version", lambda _: "0.0.1")
    with pytest.raises(RuntimeError, match=r"flashinfer_python is 0\.0\.1, SGLang needs \d"):
        base.base_of(runner)
    monkeypatch.setenv("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    assert base.base_of(runner).name == "flashinfer"


@pytest.mark.parametrize(
    ("named", "runs"), [(None, "FlashBackend"), ("pat", "FlashBackend"), ("triton", "triton")]
)
def test_prefill_runs_on_the_base_unless_another_backend_is_named(
    named: str | None, runs: str
) -> None:
    flash = type("FlashBackend", (), {})
    runner = SimpleNamespace(prefill_attention_backend_str=named)
    assert base.prefill_attention(runner, flash) == runs
