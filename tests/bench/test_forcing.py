# SPDX-License-Identifier: Apache-2.0
"""How servers in half precision are compared: by teacher forcing (``kit/forcing.py``), and by
judging the log-probabilities of forced tokens. No server, no GPU."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.forcing import BIAS, ForceTokens, force_all, forced_logprobs, unbias

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from gpu_serving.agreement import LARGEST_LIMIT, MEAN_LIMIT, Distance, check_forced


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
    answer = {"meta_info": {"output_token_logprobs": [(-0.1, 4, None), (-0.1, 9, None)]}}
    first, second = forced_logprobs(answer, [4, 5])
    assert first == unbias(-0.1)
    assert math.isnan(second)


def test_all_texts_are_forced_after_their_own_prompts() -> None:
    def ask(body: dict[str, Any]) -> dict[str, Any]:
        (number,) = body["input_ids"]
        assert body["lora_path"] == f"adapter {number}"
        tokens = body["sampling_params"]["custom_params"]["forced"]
        taken = [(-number / 8, token, None) for token in tokens]
        return {"meta_info": {"output_token_logprobs": taken}}

    more = [{"lora_path": f"adapter {number}"} for number in (1, 2, 3)]
    found = force_all(ask, [(1,), (2,), (3,)], [(7, 8), (7,), (9, 8, 7)], more)
    assert found == [[unbias(-1 / 8)] * 2, [unbias(-2 / 8)], [unbias(-3 / 8)] * 3]
    with pytest.raises(ValueError, match="3 prompts, 1 texts"):
        force_all(ask, [(1,), (2,), (3,)], [(7,)])


FA3 = [-0.1 * i for i in range(40)]  # so many that one alone hardly moves the mean
NAN = math.nan


def moved(by: float) -> list[float]:
    return [value + by for value in FA3]


def last_moved(by: float) -> list[float]:
    return [*FA3[:-1], FA3[-1] + by]


def test_near_both_peers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_forced("a load", {"fa3": FA3, "flashinfer": moved(0.02), "pat": moved(0.01)})


@pytest.mark.parametrize(
    ("pat", "flashinfer", "fa3", "said"),
    [
        (moved(0.04), moved(0.02), FA3, "a load: pat to"),  # the mean from fa3
        (last_moved(0.12), FA3, FA3, "a load: pat to"),  # the largest from fa3
        (moved(-0.03), moved(0.02), FA3, "a load: pat to"),  # from flashinfer alone
        (last_moved(NAN), [NAN] * 40, FA3, "1 NaN of pat"),
        (FA3, [NAN] * 40, last_moved(NAN), "NaN of both peers"),
    ],
)
def test_far_from_a_peer_or_nan(
    pat: list[float], flashinfer: list[float], fa3: list[float], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        check_forced("a load", {"fa3": fa3, "flashinfer": flashinfer, "pat": pat})


@pytest.mark.parametrize("name", ["fa3", "flashinfer"])
@pytest.mark.parametrize("values", [[NAN] * 40, last_moved(NAN)])
def test_nan_of_a_peer_is_named_and_the_other_alone_compared(
    name: str, values: list[float]
) -> None:
    """A single one, too: that of a token that could not be forced."""
    message = f"{sum(map(math.isnan, values))} of 40 log-probabilities of {name} are NaN"
    found = {"fa3": FA3, "flashinfer": FA3, name: values}
    with pytest.warns(UserWarning, match=message):
        check_forced("a load", {**found, "pat": moved(MEAN_LIMIT - 0.001)})
    for pat in (moved(MEAN_LIMIT + 0.001), last_moved(LARGEST_LIMIT + 0.001)):
        with pytest.warns(UserWarning, match=message), pytest.raises(AssertionError, match="over"):
            check_forced("a load", {**found, "pat": pat})


def test_a_distance_of_nan_is_beside_no_other() -> None:
    nothing, found = Distance.between([NAN], [0.0]), Distance(0.0, 0.0)
    assert not found.about_as_small_as(nothing) and not nothing.about_as_small_as(found)
    assert not nothing.small
