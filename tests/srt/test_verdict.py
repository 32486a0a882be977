# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor --model``: verdicts on tiny models and server flags. No weights, no GPU.

What each reason says is in tests/srt/test_support.py and test_layers.py; here, that SGLang's own
resolution of flags and its reading of config.json lead to them.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from kit.hybrid_models import FAMILIES, published
from kit.models import (
    DEEPSEEK,
    EXAONE4,
    GEMMA2,
    GEMMA4,
    GPT_OSS,
    LATENTS,
    LLAMA,
    LLAMA4,
    MINICPM,
    PLAIN,
    VISION,
    of_its_own,
    write_config,
)

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

from sglang_pat import _C
from sglang_pat.srt.facts import CAPPED, CHUNKED, SLIDING
from sglang_pat.srt.facts import NO_ATTENTION as OFF
from sglang_pat.srt.verdict import QuestionError, Verdict, judge

needs_cuda = pytest.mark.skipif(not _C.CUDA_CODE, reason="built with PAT_CUDA=OFF")


@pytest.fixture(scope="module", autouse=True)
def sglang_knows_pat() -> Iterator[None]:
    """As after ``load_plugins``, without its hooks, which would stay for other tests."""
    level = logging.getLogger().level
    choices = [*ATTENTION_BACKEND_CHOICES]
    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        os.environ["SGLANG_PLATFORM"] = "pat_cpu"
        if "pat" not in choices:
            ATTENTION_BACKEND_CHOICES.append("pat")
        yield
    ATTENTION_BACKEND_CHOICES[:] = choices
    logging.getLogger().setLevel(level)  # --log-level is SGLang's, of the whole process


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    count = itertools.count()
    if _C.CUDA_CODE:  # as in a wheel
        code = ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_100")
        monkeypatch.setattr(_C, "CUDA_CODE", code)

    def verdict(config: dict[str, Any], *flags: str, gpu: str = "H100", **changes: Any) -> Verdict:
        # SGLang keeps what it has read from a folder.
        folder = write_config(tmp_path / f"model{next(count)}", config, **changes)
        return judge(["--model-path", str(folder), *flags], gpu=gpu)

    return verdict


# Configurations of models that do not attend alike in all layers.


def model(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """What is not said is the default of the published model's own configuration."""
    return PLAIN | {"architectures": [architecture], "model_type": model_type} | fields


def with_vision(name: str, family: str) -> dict[str, Any]:
    kinds = ("num_hidden_layers", "layer_types", "full_attention_interval")
    text = {key: FAMILIES[family][key] for key in kinds if key in FAMILIES[family]}
    return model(f"{name}ForConditionalGeneration", family, text_config=text)


NO_KERNEL = "not both one of (64, 128, 256), nor 576 and 512"
CONVOLUTIONS = ["conv", "conv", "full_attention", "conv"]
LFM2 = model("Lfm2ForCausalLM", "lfm2", layer_types=CONVOLUTIONS)
LAYERS = ["jet", "attn", "jet", "swa"]
JET = model("JetNemotronForCausalLM", "jet_nemotron", layer_types=LAYERS)
GEMMA3_MM = with_vision("Gemma3", "gemma3")
DEEPSEEK_V3 = LATENTS | {  # its drafts are of a layer of its own
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 64,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
}
OF_LATENTS = {name: LATENTS[name] for name in LATENTS if name.startswith(("kv_lora", "qk_"))}
LINEAR = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 64, "num_heads": 4}
LINEAR |= {"short_conv_kernel_size": 4}
KIMI = model("KimiLinearForCausalLM", "kimi_linear", linear_attn_config=LINEAR, **OF_LATENTS)
OF_64_HEADS = {"num_attention_heads": 64, "num_key_value_heads": 64}
HALVES = ["sliding_attention", "full_attention"] * 2
GRANITE_SWA = model(
    *("GraniteSWAForCausalLM", "granite_swa"),
    **{"layer_types": HALVES, "layer_rope_theta": [1e4] * 4},
)
INTERN_OSS = {
    "architectures": ["InternVLChatModel"],
    "model_type": "internvl_chat",
    "torch_dtype": "bfloat16",
    "llm_config": GPT_OSS,
    "vision_config": VISION | {"architectures": ["InternVisionModel"]},
}
GROK = of_its_own("Grok1ForCausalLM", attn_temperature_len=1024)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
CHAINS = (*NGRAM, "--speculative-ngram-max-bfs-breadth", "1")
MTP = ("--speculative-algorithm", "NEXTN")
IN_CHAINS = ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
STEPS = (*MTP, *IN_CHAINS, "--speculative-num-steps")
FP8 = ("--kv-cache-dtype", "fp8_e4m3")
ON_FA3 = ("--attention-backend", "fa3", "--decode-attention-backend", "pat")


@pytest.mark.parametrize(
    ("config", "flags", "ours", "others"),
    [
        (LLAMA, FP8, [0, 1, 2, 3], {}),
        (GEMMA2, (), [1, 3], {SLIDING: [0, 2]}),
        (LLAMA4, ON_FA3, [3], {CHUNKED: [0, 1, 2]}),
        (EXAONE4, (), [3], {SLIDING: [0, 1, 2]}),
        (GEMMA4, (), [], {f"head dims 512 and 512, {NO_KERNEL}": [1, 3],
                          SLIDING: [0, 2]}),
        (with_vision("Qwen3_5", "qwen3_5"), (), [3], {OFF: [0, 1, 2]}),
        (published("falcon_h1"), (), [0, 1, 2], {}),
        (published("nemotron_h"), (), [3, 7, 11], {OFF: [0, 1, 2, 4, 5, 6, 8, 9, 10]}),
        (LFM2, (), [2], {OFF: [0, 1, 3]}),
        (JET, (), [1], {SLIDING: [3], OFF: [0, 2]}),
        (GEMMA3_MM, (), [1, 3], {SLIDING: [0, 2]}),
        # Sinks are served.
        *((config, (), [1, 3], {SLIDING: [0, 2]}) for config in (GRANITE_SWA, INTERN_OSS)),
        # What stands in the models' code alone.
        (GROK | {"attn_temperature_len": -1}, (), [0, 1, 2, 3], {}),
        (of_its_own("LLaDA2MoeModelLM"), (), [], {"attention type encoder_only": [0, 1, 2, 3]}),
        # Weights whose kernels this machine lacks.
        (LLAMA | {"quantization_config": GPTQ}, (), [0, 1, 2, 3], {}),
        (LLAMA | {"quantization_config": {"quant_method": "mxfp4"}}, (), [0, 1, 2, 3], {}),
        (LATENTS | OF_64_HEADS, ("--tp", "2"), [0], {}),
        (DEEPSEEK, (), [], {f"head dims 80 and 64, {NO_KERNEL}": [0]}),
        (DEEPSEEK_V3, (*MTP, "--tp", "2"), [0], {}),
        (KIMI, NGRAM, [3], {OFF: [0, 1, 2]}),
        (LATENTS | OF_64_HEADS, NGRAM, [],
         {"4 draft tokens of 64 query heads on a latent, of which packing saves nothing": [0]}),
        (GEMMA2, CHAINS, [], {SLIDING: [0, 2], CAPPED: [1, 3]}),
    ],
)  # fmt: skip
def test_which_layers_are_served(
    config: dict[str, Any],
    flags: tuple[str, ...],
    ours: list[int],
    others: dict[str, list[int]],
    ask: Any,
) -> None:
    verdict = ask(config, *flags)
    assert verdict.layers == ({"": ours} if ours else {}) | others
    whole = "served" if set(others) <= {OFF} else "served in part"
    assert verdict.status == (whole if ours else "nothing to gain")
    assert verdict.reasons == [] and verdict.ok == bool(ours)
    assert (verdict.kv_dtype == "float8_e4m3fn") is (flags == FP8)


CHOOSE, GAIN = "choose another --attention-backend", "nothing to gain"
OVER_TRITON = ("--attention-backend", "triton", "--decode-attention-backend", "pat")
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
SPLIT_FLAGS = (
    *("--prefill-attention-backend", "fa3", "--attention-backend", "triton"),
    *("--decode-attention-backend", "pat"),
)


@pytest.mark.parametrize(
    ("config", "flags", "gpu", "status", "reason", "way_out"),
    [
        (LATENTS, ("--prefill-attention-backend", "flashmla"), "H100", GAIN, "decode runs on "
         "flashmla, which pat cannot extend", "where it was SGLang's choice"),
        # Transformers has the model, but no code of it that SGLang can run.
        (model("JambaForCausalLM", "jamba"), (), "H100", "refused", "has no SGlang impl", ""),
        (GRANITE_SWA, (), "", "refused", "torch_native take no attention sinks",
         "restart with " + " ".join(OVER_TRITON)),
        # In SGLang's own words, which are not cut.
        (EXAONE4, ("--attention-backend", "flashinfer", "--decode-attention-backend", "pat"),
         "H100", "refused", "['fa3', 'triton', 'trtllm_mha'] is required for Exaone4ForCausalLM, "
         "but got flashinfer", ""),
        (published("qwen3_5"), (), "", "refused", "extra_buffer requires platform", ""),
        # The flags that it then asks for would only start a server that dies.
        (published("falcon_h1"), NO_BUFFER, "", "refused", "SGLang's kernels of linear attention "
         "and state spaces need a GPU", "start the server"),
        # Served all the same, each request by itself.
        (LLAMA, ("--disable-radix-cache",), "H100", GAIN, "radix cache", "drop --disable-radix"),
    ],
)  # fmt: skip
def test_what_is_refused_or_gains_nothing_is_said_with_the_way_out(
    config: dict[str, Any],
    flags: tuple[str, ...],
    gpu: str,
    status: str,
    reason: str,
    way_out: str,
    ask: Any,
) -> None:
    verdict = ask(config, *flags, gpu=gpu)
    assert (verdict.status, verdict.ok) == (status, False)
    (found,) = verdict.reasons
    assert reason in found.words and found.way_out.startswith(way_out)
    assert bool(found.way_out) == bool(way_out) and not verdict.notes
    assert (status, found.words, found.way_out) in verdict.lines()
    assert found.serves == (verdict.layers != {})


def test_where_sglang_has_the_attention_alone_there_is_nothing_to_gain(ask: Any) -> None:
    """A server starts as it does without pat, which for this model is without a radix cache."""
    verdict = ask(MINICPM)
    assert (verdict.status, verdict.layers) == (GAIN, {})
    first, second = verdict.reasons
    assert "decode runs on minicpm_flashattn, which pat" in first.words and not first.serves
    assert "radix cache" in second.words
    # Nor where layers attend in both directions.
    hrm = ask(model("HrmTextForCausalLM", "hrm_text", prefix_lm=False))
    assert hrm.status == GAIN and not hrm.reasons
    assert list(hrm.layers) == ["attention type decoder_bidirectional"]
    # On a named backend pat runs decode, of each request by itself.
    named = ask(MINICPM, *ON_FA3)
    assert named.reasons == [second] and named.layers == {"": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (LLAMA, ("--dtype", "float32")),
        (LLAMA, ("--kv-cache-dtype", "fp8_e5m2")),
        (LLAMA, ("--enable-pdmux",)),
        (LLAMA, (*NGRAM, "--page-size", "64")),
        (LLAMA, (*NGRAM, "--speculative-num-draft-tokens", "65")),
        (LLAMA, (*CHAINS, *SPLIT_FLAGS)),
        (LATENTS, NGRAM),
        (DEEPSEEK_V3, (*STEPS, "3")),
        (EXAONE4, ("--decode-attention-backend", "fa3")),
        (LLAMA, ("--disaggregation-mode", "decode")),
        (LLAMA, ("--disable-radix-cache",)),
        (LLAMA, ("--max-running-requests", "1")),
    ],
)
def test_the_way_out_works_when_it_is_copied(
    config: dict[str, Any], flags: tuple[str, ...], ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = ask(config, *flags).reasons
    way_out = re.sub(r"^set one as (\S+)$", r"set \1 bfloat16", found.way_out)
    way_out = re.sub(r"^raise it to", f"set {flags[0]} to", way_out)
    copied = re.match(
        r"(?:set|drop) (it|--\S+?)(?: (?:to at most |to )?(\w+))?(?:;| or |$)", way_out
    )
    assert copied is not None, way_out
    flag, value = flags[0] if copied[1] == "it" else copied[1], copied[2]
    if way_out.startswith("drop"):
        left = tuple(each for each in flags if each != flag)
    else:
        left = (*flags, flag, *([value] if value else []))
    assert ask(config, *left).ok, (way_out, left)
    if flags[0] == "--max-running-requests":
        monkeypatch.setenv("SGLANG_PAT_MIN_BATCH", "1")
        assert ask(config, *flags).ok


@pytest.mark.parametrize(
    ("gpu", "changes", "served", "notes"),
    [
        ("", {}, True, []),
        ("H100", {"head_dim": 256}, True, []),
        ("A100", {"head_dim": 256}, True, ["compute capability 8.0 (sm_80) are built, but"]),
        ("L40S", {"head_dim": 256}, False, ["8.9 (sm_80)"]),  # too little shared memory
        ("B300", {}, True, ["10.3 (sm_100)"]),
        ("5090", {}, True, ["12.0 (sm_120)"]),
    ],
)
@needs_cuda
def test_machines(
    gpu: str, changes: dict[str, Any], served: bool, notes: list[str], ask: Any
) -> None:
    verdict = ask(LLAMA, gpu=gpu, **changes)
    assert verdict.ok is served
    assert verdict.device == "cpu" if not gpu else gpu in verdict.device.replace(" ", "")
    assert served or "101376" in next(iter(verdict.layers))
    for note, wanted in itertools.zip_longest(verdict.notes, notes):
        assert wanted in note
        assert ("note", note, "") in verdict.lines()


@needs_cuda
def test_notes_name_the_option_that_makes_them_go(ask: Any) -> None:
    (note,) = ask(published("falcon_h1"), gpu="H200").notes
    assert "dies at its first prompts" in note and "--disable-prefill-cuda-graph" in note
    assert not ask(published("falcon_h1"), "--disable-prefill-cuda-graph", gpu="H200").notes
    for family in ("nemotron_h", "granite_hybrid"):
        assert ask(published(family), gpu="B200").ok and not ask(published(family)).notes
    (note,) = ask(GROK).notes
    assert "attn_temperature_len" in note and note.endswith(" ".join(OVER_TRITON[:2]))
    assert not ask(GROK, *OVER_TRITON).notes
    images = "--enable-multimodal"
    (note,) = ask(GEMMA3_MM, images).notes
    assert "tokens of an image" in note and note.endswith(" ".join(OVER_TRITON))
    assert not ask(GEMMA3_MM, images, *OVER_TRITON).notes and not ask(GEMMA3_MM).notes


def test_questions_that_make_no_sense(
    ask: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The rest of them is in tests/commands/test_doctor.py."""
    for flags, said in (
        (("--device", "cpu"), "--gpu and --device"),
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag; python -m"),
        (("--tp", "two"), r"--tp-size.*invalid int value: 'two'"),
    ):
        with pytest.raises(QuestionError, match=said):
            ask(LLAMA, *flags)
    assert capsys.readouterr().err == ""
    verdict = judge(["--model-path", str(tmp_path)], gpu="H100")  # without a config.json
    assert verdict.refused and verdict.reasons[0].words.startswith("SGLang itself refuses: ")
