# SPDX-License-Identifier: Apache-2.0
"""Teacher forcing, by which servers in half precision are compared (``kit/forcing.py``)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.forcing import BIAS, ForceTokens, force_all, forced_logprobs, unbias


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
