# SPDX-License-Identifier: Apache-2.0
"""The online softmax of the CUDA kernels, and the masks of draft tokens, compiled for the host by
g++."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of kit/host_cuda."""
    folder = tmp_path_factory.mktemp("host_cuda")
    # The stand-in of pipeline.cuh comes before the kernels' own.
    include = [f"-I{TESTS / 'kit' / 'host_cuda'}", f"-I{TESTS.parent / 'csrc'}"]
    for name in ("softmax", "draft_masks"):
        source = TESTS / "kit" / "host_cuda" / f"{name}.cpp"
        command = ["g++", "-std=c++20", "-O1", "-pthread", *include, source, "-o", folder / name]
        subprocess.run(command, check=True, timeout=120)
    return folder


def printed(program: Path, *arguments: object) -> list[float]:
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return [float(word) for word in done.stdout.split()]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("draft_tokens", [2, 3, 8, 33, 64])
@pytest.mark.parametrize("head_group", [1, 4, 7, 16])
def test_masks_of_draft_tokens(
    compiled: Path, head_group: int, draft_tokens: int, seed: int
) -> None:
    """Of a chain and of trees, of every row and token, in tiles of every width."""
    for more in (0, 1, 62, 63, 64, 65, 200):
        given = (head_group, draft_tokens, draft_tokens + more, seed)
        masked, wrong = printed(compiled / "draft_masks", *given)
        assert wrong == 0 and masked > 0


@pytest.mark.parametrize("tokens", [1, 50, 64, 65, 1000, 8192, 32768])
@pytest.mark.parametrize("peak", [0, 18, 20, 60])
def test_a_token_with_most_of_the_weight_leaves_the_others(
    compiled: Path, peak: int, tokens: int
) -> None:
    """Weights are rounded by up to 2^-4, in either direction, so that a mean over many tokens and
    columns is nearer. Relative to the greatest of all tokens, those of the others become 0 beside a
    peak of 2^18: 0.07 of the output was gone at 8192 tokens, half at 32,768 and 2^20."""
    of_output, of_lse = printed(compiled / "softmax", "e4m3", tokens, peak, 0, 0)
    assert of_output < 0.02 and of_lse < 1e-5


@pytest.mark.parametrize("tokens", [1, 64, 65, 500, 8192])
@pytest.mark.parametrize("masked", [1, 2, 3])
@pytest.mark.parametrize("weights", ["e4m3", "plain"])
def test_tiles_without_a_token_that_counts(
    compiled: Path, weights: str, masked: int, tokens: int
) -> None:
    of_output, of_lse = printed(compiled / "softmax", weights, tokens, 30, masked, 0)
    assert of_output < 0.02 and of_lse < 1e-5


@pytest.mark.parametrize("offset", [-1500, -102, 102, 893, 1500])
@pytest.mark.parametrize("weights", ["e4m3", "plain"])
def test_many_tiles_whose_greatest_logit_stays(compiled: Path, weights: str, offset: int) -> None:
    """The sum so far is multiplied 2,048 times with 2^(old maximum - new maximum), which must be 1
    where they are equal. A product of the maximum that is rounded in one of the two and not in the
    other lost 2.5 % of the first tiles at a logit of 893. fp32 has steps of 2^-13 there."""
    of_output, of_lse = printed(compiled / "softmax", weights, 131_072, 8, 0, offset)
    assert of_output < (0.02 if weights == "e4m3" else 2e-4) and of_lse < 3e-4
