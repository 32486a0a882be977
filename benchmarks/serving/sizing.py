# SPDX-License-Identifier: Apache-2.0
"""How large the servers must be for what they are asked."""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.serving.fleet import FleetConfig
from benchmarks.serving.model import GIB, Model

# Slots beyond the tokens of all requests: overlapping steps hold a few more.
POOL_MARGIN, POOL_MARGIN_PER_REQUEST = 1024, 16
PAGE = 256  # a multiple of every page size


def fleet_config(
    options: argparse.Namespace,
    model: Model,
    dtype: str,
    gpu_gib: float | None,
) -> FleetConfig:
    """Servers that hold the largest workload and team.

    Args:
        options: of the command line.
        model: what every server loads.
        dtype: of weights and K/V.
        gpu_gib: memory of a GPU; None on a CPU, whose memory is not looked at.

    Raises:
        ValueError: a request is longer than the model's positions, a context has no room for a
            turn, or the servers do not fit a GPU.
    """
    config = FleetConfig(
        model=model,
        device=options.device,
        dtype=dtype,
        tp=options.tp,
        pool_tokens=0,
        max_requests=_max_requests(options),
        mem_fraction_static=options.mem_fraction_static,
        overhead_gib=options.overhead_gib,
        args=tuple(options.server_args),
        kv_cache_dtype=options.kv_cache_dtype,
    )
    longest = _longest(options)
    if longest > model.positions:
        raise ValueError(
            f"a request of {longest} tokens is longer than the {model.positions} positions of "
            f"{options.model}"
        )
    pool = _pool_tokens(options, config.max_requests)
    pool += -pool % PAGE  # else SGLang rounds it down
    config = replace(config, pool_tokens=pool)
    if gpu_gib is not None:
        config.check_memory(options.backends, gpu_gib)
    return config


def _max_requests(options: argparse.Namespace) -> int:
    agents = [team.agents for team in options.agents or ()]
    return int(max(agents + [work.requests for work in options.workloads]))


def _longest(options: argparse.Namespace) -> int:
    """Tokens of the longest request."""
    for team in options.agents or ():
        team.check(options.agent_context)
    added = options.new_tokens + options.output_tokens
    contexts = [options.agent_context] if options.agents else []
    return int(max(contexts + [work.cached + added for work in options.workloads]))


def _pool_tokens(options: argparse.Namespace, max_requests: int) -> int:
    """K/V tokens with which no request waits for another one's."""
    pools = [team.kv_tokens(options.agent_context) for team in options.agents or ()]
    pools += [
        work.kv_tokens(new=options.new_tokens, output=options.output_tokens)
        for work in options.workloads
    ]
    return int(max(pools) + POOL_MARGIN + POOL_MARGIN_PER_REQUEST * max_requests)


def device_of(device: str, gpus: int) -> tuple[str, float | None]:
    """Name and memory of a GPU, in GiB; the memory of a CPU is not looked at.

    Raises:
        ValueError: there are fewer than ``gpus``.
    """
    import torch

    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads", None
    if torch.cuda.device_count() < gpus:
        raise ValueError(
            f"torch {torch.__version__} can use {torch.cuda.device_count()} GPUs here, but "
            f"{gpus} are needed: use another machine, or --device cpu with a small --model"
        )
    found = torch.cuda.get_device_properties(0)
    return found.name, found.total_memory / GIB
