# SPDX-License-Identifier: Apache-2.0
"""GPUs that are not at hand: targets, from properties as torch gives them, and which are served."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pat import _C, doctor, gpus, plan
from sglang_pat.demo.server import default_device
from sglang_pat.srt import refusals
from sglang_pat.target import Target

needs_cuda = pytest.mark.skipif(not _C.CUDA_CODE, reason="built with PAT_CUDA=OFF")
HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_queries": 64}


def device(name: str, sms: int, major: int = 9, minor: int = 0, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, multi_processor_count=sms, major=major, minor=minor, **more)


def test_an_h200_is_what_was_measured() -> None:
    assert Target.gpu(device("NVIDIA H200", 132), **HEADS) == Target.h200(**HEADS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200 144G"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM4-80GB"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA L40", "L40"),
    ],
)
def test_known_names(name: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sglang_pat"):
        found = gpus.rates_of(device(name, 100))
    terabytes, teraflops = gpus.KNOWN[words]
    assert found.source == "vendor"
    # Kernels reach between half and all of what the vendor states.
    assert 0.5 * terabytes < found.bytes_per_s / 1e12 < terabytes
    assert 0.5 * teraflops < found.flops_per_s / 1e12 < teraflops
    assert not caplog.records


def test_an_unknown_gpu_is_estimated_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    # GDDR6X of an RTX 3080: 9501 MHz x 320 bits, 760 GB/s.
    told = device(
        "NVIDIA GeForce RTX 3080", 68, 8, 6, memory_clock_rate=9501e3, memory_bus_width=320
    )
    with caplog.at_level(logging.WARNING, logger="sglang_pat"):
        target = Target.gpu(told, **HEADS)
    assert "RTX 3080, which it does not know" in caplog.text
    assert "0.76 TB/s" in caplog.text
    assert target.num_sms == 68
    untold = Target.gpu(device("NVIDIA X", 66, 11, 0), **HEADS)
    h200 = Target.h200(**HEADS)
    assert untold.bytes_per_s == pytest.approx(h200.bytes_per_s / 2)
    assert 0 < untold.flops_per_s < h200.flops_per_s / 2


def test_the_log_says_which_rates_count(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="sglang_pat"):
        gpus.rates_of(device("NVIDIA H200", 132))
        gpus.rates_of(device("NVIDIA H20", 78))
    measured, stated = caplog.messages
    assert "NVIDIA H200, 132 SMs: 4.30 TB/s, 600 TFLOP/s (measured)" in measured
    assert "NVIDIA H20, 78 SMs: 3.58 TB/s, 90 TFLOP/s (vendor)" in stated


def test_a_slice_of_a_gpu_is_another_gpu() -> None:
    half = gpus.rates_of(device("NVIDIA H100 80GB HBM3", 66))
    assert half.source == "vendor"
    assert half.bytes_per_s < gpus.rates_of(device("NVIDIA H100 80GB HBM3", 132)).bytes_per_s


@pytest.mark.parametrize("name", gpus.GPUS)
def test_plans_can_be_made_for_every_gpu_that_has_a_name(name: str) -> None:
    machine = gpus.machine_of(name)
    assert gpus.vendor_rates(machine.name) is not None
    Target.gpu(machine, **HEADS)


@pytest.mark.parametrize("name", ["rtx 4090", "4090", "NVIDIA RTX 4090", "RTX4090"])
def test_a_gpu_has_several_spellings(name: str) -> None:
    assert gpus.machine_of(name).name == "NVIDIA GeForce RTX 4090"


def test_a_laptop_is_not_the_desktop_gpu_of_its_name(caplog: pytest.LogCaptureFixture) -> None:
    name = "NVIDIA GeForce RTX 4090 Laptop GPU"
    laptop = device(name, 76, 8, 9, memory_clock_rate=9001e3, memory_bus_width=256)
    with caplog.at_level(logging.WARNING, logger="sglang_pat"):
        found = gpus.rates_of(laptop)
    assert found.source == "estimated" and "0.58 TB/s" in caplog.text


def test_options_count_for_more_than_properties() -> None:
    target = Target.gpu(device("NVIDIA L4", 58, 8, 9), **HEADS, num_sms=10, policy="paper")
    assert (target.num_sms, target.policy) == (10, "paper")


def test_smaller_gpus_split_long_sequences_less() -> None:
    """The plan follows the target: one long sequence is cut for the SMs that there are."""
    large, small = (
        plan([None], [100_000], Target.gpu(device(name, sms), **HEADS))
        for name, sms in (("NVIDIA H200", 132), ("NVIDIA L4", 58))
    )
    assert large.num_items > small.num_items > 1


@pytest.mark.parametrize(
    ("capability", "code"),
    [
        ((7, 5), ""),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90a"),
        ((9, 1), ""),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((11, 0), "compute_100"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
        ((13, 0), "compute_100"),
    ],
)
def test_what_a_gpu_runs(
    capability: tuple[int, int], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_100"))
    assert gpus.code_for(capability) == code
    words = gpus.untried(capability)
    assert (words == "") == (code in ("", "sm_90a"))
    assert ("from PTX" in words) == code.startswith("compute")
    assert "PAT_ARCHS" not in gpus.built_for()
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a"))
    assert gpus.built_for() == "8.x, 9.0 (with PAT_ARCHS=all for later ones too)"
    monkeypatch.setattr(_C, "CUDA_CODE", ())
    assert gpus.code_for(capability) == gpus.untried(capability) == gpus.built_for() == ""


@needs_cuda
def test_plans_for_blackwell_have_no_branches_and_what_shared_memory_allows() -> None:
    """Its kernels are those without wgmma; an SM of 12.0 has as little shared memory as an L40S."""
    b200, b300, rtx5090 = (
        Target.gpu(device(name, sms, major, minor), **HEADS)
        for name, sms, major, minor in (
            ("NVIDIA B200", 148, 10, 0),
            ("NVIDIA B300 SXM6 AC", 148, 10, 3),
            ("NVIDIA GeForce RTX 5090", 170, 12, 0),
        )
    )
    assert {b200.branching, b300.branching, rtx5090.branching} == {"never"}
    assert (b200.items_per_sm, b300.items_per_sm, rtx5090.items_per_sm) == (2, 2, 1)


def test_a_b200_is_not_planned_for_at_the_rate_of_instructions_that_our_kernels_lack() -> None:
    b200, h200 = (gpus.rates_of(gpus.GPUS[name]) for name in ("b200", "h200"))
    assert b200.flops_per_s == pytest.approx(h200.flops_per_s * 148 / 132)
    assert b200.source == "vendor"
    rtx5090 = gpus.rates_of(gpus.GPUS["rtx5090"])  # mma.sync is its only one
    reached = h200.flops_per_s / gpus.KNOWN["H200"][1]
    assert rtx5090.flops_per_s == pytest.approx(gpus.KNOWN["RTX 5090"][1] * reached)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch see a GPU; sets what the probe of our kernels says of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)

    def probed(ok: bool, arch: int, error: str = "") -> None:
        found = {"ok": ok, "arch": arch, "error": error}
        monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a", "sm_100", "sm_120"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: divmod(arch, 10))
        monkeypatch.setattr(
            _C, "cuda_probe", lambda device: found | {"device": device}, raising=False
        )

    return probed


def test_a_gpu_that_runs_our_kernels_is_taken(a_gpu: Any) -> None:
    a_gpu(True, 90)
    assert refusals.reason_against_gpu() == ""
    assert list(refusals._device(SimpleNamespace(device="cuda"))) == []
    assert default_device() == "cuda"
    assert doctor._platform().status == "ok"


@needs_cuda
def test_the_doctor_says_on_which_gpus_nobody_ran_the_kernels(a_gpu: Any) -> None:
    a_gpu(True, 120)
    finding = doctor._platform()
    assert finding.status == "note"
    assert "12.0 (sm_120) are built, but were not run on such a GPU" in finding.found


def test_a_gpu_without_a_kernel_is_named_and_passed_over(a_gpu: Any) -> None:
    a_gpu(False, 75, "no kernel image is available for execution on the device")
    (reason,) = refusals._device(SimpleNamespace(device="cuda"))
    assert "GPU 3 of 7.5 (no kernel image" in reason
    assert f"compute capability {gpus.built_for()}, do not run" in reason
    assert reason.endswith("choose another --attention-backend")
    assert default_device() == "cpu"
    finding = doctor._platform()
    assert finding.status == "block" and "GPU 3 of 7.5" in finding.found


def test_a_build_without_kernels_is_named(a_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_C, "cuda_probe", raising=False)
    (reason,) = refusals._device(SimpleNamespace(device="cuda"))
    assert "PAT_CUDA=OFF" in reason
    assert default_device() == "cpu"


@pytest.mark.skipif(not hasattr(_C, "cuda_probe"), reason="built without CUDA kernels")
def test_the_least_shared_memory_of_a_block() -> None:
    """One half, two stages and one Q buffer: 4096 bytes and three tiles of 64 tokens. Needs no GPU;
    the reasons against layers ask for it (tests/test_layer_refusals.py has the same values)."""
    for head_dim in refusals.CUDA_HEAD_DIMS:
        assert _C.cuda_min_shared_bytes(head_dim) == 4096 + 3 * 64 * 2 * head_dim
    with pytest.raises(ValueError, match="head_dim is 96, the CUDA kernels have 64, 128 and 256"):
        _C.cuda_min_shared_bytes(96)
