# SPDX-License-Identifier: Apache-2.0
"""For which GPU and model ``sglang-pat estimate`` plans: the options, and the model of a step."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_pat.gpus import GPUS

if TYPE_CHECKING:
    from sglang_pat.estimate.step import StepModel

DEFAULT_GPU, DEFAULT_MODEL = "h200", "llama3-8b"
_KV_BYTES = {"bf16": 2, "fp8_e4m3": 1}


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` the options that name a GPU and a model."""
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"what to plan for: {', '.join(GPUS)} (default: {DEFAULT_GPU}; with "
        "--url no times; with --break-even h100 and h200)",
    )
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="folder of a model, of which config.json is read, or llama3-8b or qwen3-8b, shapes of "
        f"the benchmarks (default: {DEFAULT_MODEL}; with --url the server's)",
    )
    parser.add_argument(
        "--heads", metavar="Q/KV", help="query and KV heads of the model (default: the model's)"
    )
    parser.add_argument(
        "--head-dim", type=int, metavar="D", help="elements of a head (default: the model's)"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="layers with attention (default: the model's)"
    )
    parser.add_argument(
        "--tp", type=int, metavar="N", help="GPUs of tensor parallelism (default: 1)"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=tuple(_KV_BYTES),
        default="bf16",
        help="dtype of K and V (default: bf16)",
    )
    parser.add_argument(
        "--base-ms",
        type=float,
        metavar="MS",
        help="time per token of one short request, if you measured it: in place of the modelled "
        "weights and layers (default: modelled)",
    )


def make_model(arguments: argparse.Namespace, queries: int) -> tuple[StepModel, str]:
    """The model of a step for batches of up to so many requests, and the machine in words.

    Raises InputError, or ValueError of ``Target``, that name the option, its value and the limit.
    """
    from sglang_pat import Target
    from sglang_pat.estimate.model import open_model
    from sglang_pat.estimate.requests import InputError
    from sglang_pat.estimate.shape import heads_of_rank
    from sglang_pat.estimate.step import StepModel
    from sglang_pat.gpus import machine_of

    try:
        machine = machine_of(arguments.gpu or DEFAULT_GPU)
    except ValueError as error:
        raise InputError(f"--gpu {error}") from None
    model = open_model(arguments.model or DEFAULT_MODEL)
    if arguments.layers is not None:
        model = replace(model, attention_layers=arguments.layers)
    if arguments.head_dim is not None:
        model = replace(model, head_dim=arguments.head_dim)
    tp = arguments.tp or 1
    model, q_heads, kv_heads = heads_of_rank(model, arguments.heads, tp)
    target = Target.gpu(
        machine,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=model.head_dim,
        max_queries=max(queries, 256),
        kv_bytes=_KV_BYTES[arguments.kv_dtype],
    )
    base_s = None if arguments.base_ms is None else arguments.base_ms / 1e3
    return StepModel(model, target, tp, base_s), f"{machine.name} with {target.num_sms} SMs"
