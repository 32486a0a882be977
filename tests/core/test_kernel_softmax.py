# SPDX-License-Identifier: Apache-2.0
"""The online softmax of the CUDA kernels, compiled for the host by g++."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def softmax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of kit/host_cuda."""
    source, program = TESTS / "kit" / "host_cuda", tmp_path_factory.mktemp("host_cuda") / "softmax"
    # The stand-in of pipeline.cuh comes before the kernels' own.
    command = ["g++", "-std=c++20", "-O1", "-pthread", f"-I{source}", f"-I{TESTS.parent / 'csrc'}"]
    subprocess.run([*command, source / "softmax.cpp", "-o", program], check=True, timeout=120)
    return program


def errors(program: Path, *arguments: object) -> list[float]:
    """Of the output and of the LSE."""
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return [float(word) for word in done.stdout.split()]


@pytest.mark.parametrize("tokens", [1, 64, 65, 1000, 8192, 32768])
@pytest.mark.parametrize("peak", [0, 18, 20, 60])
def test_a_token_with_most_of_the_weight_leaves_the_others(
    softmax: Path, peak: int, tokens: int
) -> None:
    """Weights are rounded by up to 2^-4, in either direction, so that a mean over many tokens and
    columns is nearer. Relative to the greatest of all tokens, those of the others become 0 beside a
    peak of 2^18: 0.07 of the output was gone at 8192 tokens, half at 32,768 and 2^20."""
    of_output, of_lse = errors(softmax, "e4m3", tokens, peak, 0, 0)
    assert of_output < 0.02 and of_lse < 1e-5


@pytest.mark.parametrize("weights", ["e4m3", "plain"])
def test_tiles_without_a_token_that_counts_or_whose_greatest_logit_stays(
    softmax: Path, weights: str
) -> None:
    """The sum so far is multiplied 2,048 times with 2^(old maximum - new maximum), which must be 1
    where they are equal. A product of the maximum that is rounded in one of the two and not in the
    other lost 2.5 % of the first tiles at a logit of 893. fp32 has steps of 2^-13 there."""
    for tokens, masked in product((1, 64, 65, 8192), (1, 2, 3)):
        of_output, of_lse = errors(softmax, weights, tokens, 30, masked, 0)
        assert of_output < 0.02 and of_lse < 1e-5, (tokens, masked)
    for offset in (-1500, 102, 893):
        of_output, of_lse = errors(softmax, weights, 131_072, 8, 0, offset)
        assert of_output < (0.02 if weights == "e4m3" else 2e-4) and of_lse < 3e-4, offset
