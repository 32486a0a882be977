# SPDX-License-Identifier: Apache-2.0
"""Plans of the batches, packed and not, and what they come to on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from sglang_pat import Plan
from sglang_pat.dump import PathNodes
from sglang_pat.estimate.batches import DecodeStep
from sglang_pat.estimate.radix import shared_paths
from sglang_pat.estimate.requests import Prompts
from sglang_pat.estimate.step import StepModel
from sglang_pat.planner import Planner


@dataclass(frozen=True, slots=True)
class Step:
    """One planned decode step. ``numbers``: of its requests; ``paths``: the nodes that several of
    them share. K/V tokens are of one layer and KV head: ``read`` by the packed plan, ``unpacked``
    the sum of all lengths, ``held`` each token once. Seconds: ``packed_s`` and ``unpacked_s`` of
    attention in all layers, the latter with reads of tokens that were read before charged as from
    the L2; ``slowest_s`` as if every read came from memory; ``rest_s`` of everything else."""

    numbers: list[int]
    paths: list[PathNodes]
    seq_lens: list[int]
    plan: Plan
    read: int
    unpacked: int
    held: int
    packed_s: float
    unpacked_s: float
    slowest_s: float
    rest_s: float

    @property
    def saved(self) -> float:
        """Share of the K/V reads that packing saves; below 0 where it reads more."""
        return 1 - self.read / self.unpacked


@dataclass(frozen=True, slots=True)
class Estimate:
    """Means over ``steps``, which is not empty; names and units as in ``Step``."""

    steps: list[Step]

    def mean(self, name: str) -> float:
        """Of a number that every step has."""
        return fmean(getattr(step, name) for step in self.steps)

    @property
    def queries(self) -> float:
        return fmean(len(step.seq_lens) for step in self.steps)

    @property
    def saved(self) -> float:
        """Share of all K/V reads that packing saves."""
        return 1 - self.mean("read") / self.mean("unpacked")

    @property
    def packed_step_s(self) -> float:
        return self.mean("packed_s") + self.mean("rest_s")

    @property
    def unpacked_step_s(self) -> float:
        return self.mean("unpacked_s") + self.mean("rest_s")

    @property
    def ratio(self) -> float:
        """Time per token with pat over that without."""
        return self.packed_step_s / self.unpacked_step_s

    @property
    def typical(self) -> Step:
        """The step in the middle of all, by what it saves."""
        return sorted(self.steps, key=lambda step: step.saved)[len(self.steps) // 2]


def estimate(prompts: Prompts, steps: Sequence[DecodeStep], model: StepModel) -> Estimate:
    """Plan every step for the target of ``model``, which must hold the largest of them."""
    paths = prompts.paths()
    planner = Planner(model.target)
    return Estimate([_step(prompts, paths, step, model, planner) for step in steps])


def _step(
    prompts: Prompts,
    paths: Sequence[PathNodes],
    step: DecodeStep,
    model: StepModel,
    planner: Planner,
) -> Step:
    shared = shared_paths([paths[number] for number in step.requests])
    # The token that is being decoded is in the K/V cache, too.
    seq_lens = [
        prompts.requests[number].length + produced + 1
        for number, produced in zip(step.requests, step.produced, strict=True)
    ]
    plan = planner.plan(shared, seq_lens)
    alone = planner.plan([None] * len(seq_lens), seq_lens)
    total, held = sum(seq_lens), tokens_held(shared, seq_lens)
    unpacked_s = model.attention_s(alone, seq_lens, held)
    # SGLang's own attention runs a step of one request.
    packed_s = model.attention_s(plan, seq_lens, held) if len(seq_lens) > 1 else unpacked_s
    return Step(
        step.requests,
        shared,
        seq_lens,
        plan,
        plan.kv_tokens_read(total),
        total,
        held,
        packed_s,
        unpacked_s,
        model.attention_s(alone, seq_lens, total),
        model.rest_s(len(seq_lens)),
    )


def tokens_held(paths: Sequence[PathNodes], seq_lens: Sequence[int]) -> int:
    """K/V tokens of a batch, each node's once. ``seq_lens`` [B], ``paths`` [B]."""
    nodes = {node: end - start for path in paths for node, start, end in path}
    ends = [path[-1][2] if path else 0 for path in paths]
    return sum(nodes.values()) + sum(seq_lens) - sum(ends)
