# SPDX-License-Identifier: Apache-2.0
"""Benchmarks. They print figures; they are not tests.

- ``kernel``: the attention of one decode step and layer, ``python -m sglang_pat.bench.kernel`` on a
  GPU and ``python -m sglang_pat.bench.kernel.attention`` on a CPU.
- ``serving``: servers beside each other, ``python -m sglang_pat.bench.serving``.
- ``host``: the host time of plans, ``python -m sglang_pat.bench.host.schedule``, and of decode
  steps on SGLang's caches, ``python -m sglang_pat.bench.host.step``.
- ``tile_solver``: the PAT paper's choice of tiles, ``python -m sglang_pat.bench.tile_solver``.
- ``common``: what they share with each other, with the demo and with the tests.
"""
