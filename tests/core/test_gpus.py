# SPDX-License-Identifier: Apache-2.0
"""GPUs that are not at hand: targets, from properties as torch gives them, and which are served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_pat import _C, doctor, gpus
from sglang_pat.srt import support
from sglang_pat.target import WITHOUT_BRANCHES, Target

HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_queries": 64}


def device(name: str, sms: int, major: int = 9, minor: int = 0, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(name=name, multi_processor_count=sms, major=major, minor=minor, **more)


def test_rates_are_measured_the_vendors_or_estimated(caplog: pytest.LogCaptureFixture) -> None:
    # GDDR6X of an RTX 3080: 9501 MHz x 320 bits, 760 GB/s. A laptop's GPU is not the desktop's.
    clock = {"memory_clock_rate": 9501e3, "memory_bus_width": 320}
    for name in ("NVIDIA GeForce RTX 3080", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        found = gpus.rates_of(device(name, 68, 8, 6, **clock))
        assert found.bytes_per_s == pytest.approx(0.76e12 * 4.3 / 4.8, rel=0.01)
        assert f"{name}, 68 SMs: " in caplog.text and "(estimated)" in caplog.messages[-1]
    h200 = Target.h200(**HEADS)
    assert Target.gpu(device("NVIDIA H200", 132), **HEADS) == h200
    untold = Target.gpu(device("NVIDIA X", 66, 11, 0), **HEADS)
    assert untold.bytes_per_s == pytest.approx(h200.bytes_per_s / 2)
    assert 0 < untold.flops_per_s < h200.flops_per_s / 2
    # A slice of a GPU is another one.
    half, whole = (gpus.rates_of(device("NVIDIA H100 80GB HBM3", sms)) for sms in (66, 132))
    assert half.source == "vendor" and half != whole


def test_plans_can_be_made_for_every_gpu_that_has_a_name() -> None:
    for name in gpus.GPUS:
        machine = gpus.machine_of(name)
        assert gpus.rates_of(machine).source != "estimated"
        made = Target.gpu(machine, **HEADS)
        # The kernels for Blackwell are those without wgmma; an SM of 12.0 has as little shared
        # memory as an L40S.
        assert (made.cuts == WITHOUT_BRANCHES) == (machine.major != 9)
        assert made.items_per_sm == (1 if machine.major == 12 or machine.minor in (6, 9) else 2)
    for name in ("rtx 4090", "4090", "NVIDIA RTX 4090"):
        assert gpus.machine_of(name) is gpus.GPUS["rtx4090"]


CODE = {
    "": ((7, 5), (9, 1)),
    "sm_80": ((8, 0), (8, 6), (8, 9)),
    "sm_90a": ((9, 0),),
    "sm_100": ((10, 0), (10, 3)),
    "sm_120": ((12, 0), (12, 1)),
    "compute_100": ((11, 0), (13, 0)),
}


@pytest.mark.parametrize("code", CODE)
def test_what_a_gpu_runs(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a", "sm_100", "sm_120", "compute_100"))
    for capability in CODE[code]:
        assert gpus.code_for(capability) == code
        words = gpus.untried(capability)
        assert (words == "") == (code in ("", "sm_90a"))
        assert ("from PTX" in words) == code.startswith("compute")
    assert "PAT_ARCHS" not in gpus.built_for()
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a"))
    assert gpus.built_for() == "8.x, 9.0 (with PAT_ARCHS=all for later ones too)"
    monkeypatch.setattr(_C, "CUDA_CODE", ())
    assert gpus.code_for((9, 0)) == gpus.untried((9, 0)) == gpus.built_for() == ""


@pytest.mark.parametrize(
    ("arch", "error", "status", "said"),
    [
        (90, "", "ok", ""),
        (120, "", "note", "12.0 (sm_120) are built, but were not run on such a GPU"),
        (75, "no kernel image", "block", "do not run on GPU 3 of 7.5 (no kernel image)"),
    ],
)
def test_what_a_backend_and_the_doctor_say_of_a_gpu(
    arch: int, error: str, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that torch sees; ``error``: what the probe of our kernels says of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(arch, 10))
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setattr(_C, "CUDA_CODE", ("sm_80", "sm_90a", "sm_100", "sm_120"))
    monkeypatch.setattr(_C, "cuda_probe", lambda _: error, raising=False)
    finding, refused = doctor._platform(), support.reason_against_gpu()
    assert finding.status == status and said in finding.found
    assert bool(refused) == bool(error) and (not error or said in refused)
    monkeypatch.delattr(_C, "cuda_probe")  # as in a build without kernels
    assert "PAT_CUDA=OFF" in support.reason_against_gpu()
