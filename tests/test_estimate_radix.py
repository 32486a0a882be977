# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate``: what prompts share, which of them run together, what a plan saves."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pat import Target
from sglang_pat.estimate.batches import DecodeStep, closed_loop
from sglang_pat.estimate.model import open_model
from sglang_pat.estimate.planning import estimate, tokens_held
from sglang_pat.estimate.radix import RadixTree, common_prefix, shared_paths
from sglang_pat.estimate.requests import Prompts, Request
from sglang_pat.estimate.step import StepModel

# Few kinds of tokens, so that prompts share often.
PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=16)


def inserted(prompts: list[list[int]]) -> list[list[tuple[int, int, int]]]:
    tree = RadixTree()
    leaves = [tree.insert(np.array(prompt, dtype=np.int64)) for prompt in prompts]
    return [tree.path(leaf) for leaf in leaves]


def in_common(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def requests_of(prompts: list[list[int]], output: int = 4) -> Prompts:
    return Prompts(
        [
            Request(line, np.array(prompt, dtype=np.int64), len(prompt), output)
            for line, prompt in enumerate(prompts, 1)
        ]
    )


@given(PROMPTS)
def test_a_path_is_its_prompt_without_gaps(prompts: list[list[int]]) -> None:
    for prompt, path in zip(prompts, inserted(prompts), strict=True):
        ends = [0, *(end for _, _, end in path)]
        assert [start for _, start, _ in path] == ends[:-1] and ends[-1] == len(prompt)
        assert all(start < end for start, end in pairwise(ends))


@given(PROMPTS)
def test_paths_share_what_prompts_begin_with(prompts: list[list[int]]) -> None:
    paths = inserted(prompts)
    for one, path in zip(prompts, paths, strict=True):
        for other, other_path in zip(prompts, paths, strict=True):
            shared = [node for node in path if node in other_path]
            assert shared == path[: len(shared)] == other_path[: len(shared)]
            assert (shared[-1][2] if shared else 0) == in_common(one, other)


@given(PROMPTS)
def test_joined_paths_have_the_shared_tokens_and_no_needless_nodes(
    prompts: list[list[int]],
) -> None:
    paths = shared_paths(inserted(prompts))
    for number, path in enumerate(paths):
        most = max(
            (in_common(prompts[number], other) for i, other in enumerate(prompts) if i != number),
            default=0,
        )
        assert (path[-1][2] if path else 0) == most
        readers = [{i for i, other in enumerate(paths) if node in other} for node in path]
        assert all(len(below) < len(above) for above, below in pairwise(readers))
        assert all(len(some) > 1 for some in readers)


@pytest.mark.parametrize(
    ("one", "other", "count"), [([], [1], 0), ([1], [1], 1), ([1, 2], [1, 2, 3], 2), ([1], [2], 0)]
)
def test_common_prefix(one: list[int], other: list[int], count: int) -> None:
    assert common_prefix(np.array(one, np.int64), np.array(other, np.int64)) == count


def ideal(queries: int) -> StepModel:
    """Every shared node becomes one item: query heads have K/V heads of their own, and a row tile
    holds all queries."""
    target = Target.h200(
        num_q_heads=8,
        num_kv_heads=8,
        head_dim=128,
        max_queries=max(queries, 256),
        policy="naive",
        branching="never",
    )
    return StepModel(open_model("llama3-8b"), target)


@settings(max_examples=30, deadline=None)
@given(PROMPTS.filter(lambda prompts: all(prompts)), st.integers(0, 3))
def test_ideal_packs_read_each_token_once(prompts: list[list[int]], produced: int) -> None:
    batch = DecodeStep(list(range(len(prompts))), [produced] * len(prompts))
    (step,) = estimate(requests_of(prompts), [batch], ideal(len(prompts))).steps
    different = {tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))}
    assert step.held == len(different) + len(prompts) * (produced + 1)
    assert step.read == step.held
    assert step.unpacked == sum(map(len, prompts)) + len(prompts) * (produced + 1)


@settings(max_examples=30, deadline=None)
@given(PROMPTS.filter(lambda prompts: all(prompts)))
def test_a_plan_reads_no_less_than_each_token_once(prompts: list[list[int]]) -> None:
    target = Target.h200(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=256)
    model = StepModel(open_model("llama3-8b"), target)
    batch = DecodeStep(list(range(len(prompts))), [0] * len(prompts))
    found = estimate(requests_of(prompts), [batch], model)
    (step,) = found.steps
    assert step.held <= step.read <= step.unpacked
    assert 0 <= found.saved < 1 and found.packed_step_s > 0
    assert step.held == tokens_held(step.paths, step.seq_lens)


def test_blocks_of_a_trace_are_tokens() -> None:
    blocks = np.array([7, 8, 9], dtype=np.int64)
    requests = Prompts([Request(1, blocks, 1100, 4), Request(2, blocks[:2], 1024, 4)], unit=512)
    (first, second) = requests.paths()
    assert [(start, end) for _, start, end in first] == [(0, 1024), (1024, 1100)]
    assert second == first[:1]


def test_samples_of_a_prompt_share_all_of_it() -> None:
    prompt = np.arange(2000, dtype=np.int64)
    requests = Prompts([Request(1, prompt, 2000, 100, samples=16)])
    target = Target.h200(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=256)
    batches = closed_loop(requests.queue(), 16, 4)
    found = estimate(requests, batches, StepModel(open_model("llama3-8b"), target))
    assert found.queries == 16 and found.saved > 0.9
    assert all(path == found.steps[0].paths[0] for path in found.steps[0].paths)


QUEUES = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@given(QUEUES, st.integers(1, 12), st.integers(1, 8))
def test_every_place_is_taken_in_every_step(
    outputs: list[int], concurrency: int, count: int
) -> None:
    queue = list(enumerate(outputs))
    batches = closed_loop(queue, concurrency, count)
    assert 1 <= len(batches) <= count
    for batch in batches:
        assert len(batch.requests) == min(concurrency, len(queue))
        assert len(set(batch.requests)) == len(batch.requests)
        for request, produced in zip(batch.requests, batch.produced, strict=True):
            assert 0 <= produced < outputs[request]
    assert batches == closed_loop(queue, concurrency, count)


def test_requests_come_in_their_order() -> None:
    batches = closed_loop([(number, 10) for number in range(100)], 10, 20)
    assert all(max(batch.requests) - min(batch.requests) == 9 for batch in batches)
    firsts = [min(batch.requests) for batch in batches]
    assert firsts == sorted(firsts) and firsts[-1] - firsts[0] > 70
    # Evenly spread: not all begin their answers together.
    assert all(len(set(batch.produced)) == 10 for batch in batches)


def test_long_answers_are_in_more_steps_than_short_ones() -> None:
    queue = [(number, 100 if number % 2 else 10) for number in range(200)]
    batches = closed_loop(queue, 8, 50)
    long = [request % 2 for batch in batches for request in batch.requests]
    assert 0.85 < sum(long) / len(long) < 0.97  # 10/11 of all steps are of long ones
