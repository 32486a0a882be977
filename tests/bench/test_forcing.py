# SPDX-License-Identifier: Apache-2.0
"""How servers in half precision are compared: by teacher forcing (``kit/forcing.py``), and by
judging the log-probabilities of forced tokens. No server, no GPU."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.forcing import BIAS, ForceTokens, force_all, unbias

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from gpu_serving.agreement import LARGEST_LIMIT, MEAN_LIMIT, check_forced


@given(st.floats(-6.0, -0.1))
def test_the_bias_is_taken_out_again(logprob: float) -> None:
    """Against log_softmax rounded to fp32, as a server gives it: one token at ``logprob``, the rest
    spread. In fp32 the sum may be off by 7e-6 on some CPUs, which e^BIAS would make 1e-3."""
    rest = math.log1p(-math.exp(logprob)) - math.log(999)
    logits = torch.full((1, 1000), rest, dtype=torch.float32)
    logits[0, 7] = logprob
    forced = ForceTokens()(logits, [{"forced": [7]}])
    seen = torch.log_softmax(forced.double(), dim=-1)[0, 7].float().item()
    assert unbias(seen) == pytest.approx(logprob, abs=5e-4)


def test_each_request_is_forced_along_its_own_tokens() -> None:
    params = [{"forced": [1, 2]}, {"forced": [3, 1, 0]}]
    steps = []
    for _ in range(3):
        logits = ForceTokens()(torch.zeros(2, 4), params)
        steps.append([row.nonzero().flatten().tolist() for row in logits])
        assert logits.max() == BIAS
    assert steps == [[[1], [3]], [[2], [1]], [[], [0]]]


def test_a_token_that_could_not_be_forced_makes_the_rest_nan() -> None:
    def ask(body: dict[str, Any]) -> dict[str, Any]:
        (number,) = body["input_ids"]
        tokens = body["sampling_params"]["custom_params"]["forced"]
        taken = [(-number / 8, 4 if token == 5 else token, None) for token in tokens]
        return {"meta_info": {"output_token_logprobs": taken}}

    one, (first, *rest) = force_all(ask, [(1,), (2,)], [(7, 8), (9, 5, 7)])
    assert (one, first) == ([unbias(-1 / 8)] * 2, unbias(-2 / 8)) and all(map(math.isnan, rest))


FA3 = [-0.1 * i for i in range(40)]  # so many that one alone hardly moves the mean
NAN = math.nan


def moved(by: float, last: float = 0.0) -> list[float]:
    return [value + by for value in FA3[:-1]] + [FA3[-1] + by + last]


@pytest.mark.parametrize(
    ("pat", "flashinfer", "fa3", "said"),
    [
        (moved(0.01), moved(0.02), FA3, ""),
        (moved(0.04), moved(0.02), FA3, "a load: pat to"),  # the mean from fa3
        (moved(0.0, 0.12), FA3, FA3, "a load: pat to"),  # the largest from fa3
        (moved(-0.03), moved(0.02), FA3, "a load: pat to"),  # from flashinfer alone
        (moved(0.0, NAN), [NAN] * 40, FA3, "1 NaN of pat"),
        (FA3, [NAN] * 40, moved(0.0, NAN), "NaN of both peers"),
        # One NaN of a peer, of a token that could not be forced: the other alone is compared.
        (moved(MEAN_LIMIT - 0.001), FA3, moved(0.0, NAN), ""),
        (moved(MEAN_LIMIT + 0.001), [NAN] * 40, FA3, "over"),
        (moved(0.0, LARGEST_LIMIT + 0.001), FA3, [NAN] * 40, "over"),
    ],
)
def test_pat_is_as_near_to_the_peers_as_they_are_to_each_other(
    pat: list[float], flashinfer: list[float], fa3: list[float], said: str
) -> None:
    found = {"fa3": fa3, "flashinfer": flashinfer, "pat": pat}
    nans = sum(map(math.isnan, fa3 + flashinfer))
    named = pytest.warns(UserWarning, match=f"{nans} of 40 log-probabilities of")
    warned = named if nans and "NaN" not in said else nullcontext()
    with warned, pytest.raises(AssertionError, match=said) if said else nullcontext():
        check_forced("a load", found)
