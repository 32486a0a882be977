# SPDX-License-Identifier: Apache-2.0
"""The demo's judgement: what counts as agreement, and what must not."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_pat.demo.compare import compare, compare_forced
from sglang_pat.demo.counters import Counters, parse_counters
from sglang_pat.demo.forcing import BIAS, ForceTokens, force_all, forced_logprobs, unbias
from sglang_pat.demo.workload import Generation

STOCK = Generation(
    name="coder/0/0",
    prompt_ids=[1, 2, 3],
    output_ids=[4, 5, 6, 7],
    logprobs=[-1.0, -2.0, -3.0, -4.0],
    margins=[0.5, 0.5, 0.5, 0.5],
    text="",
    tpot_s=0.01,
)


def test_equal_runs_agree() -> None:
    agreement = compare([STOCK], [STOCK])
    assert agreement.tokens_equal
    assert agreement.max_logprob_diff == 0


def test_after_another_token_log_probabilities_are_not_compared() -> None:
    other = replace(STOCK, output_ids=[4, 5, 9, 7], logprobs=[-1.0, -2.5, -9.0, -9.0])
    agreement = compare([STOCK, other], [STOCK, STOCK])
    assert not agreement.tokens_equal
    assert agreement.token_match_rate == 7 / 8
    assert agreement.max_logprob_diff == 0.5


def test_after_another_prompt_log_probabilities_are_not_compared() -> None:
    other = replace(STOCK, prompt_ids=[1, 2], logprobs=[-9.0] * 4)
    assert compare([STOCK, other], [STOCK, STOCK]).max_logprob_diff == 0


@pytest.mark.parametrize("position", range(4))
def test_a_nan_is_never_passed_over(position: int) -> None:
    logprobs = list(STOCK.logprobs)
    logprobs[position] = math.nan
    assert math.isnan(compare([replace(STOCK, logprobs=logprobs)], [STOCK]).max_logprob_diff)
    assert math.isnan(compare_forced([logprobs], [STOCK], 1.0).mean_logprob_diff)


def test_a_missing_log_probability_is_an_error() -> None:
    with pytest.raises(ValueError, match="4 tokens but 3 log-probabilities"):
        replace(STOCK, logprobs=[-1.0, -2.0, -3.0])


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
    """At the same time: no answer comes before all were asked for."""
    everyone = threading.Barrier(3, timeout=30)

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        everyone.wait()
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


METRICS = """
# TYPE sglang_pat_decode_steps_total counter
sglang_pat_decode_steps_total{dp_rank="0",tp_rank="0"} 3.0
sglang_pat_decode_steps_total{dp_rank="1",tp_rank="0"} 2.0
# TYPE sglang_pat_plan_seconds_total counter
sglang_pat_plan_seconds_total{tp_rank="0"} 0.25
# TYPE sglang_pat_base_forwards_total counter
sglang_pat_base_forwards_total{dp_rank="0",kind="extend",tp_rank="0"} 2.0
sglang_pat_base_forwards_total{dp_rank="1",kind="extend",tp_rank="0"} 1.0
# TYPE sglang_pat_serving gauge
sglang_pat_serving{tp_rank="0"} 1.0
# TYPE sglang_pat_fallbacks_total counter
sglang_pat_fallbacks_total{reason="a layer with, \\"quotes\\"",tp_rank="0"} 1.0
# TYPE sglang_gen_throughput gauge
sglang_gen_throughput 3.0
"""


def test_counters_are_read_from_the_exposition() -> None:
    """Over all replicas."""
    assert parse_counters(METRICS) == Counters(
        decode_steps=5,
        plan_seconds=0.25,
        base_forwards={"extend": 3},
        fallbacks={'a layer with, "quotes"': 1},
    )
    assert parse_counters("") == Counters()


def test_counters_of_a_span_of_time() -> None:
    before = Counters(decode_steps=2, base_forwards={"extend": 2}, fallbacks={"old": 1})
    after = Counters(decode_steps=7, base_forwards={"extend": 3}, fallbacks={"old": 1, "new": 4})
    expected = Counters(decode_steps=5, base_forwards={"extend": 1}, fallbacks={"new": 4})
    assert after - before == expected
