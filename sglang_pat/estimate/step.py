# SPDX-License-Identifier: Apache-2.0
"""The modelled time of a decode step. Nothing in here was measured for the model or GPU at hand.

Attention is the plans' cost model (csrc/pack/cost_model.h) with the GPU's rates, layer by layer;
of a plan that the simulation chose, less what that saves (csrc/pack/simulation.h).
The rest of a step is the weights' bytes over the GPU's bandwidth and their products over its
arithmetic, of which neither hides behind the other as a whole (the root of the sum of their
squares), and a constant a layer. docs/estimate.md says how far off that was.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

import numpy as np

from sglang_pat import _C, Plan, Target
from sglang_pat.estimate.model import Model

# Seconds of a layer beside its attention, weights and products: small kernels and what lies between
# kernels. Fitted to the serving rows of one H200 (docs/estimate.md), and taken for every GPU.
LAYER_S = 45e-6
_ALL = 10**6  # queries that choose every expert


@dataclass(frozen=True, slots=True)
class StepModel:
    """Times of one rank of ``tp``. ``base_s``: seconds of a step with one short request where the
    user has measured it, in place of the modelled weights and layers."""

    model: Model
    target: Target
    tp: int = 1
    base_s: float | None = None

    def attention_s(self, plan: Plan, seq_lens: list[int], held: int) -> float:
        """Of all layers with full attention. ``held``: K/V tokens of the batch, each once; what
        the plan reads beyond them is charged as reads from the L2."""
        terms = _C.plan_terms(plan, np.array(seq_lens, dtype=np.int64), held)
        seconds = plan.simulated_factor * _C.plan_seconds(self.target.native, terms)
        return self.model.attention_layers * seconds

    def rest_s(self, queries: int) -> float:
        """Of everything else. What GPUs tell each other under tensor parallelism is not in it."""
        weights_s = self._weights_s(queries)
        products_s = self.model.flops(queries) / self.tp / self.target.flops_per_s
        both_s = hypot(weights_s, products_s)
        if self.base_s is not None:
            return self.base_s + both_s - self._weights_s(1)
        return both_s + self.model.layers * LAYER_S

    def bytes_needed(self, held: int) -> float:
        """Of one GPU: K/V of so many tokens and all weights."""
        target = self.target
        token = 2 * target.num_kv_heads * target.head_dim * target.kv_bytes
        weights = self.model.bytes_read(_ALL) / self.tp
        return held * token * self.model.attention_layers + weights

    def _weights_s(self, queries: int) -> float:
        return self.model.bytes_read(queries) / self.tp / self.target.bytes_per_s
