# SPDX-License-Identifier: Apache-2.0
"""The online softmax of the CUDA kernels with weights in e4m3, compiled for the host by g++."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def softmax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("softmax") / "softmax"
    # The stand-in of pipeline.cuh comes before the kernels' own.
    include = [f"-I{TESTS / 'kit' / 'host_cuda'}", f"-I{TESTS.parent / 'csrc'}"]
    source = TESTS / "kit" / "host_cuda" / "softmax.cpp"
    flags = ["-std=c++20", "-O1", "-pthread"]
    subprocess.run(["g++", *flags, *include, source, "-o", program], check=True, timeout=120)
    return program


def errors(softmax: Path, *arguments: object) -> tuple[float, float]:
    command = [str(softmax), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    of_output, of_lse = map(float, done.stdout.split())
    return of_output, of_lse


@pytest.mark.parametrize("tokens", [1, 50, 64, 65, 1000, 8192, 32768])
@pytest.mark.parametrize("peak", [0, 18, 20, 60])
def test_a_token_with_most_of_the_weight_leaves_the_others(
    softmax: Path, peak: int, tokens: int
) -> None:
    """Weights are rounded by up to 2^-4, in either direction, so that a mean over many tokens and
    columns is nearer. Relative to the greatest of all tokens, those of the others become 0 beside a
    peak of 2^18: 0.07 of the output was gone at 8192 tokens, half at 32,768 and 2^20."""
    of_output, of_lse = errors(softmax, tokens, peak, 0)
    assert of_output < 0.02 and of_lse < 1e-5


@pytest.mark.parametrize("tokens", [1, 64, 65, 500, 8192])
@pytest.mark.parametrize("masked", [1, 2, 3])
def test_tiles_without_a_token_that_counts(softmax: Path, masked: int, tokens: int) -> None:
    of_output, of_lse = errors(softmax, tokens, 30, masked)
    assert of_output < 0.02 and of_lse < 1e-5
