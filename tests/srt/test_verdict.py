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
from models.configs import LAYERS, write_config

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

    def verdict(architecture: str, *flags: str, gpu: str = "H100", **changes: Any) -> Verdict:
        # SGLang keeps what it has read from a folder.
        folder = write_config(tmp_path / f"model{next(count)}", architecture, **changes)
        return judge(["--model-path", str(folder), *flags], gpu=gpu)

    return verdict


LLAMA, LATENTS = "LlamaForCausalLM", "DeepseekV2ForCausalLM"
# Of layers, which are 12: all, halves, fourths.
ALL = [*range(LAYERS)]
EVEN, ODD = ALL[::2], ALL[1::2]
FOURTH = ALL[3::4]
BESIDE_FOURTH = sorted({*ALL} - {*FOURTH})
BESIDE_SIXTH = sorted({*ALL} - {*ALL[5::6]})
NO_KERNEL = "not both one of (64, 128, 256), nor 576 and 512"


def heads(count: int) -> dict[str, Any]:
    return {"num_attention_heads": count, "num_key_value_heads": count}


LARGE_HEADS = {"per_layer_config": {f"{layer}": {"head_dim": 512} for layer in ALL[5::6]}}
HEADS_OF_16 = heads(16) | {"num_nextn_predict_layers": 1}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
CHAINS = (*NGRAM, "--speculative-ngram-max-bfs-breadth", "1")
MTP = ("--speculative-algorithm", "NEXTN")
IN_CHAINS = ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
STEPS = (*MTP, *IN_CHAINS, "--speculative-num-steps")
FP8 = ("--kv-cache-dtype", "fp8_e4m3")
ON_FA3 = ("--attention-backend", "fa3", "--decode-attention-backend", "pat")


@pytest.mark.parametrize(
    ("architecture", "changes", "flags", "ours", "others"),
    [
        (LLAMA, {}, FP8, ALL, {}),
        ("Gemma2ForCausalLM", {}, (), ODD, {SLIDING: EVEN}),
        ("Llama4ForConditionalGeneration", {}, ON_FA3, FOURTH, {CHUNKED: BESIDE_FOURTH}),
        ("Exaone4ForCausalLM", {}, (), FOURTH, {SLIDING: BESIDE_FOURTH}),
        ("Gemma4ForConditionalGeneration", {"text_config": LARGE_HEADS}, (), [],
         {f"head dims 512 and 512, {NO_KERNEL}": ALL[5::6], SLIDING: BESIDE_SIXTH}),
        ("Qwen3_5ForConditionalGeneration", {}, (), FOURTH, {OFF: BESIDE_FOURTH}),
        ("FalconH1ForCausalLM", {}, (), ALL, {}),
        ("NemotronHForCausalLM", {}, (), [7, 18, 29, 40],
         {OFF: sorted({*range(52)} - {7, 18, 29, 40})}),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"] * 6}, (), ODD, {OFF: EVEN}),
        ("JetNemotronForCausalLM", {}, (), ALL[1::4], {SLIDING: FOURTH, OFF: EVEN}),
        ("Gemma3ForConditionalGeneration", {}, (), ALL[5::6], {SLIDING: BESIDE_SIXTH}),
        # Sinks are served.
        ("GraniteSWAForCausalLM", {}, (), ALL[::4], {SLIDING: sorted({*ALL} - {*ALL[::4]})}),
        ("InternVLChatModel", {}, (), ODD, {SLIDING: EVEN}),
        # What stands in the models' code alone.
        ("Grok1ForCausalLM", {"attn_temperature_len": -1}, (), ALL, {}),
        ("LLaDA2MoeModelLM", {}, (), [], {"attention type encoder_only": ALL}),
        ("HrmTextForCausalLM", {"prefix_lm": False}, (), [],
         {"attention type decoder_bidirectional": ALL}),
        # Weights whose kernels this machine lacks.
        (LLAMA, {"quantization_config": GPTQ}, (), ALL, {}),
        (LLAMA, {"quantization_config": {"quant_method": "mxfp4"}}, (), ALL, {}),
        (LATENTS, heads(64), ("--tp", "2"), ALL, {}),
        (LATENTS, {"kv_lora_rank": 64, "qk_rope_head_dim": 16}, (), [],
         {f"head dims 80 and 64, {NO_KERNEL}": ALL}),
        # Its drafts are of a layer of its own.
        ("DeepseekV3ForCausalLM", HEADS_OF_16, (*MTP, "--tp", "2"), ALL, {}),
        ("KimiLinearForCausalLM", heads(4), NGRAM, FOURTH, {OFF: BESIDE_FOURTH}),
        (LATENTS, heads(64), NGRAM, [], {"4 draft tokens of 64 query heads on a latent, of which "
         "packing saves nothing": ALL}),
        ("Gemma2ForCausalLM", {}, CHAINS, [], {SLIDING: EVEN, CAPPED: ODD}),
    ],
)  # fmt: skip
def test_which_layers_are_served(
    architecture: str,
    changes: dict[str, Any],
    flags: tuple[str, ...],
    ours: list[int],
    others: dict[str, list[int]],
    ask: Any,
) -> None:
    verdict = ask(architecture, *flags, **changes)
    assert verdict.layers == ({"": ours} if ours else {}) | others
    whole = "served" if set(others) <= {OFF} else "served in part"
    assert verdict.status == (whole if ours else "nothing to gain")
    assert verdict.reasons == [] and verdict.ok == bool(ours)
    assert (verdict.kv_dtype == "float8_e4m3fn") is (flags == FP8)


CHOOSE, GAIN = "choose another --attention-backend", "nothing to gain"
DECODE = ("--decode-attention-backend", "pat")
OVER_TRITON = ("--attention-backend", "triton", *DECODE)
NO_BUFFER = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
SPLIT_FLAGS = ("--prefill-attention-backend", "fa3", *OVER_TRITON)


@pytest.mark.parametrize(
    ("architecture", "flags", "gpu", "status", "reason", "way_out"),
    [
        (LATENTS, ("--prefill-attention-backend", "flashmla"), "H100", GAIN, "decode runs on "
         "flashmla, which pat cannot extend", "where it was SGLang's choice"),
        # Transformers has the model, but no code of it that SGLang can run.
        ("JambaForCausalLM", (), "H100", "refused", "has no SGlang impl", ""),
        ("GraniteSWAForCausalLM", (), "", "refused", "torch_native take no attention sinks",
         "restart with " + " ".join(OVER_TRITON)),
        # In SGLang's own words, which are not cut.
        ("Exaone4ForCausalLM", ("--attention-backend", "flashinfer", *DECODE), "H100", "refused",
         "['fa3', 'triton', 'trtllm_mha'] is required for Exaone4ForCausalLM, but got flashinfer",
         ""),
        ("Qwen3_5ForCausalLM", (), "", "refused", "extra_buffer requires platform", ""),
        # The flags that it then asks for would only start a server that dies.
        ("FalconH1ForCausalLM", NO_BUFFER, "", "refused", "SGLang's kernels of linear attention "
         "and state spaces need a GPU", "start the server"),
        # Served all the same, each request by itself.
        (LLAMA, ("--disable-radix-cache",), "H100", GAIN, "radix cache", "drop --disable-radix"),
    ],
)  # fmt: skip
def test_what_is_refused_or_gains_nothing_is_said_with_the_way_out(
    architecture: str,
    flags: tuple[str, ...],
    gpu: str,
    status: str,
    reason: str,
    way_out: str,
    ask: Any,
) -> None:
    verdict = ask(architecture, *flags, gpu=gpu)
    assert (verdict.status, verdict.ok) == (status, False)
    (found,) = verdict.reasons
    assert reason in found.words and found.way_out.startswith(way_out)
    assert bool(found.way_out) == bool(way_out) and not verdict.notes
    assert (status, found.words, found.way_out) in verdict.lines()
    assert found.serves == (verdict.layers != {})


def test_where_sglang_has_the_attention_alone_there_is_nothing_to_gain(ask: Any) -> None:
    """A server starts as it does without pat, which for this model is without a radix cache."""
    minicpm = "MiniCPMSALAForCausalLM"
    verdict = ask(minicpm)
    assert (verdict.status, verdict.layers) == (GAIN, {})
    first, second = verdict.reasons
    assert "decode runs on minicpm_flashattn, which pat" in first.words and not first.serves
    assert "radix cache" in second.words
    # On a named backend pat runs decode, of each request by itself.
    named = ask(minicpm, *ON_FA3)
    assert named.reasons == [second] and named.layers == {"": ALL}


@pytest.mark.parametrize(
    ("architecture", "changes", "flags"),
    [
        (LLAMA, {}, ("--dtype", "float32")),
        (LLAMA, {}, ("--kv-cache-dtype", "fp8_e5m2")),
        (LLAMA, {}, ("--enable-pdmux",)),
        (LLAMA, {}, (*NGRAM, "--page-size", "64")),
        (LLAMA, {}, (*NGRAM, "--speculative-num-draft-tokens", "65")),
        (LLAMA, {}, (*CHAINS, *SPLIT_FLAGS)),
        (LATENTS, heads(16), NGRAM),
        ("DeepseekV3ForCausalLM", HEADS_OF_16, (*STEPS, "3")),
        ("Exaone4ForCausalLM", {}, ("--decode-attention-backend", "fa3")),
        (LLAMA, {}, ("--disaggregation-mode", "decode")),
        (LLAMA, {}, ("--disable-radix-cache",)),
        (LLAMA, {}, ("--max-running-requests", "1")),
    ],
)
def test_the_way_out_works_when_it_is_copied(
    architecture: str,
    changes: dict[str, Any],
    flags: tuple[str, ...],
    ask: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (found,) = ask(architecture, *flags, **changes).reasons
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
    assert ask(architecture, *left, **changes).ok, (way_out, left)
    if flags[0] == "--max-running-requests":
        monkeypatch.setenv("SGLANG_PAT_MIN_BATCH", "1")
        assert ask(architecture, *flags).ok


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
    falcon, grok, gemma = (
        *("FalconH1ForCausalLM", "Grok1ForCausalLM", "Gemma3ForConditionalGeneration"),
    )
    (note,) = ask(falcon, gpu="H200").notes
    assert "dies at its first prompts" in note and "--disable-prefill-cuda-graph" in note
    assert not ask(falcon, "--disable-prefill-cuda-graph", gpu="H200").notes
    for hybrid in ("NemotronHForCausalLM", "GraniteMoeHybridForCausalLM"):
        assert ask(hybrid, gpu="B200").ok and not ask(hybrid).notes
    temperature = {"attn_temperature_len": 1024}
    (note,) = ask(grok, **temperature).notes
    assert "attn_temperature_len" in note and note.endswith(" ".join(OVER_TRITON[:2]))
    assert not ask(grok, *OVER_TRITON, **temperature).notes
    images = "--enable-multimodal"
    (note,) = ask(gemma, images).notes
    assert "tokens of an image" in note and note.endswith(" ".join(OVER_TRITON))
    assert not ask(gemma, images, *OVER_TRITON).notes and not ask(gemma).notes


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
    with pytest.raises(QuestionError, match=r"no config.json of no/model: .*; give"):
        judge(["--model-path", "no/model"], gpu="H100")
    verdict = judge(["--model-path", str(tmp_path)], gpu="H100")  # without a config.json
    assert verdict.refused and verdict.reasons[0].words.startswith("SGLang itself refuses: ")
