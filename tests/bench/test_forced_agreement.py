# SPDX-License-Identifier: Apache-2.0
"""How the GPU serving tests judge log-probabilities of forced tokens, on made-up numbers. No
server, no GPU."""

from __future__ import annotations

import math
import warnings

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from gpu_serving.agreement import LARGEST_LIMIT, MEAN_LIMIT, Distance, check_forced

FA3 = tuple(-0.1 * i for i in range(40))  # so many that one alone hardly moves the mean
NAN = math.nan


def moved(by: float) -> list[float]:
    return [value + by for value in FA3]


def last_moved(by: float) -> list[float]:
    return [*FA3[:-1], FA3[-1] + by]


def check(pat: list[float], flashinfer: list[float], fa3: tuple[float, ...] = FA3) -> None:
    check_forced("a load", {"fa3": fa3, "flashinfer": flashinfer, "pat": pat})


def test_near_both_peers_nothing_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(moved(0.01), moved(0.02))


@pytest.mark.parametrize(
    ("pat", "flashinfer"),
    [
        (moved(0.04), moved(0.02)),  # the mean from fa3
        (last_moved(0.12), list(FA3)),  # the largest from fa3
        (moved(-0.03), moved(0.02)),  # from flashinfer alone
    ],
)
def test_far_from_a_peer(pat: list[float], flashinfer: list[float]) -> None:
    with pytest.raises(AssertionError, match="a load: pat to"):
        check(pat, flashinfer)


@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
@pytest.mark.parametrize("values", [[NAN] * 40, last_moved(NAN)])
def test_nan_of_a_peer_is_named_and_the_other_alone_compared(
    name: str, values: list[float]
) -> None:
    """A single one, too: that of a token that could not be forced."""
    count = sum(map(math.isnan, values))
    near, far = moved(MEAN_LIMIT - 0.001), moved(MEAN_LIMIT + 0.001)
    worst = last_moved(LARGEST_LIMIT + 0.001)
    message = f"{count} of 40 log-probabilities of {name} are NaN"
    found = {"fa3": FA3, "flashinfer": FA3, name: values}
    with pytest.warns(UserWarning, match=message):
        check_forced("a load", {**found, "pat": near})
    for pat in (far, worst):
        with pytest.warns(UserWarning, match=message), pytest.raises(AssertionError, match="over"):
            check_forced("a load", {**found, "pat": pat})


@pytest.mark.parametrize("flashinfer", [list(FA3), [NAN] * 40])
def test_nan_of_pat_or_of_both_peers_fails(flashinfer: list[float]) -> None:
    with pytest.raises(AssertionError, match="1 NaN of pat"):
        check(last_moved(NAN), flashinfer)
    with pytest.raises(AssertionError, match="NaN of both peers"):
        check(list(FA3), [NAN] * 40, tuple(last_moved(NAN)))


def test_a_distance_of_nan_is_beside_no_other() -> None:
    nothing = Distance.between([NAN], [0.0])
    found = Distance(0.0, 0.0)
    assert not found.about_as_small_as(nothing) and not nothing.about_as_small_as(found)
    assert not nothing.small
