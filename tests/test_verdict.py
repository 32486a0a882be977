# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor --model``: verdicts on tiny models and server flags. No weights, no GPU."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kit import models as kit_models

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.arg_groups import memory_hook
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

from sglang_pat import _C
from sglang_pat.capacity import MB, fit_workspace
from sglang_pat.gpus import GPUS
from sglang_pat.srt import layers, machines
from sglang_pat.srt.flags import QuestionError
from sglang_pat.srt.verdict import Verdict, judge

needs_cuda = pytest.mark.skipif(not _C.CUDA_CODE, reason="built with PAT_CUDA=OFF")


@pytest.fixture(scope="module", autouse=True)
def sglang_knows_pat() -> Iterator[None]:
    """As after ``load_plugins``, without its hooks, which would stay for other tests."""
    known = "pat" in ATTENTION_BACKEND_CHOICES
    if not known:
        ATTENTION_BACKEND_CHOICES.append("pat")
    with mock.patch.dict(os.environ):  # where SGLang leaves some, which later servers would inherit
        os.environ["SGLANG_PLATFORM"] = "pat_cpu"
        level = logging.getLogger().level
        yield
        logging.getLogger().setLevel(level)  # --log-level is SGLang's, of the whole process
    if not known:
        ATTENTION_BACKEND_CHOICES.remove("pat")


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    count = itertools.count()
    if _C.CUDA_CODE:  # as in a wheel
        code = ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_100")
        monkeypatch.setattr(_C, "CUDA_CODE", code)

    def verdict(config: dict[str, Any], *flags: str, gpu: str = "H100", **changes: Any) -> Verdict:
        # SGLang keeps what it has read from a folder.
        folder = kit_models.write_config(tmp_path / f"model{next(count)}", config, **changes)
        return judge(["--model-path", str(folder), *flags], gpu=gpu)

    return verdict


@pytest.mark.parametrize("gpu", ["", "H100", "A100-40GB", "4090"])
def test_a_plain_model_is_served(gpu: str, ask: Any) -> None:
    verdict = ask(kit_models.LLAMA, gpu=gpu)
    assert (verdict.status, verdict.ok) == ("served", True)
    assert verdict.layers == {"": [0, 1, 2, 3]}
    assert verdict.device == {"": "cpu", "4090": "RTX4090"}.get(gpu, gpu)
    assert (verdict.workspace is None) == (gpu == "")


def test_experts_make_no_difference(ask: Any) -> None:
    verdict = ask(kit_models.QWEN3_MOE, "--tp", "2", gpu="H200")
    assert (verdict.status, verdict.layers) == ("served", {"": [0, 1, 2, 3]})


@pytest.mark.parametrize("gpu", ["", "H100"])
def test_a_server_of_one_request_at_a_time(
    gpu: str, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--max-running-requests", "1")
    verdict = ask(kit_models.LLAMA, *flags, gpu=gpu)
    assert (verdict.status, verdict.workspace) == ("nothing to gain", None)
    (advice,) = verdict.idle
    assert "lets at most 1 decode at a time" in advice.reason
    monkeypatch.setenv("SGLANG_PAT_MIN_BATCH", "1")
    assert ask(kit_models.LLAMA, *flags, gpu=gpu).status == "served"


def test_layers_with_sliding_windows_are_not_served(ask: Any) -> None:
    for config, ours in ((kit_models.GEMMA2, [1, 3]), (kit_models.STEP3P5, [0, 2])):
        verdict = ask(config)
        assert (verdict.status, verdict.ok) == ("served in part", True)
        others = [layer for layer in range(4) if layer not in ours]
        assert verdict.layers == {"": ours, layers.SLIDING: others}


def test_layers_without_attention_leave_nothing_unserved(ask: Any) -> None:
    verdict = ask(kit_models.QWEN3_NEXT)
    assert verdict.status == "served"
    assert verdict.layers == {"": [3], layers.NO_ATTENTION: [0, 1, 2]}


def test_llama4_is_refused_by_sglang_and_through_split_flags_served_in_part(ask: Any) -> None:
    assert "required for Llama4 model but got pat" in ask(kit_models.LLAMA4).refusals[0]
    split = ("--attention-backend", "fa3", "--decode-attention-backend", "pat")
    verdict = ask(kit_models.LLAMA4, *split)
    assert verdict.layers == {"": [3], layers.CHUNKED: [0, 1, 2]}


@pytest.mark.parametrize(
    ("gpu", "served"), [("H100", True), ("A100", True), ("L40S", False), ("", True)]
)
def test_head_dim_256_needs_more_shared_memory_than_some_gpus_have(
    gpu: str, served: bool, ask: Any
) -> None:
    verdict = ask(kit_models.LLAMA, gpu=gpu, head_dim=256)
    assert verdict.ok == served
    if not served:
        assert verdict.status == "nothing to gain"
        (reason,) = verdict.layers
        assert reason.startswith("head dim 256") and "101376" in reason
        assert verdict.workspace is None


@pytest.mark.parametrize("gpu", ["", "H100", "A100"])
def test_kv_in_fp8_are_served(gpu: str, ask: Any) -> None:
    verdict = ask(kit_models.LLAMA, "--kv-cache-dtype", "fp8_e4m3", gpu=gpu)
    assert (verdict.status, verdict.refusals, verdict.idle) == ("served", [], [])
    assert set(verdict.layers) == {""}


@pytest.mark.parametrize("gpu", ["", "H100"])
def test_mla_is_refused(gpu: str, ask: Any) -> None:
    verdict = ask(kit_models.DEEPSEEK, "--dtype", "bfloat16", gpu=gpu)
    assert (verdict.status, verdict.ok, verdict.layers) == ("refused", False, {})
    (reason,) = verdict.refusals
    assert "uses MLA" in reason and reason.endswith("choose another --attention-backend")


def test_a_gpu_without_kernels_is_refused(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a"))
    (reason,) = ask(kit_models.LLAMA, gpu="B200").refusals
    assert "compute capability 8.x, 9.0 (with PAT_ARCHS=all" in reason and "B200 of 10.0" in reason


@needs_cuda
@pytest.mark.parametrize(
    ("gpu", "code"),
    [("B200", "10.0 (sm_100)"), ("B300", "10.3 (sm_100)"), ("5090", "12.0 (sm_120)"),
     ("RTX PRO 6000", "12.0 (sm_120)"), ("A100", "8.0 (sm_80)"), ("L4", "8.9 (sm_80)")],
)  # fmt: skip
def test_a_gpu_on_which_nobody_ran_the_kernels(gpu: str, code: str, ask: Any) -> None:
    verdict = ask(kit_models.LLAMA, gpu=gpu)
    assert verdict.status == "served"
    note = verdict.notes[0]
    assert note == (
        f"our kernels for compute capability {code} are built, but were not run on such a GPU"
    )
    assert ("note", note, "") in verdict.lines()
    assert verdict.as_json()["notes"] == verdict.notes


def test_what_a_hopper_needs_not_be_told(ask: Any) -> None:
    for gpu in ("H100", "H200"):
        assert not ask(kit_models.LLAMA, gpu=gpu).notes


@needs_cuda
def test_a_b200_runs_prefill_on_trtllm_mha_if_pages_allow_it(ask: Any) -> None:
    _, note = ask(kit_models.LLAMA, gpu="B200").notes
    assert "trtllm_mha, takes pages of 16, 32, 64, 128 tokens, not of 1; --page-size 64" in note
    assert note.startswith("prefill, and decode that is not pat's, run on flashinfer: ")
    assert len(ask(kit_models.LLAMA, "--page-size", "64", gpu="B200").notes) == 1
    assert len(ask(kit_models.LLAMA, gpu="RTX5090").notes) == 1  # its default is flashinfer


@needs_cuda
@pytest.mark.parametrize("gpu", ["B200", "RTX5090"])
def test_models_of_gated_delta_nets_are_refused_on_blackwell(gpu: str, ask: Any) -> None:
    verdict = ask(kit_models.QWEN3_NEXT, gpu=gpu)
    assert verdict.status == "refused" and not verdict.notes
    (reason,) = verdict.refusals
    assert "Qwen3-Next" in reason and reason.endswith("choose another --attention-backend")


def test_a_model_that_sglang_cannot_read_is_refused(tmp_path: Path) -> None:
    """A folder without a config.json."""
    verdict = judge(["--model-path", str(tmp_path)], gpu="H100")
    assert verdict.status == "refused"
    assert verdict.refusals[0].startswith("SGLang itself refuses: ")


@pytest.mark.parametrize(
    ("flags", "reason", "way_out", "allocates"),
    [
        (
            ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "65"),
            "--speculative-algorithm NGRAM drafts trees of 65 tokens",
            "set --speculative-num-draft-tokens to at most 64",
            False,
        ),
        (("--is-embedding",), "embedding or reward model never decodes", "another", False),
        (("--disaggregation-mode", "prefill"), "prefill server", "decode server", False),
        (
            ("--disaggregation-mode", "decode"),
            "keeps no radix cache",
            "--disaggregation-decode-enable-radix-cache",
            True,
        ),
        (("--disable-radix-cache",), "radix cache", "drop --disable-radix-cache", True),
    ],
)
def test_nothing_to_gain(
    flags: tuple[str, ...], reason: str, way_out: str, allocates: bool, ask: Any
) -> None:
    verdict = ask(kit_models.LLAMA, *flags)
    assert (verdict.status, verdict.ok) == ("nothing to gain", False)
    (advice,) = verdict.idle
    assert reason in advice.reason
    assert way_out in advice.way_out
    assert (verdict.workspace is not None) == allocates


def test_the_workspace_is_what_the_backend_would_size(
    ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = ask(kit_models.LLAMA, "--max-running-requests", "300", "--tp", "2")
    sized = fit_workspace(
        num_q_heads=2,
        head_dim=64,
        pool_requests=300,
        pool_tokens=300 * 8192,  # at most: the pool's size is not known before the start
        largest_graph=256,  # SGLang's default on a GPU of 80 GB
        partial_dtype=torch.float32,
        budget=256 * MB,
    )
    assert verdict.workspace == sized
    report = verdict.as_json()["workspace"]
    assert (report["bytes"], report["max_requests"]) == (sized.total, 300)
    monkeypatch.setenv("SGLANG_PAT_WORKSPACE_MB", "1")
    small = ask(kit_models.LLAMA, "--max-running-requests", "300", "--tp", "2").workspace
    assert small.over_budget and small.max_queries == 300


def test_a_gpu_that_is_not_here_is_forgotten_afterwards(ask: Any) -> None:
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_platform

    before = memory_hook.get_device_memory_capacity, current_platform.is_out_of_tree()
    ask(kit_models.LLAMA)
    assert (memory_hook.get_device_memory_capacity, current_platform.is_out_of_tree()) == before
    assert "is_out_of_tree" not in vars(current_platform)
    assert get_platform().is_sm90 == torch.cuda.is_available()


def test_questions_that_make_no_sense(ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(QuestionError, match=r"'H900' is not known; the GPUs are h200, h100"):
        ask(kit_models.LLAMA, gpu="H900")
    with pytest.raises(QuestionError, match="--model /no/such/model: there is no such folder"):
        judge(["--model-path", "/no/such/model"], gpu="H100")
    with pytest.raises(QuestionError, match="--gpu and --device"):
        ask(kit_models.LLAMA, "--device", "cpu")
    with pytest.raises(QuestionError, match="unrecognized arguments: --no-such-flag; python -m"):
        ask(kit_models.LLAMA, "--no-such-flag")
    with pytest.raises(QuestionError, match=r"--tp-size.*invalid int value: 'two'"):
        ask(kit_models.LLAMA, "--tp", "two")
    assert capsys.readouterr().err == ""


def test_names_of_gpus() -> None:
    assert machines.known_gpu("rtx 4090") == machines.known_gpu("4090")
    for name, machine in GPUS.items():
        found = machines.known_gpu(name)
        assert found.name == name.upper() and found.capability == (machine.major, machine.minor)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0], "0"),
        ([0, 1, 2, 7], "0-2, 7"),
        (list(range(0, 26, 2)), "0, 2, 4, ... 24 (13 layers)"),
    ],
)
def test_layers_in_words(ids: list[int], words: str) -> None:
    assert layers.ranges(ids) == words


def test_what_people_read(ask: Any) -> None:
    found = dict(
        (topic, (text, way_out)) for topic, text, way_out in ask(kit_models.GEMMA2).lines()
    )
    assert found["server"][0].startswith("Gemma2ForCausalLM, 4 layers, 4 query and 2 KV heads")
    assert found["layers of pat"][0] == "2 (1, 3)"
    assert found["layers of SGLang"][0] == "2 (0, 2): a sliding window"
    assert "MB on the GPU" in found["workspace"][0]
    refused = [line for line in ask(kit_models.DEEPSEEK).lines() if line[0] == "refused"]
    (_, reason, way_out), *_ = refused
    assert "MLA" in reason and way_out == "choose another --attention-backend"
    refused = ask(kit_models.LLAMA, "--enable-pdmux", "--chunked-prefill-size", "-1").lines()
    (_, reason, way_out), *_ = [line for line in refused if line[0] == "refused"]
    assert reason.startswith("--enable-pdmux: ") and way_out.startswith("drop it or choose")
    flags = ("--speculative-algorithm", "NGRAM", "--page-size", "64")  # drafts trees by default
    (_, reason, way_out), *_ = [
        line for line in ask(kit_models.LLAMA, *flags).lines() if line[0] == "refused"
    ]
    assert "page_size(64) > 1" in reason and way_out == "set --page-size 1"
