# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``sglang-pat explain``: its options, its machines, what it prints and writes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pat.explain.tree import DEFAULT_TREE, parse_tree
from sglang_pat.gpus import GPUS, machine_of

if TYPE_CHECKING:
    from sglang_pat import Plan, Target
    from sglang_pat.dump import Requests

_CPU_THREADS = 8
_LEAST_QUERIES = 256
# Options that say what is planned for: names, defaults, and what they mean.
_TARGET_OPTIONS: dict[str, tuple[Any, str]] = {
    "target": ("h200", f"the GPU to plan for ({', '.join(GPUS)}) or cpu"),
    "heads": ("32/8", "query and KV heads of one rank"),
    "head_dim": (128, "elements of a head; 576: latents of MLA, with --heads N/1"),
    "draft_tokens": (
        1,
        "tokens of a request that attend at once, the last of its sequence: more than 1 where "
        "speculative decoding verifies them",
    ),
    "kv_cache_dtype": ("auto", "of K and V: fp8_e4m3, or auto, 16 bits on a GPU and 32 on a CPU"),
    "sms": (None, f"SMs or threads that run items: the GPU's SMs, or {_CPU_THREADS} threads"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` the options of the subcommand."""
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--tree",
        metavar="SPEC",
        default=DEFAULT_TREE,
        help="the batch: a number is a request and counts its private tokens, TOKENS(...) is a "
        "prefix that the requests in parentheses share, COUNTx repeats what follows (default: "
        f"{DEFAULT_TREE}, three requests on a prefix of 512 tokens, two of which share 256 more)",
    )
    batch.add_argument(
        "--paths",
        type=Path,
        metavar="FILE",
        help="the batch out of a server's SGLANG_PAT_DUMP, planned for what the server planned "
        "for unless an option from --target on is given (default: --tree)",
    )
    parser.add_argument(
        "--batch", type=int, metavar="N", default=1, help="which batch of a dump (default: 1)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw to FILE, too (default: no)")
    add_target(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` the options that say what is planned for. They are None if not given."""
    for name, (default, meaning) in _TARGET_OPTIONS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=str if isinstance(default, str) else int,
            metavar=name.rpartition("_")[2].upper(),
            help=meaning if default is None else f"{meaning} (default: {default})",
        )


def run(arguments: argparse.Namespace) -> None:
    """Prints and draws the plan of the batch of the options. Raises OSError for a file that cannot
    be read or written, and ValueError that says what is wrong, which value it has and what would
    do."""
    from sglang_pat import plan
    from sglang_pat.explain.svg import write_svg

    requests, target, machine = _batch(arguments)
    made = plan(requests.paths, requests.seq_lens, target)
    sums = _sums(made, target, requests.seq_lens, machine)
    if arguments.svg is not None:
        drawn = write_svg(made, requests.seq_lens, sums)
        arguments.svg.write_text(drawn, encoding="utf-8")
    print(made, *sums, sep="\n")


def _sums(plan: Plan, target: Target, seq_lens: list[int], machine: str) -> list[str]:
    """What the plan reads, writes and takes, in lines; ``machine``: what it is made for, in
    words."""
    alone = sum(seq_lens)
    read = plan.kv_tokens_read(alone)
    token_bytes = target.num_kv_heads * target.token_values * target.kv_bytes
    rows = target.draft_tokens * target.num_q_heads
    partial_bytes = rows * (target.v_head_dim * target.partial_bytes + 4)
    return [
        f"planned for {machine}",
        f"K/V tokens read: {read:,} instead of {alone:,}, {alone / max(read, 1):.2f} x fewer, for "
        "each layer and KV head",
        f"K/V read: {read * token_bytes / 1e6:.1f} MB instead of {alone * token_bytes / 1e6:.1f}, "
        f"a layer; partial results: {plan.num_partials * partial_bytes / 1e6:.1f} MB written and "
        "read again",
        f"the plan takes {plan.nbytes:,} bytes; it holds while query 0 has "
        f"{plan.min_seq_lens[0]} to {plan.max_seq_lens[0]} tokens, and the others likewise",
    ]


def _batch(arguments: argparse.Namespace) -> tuple[Requests, Target, str]:
    """The batch of the options, and the target and machine that ``make_target`` says; of a dump
    without an option about these, what its server planned for."""
    from sglang_pat.dump import read_dump

    if arguments.paths is None:
        requests = parse_tree(arguments.tree)
        return requests, *make_target(arguments, len(requests.seq_lens))
    dump = read_dump(arguments.paths)
    if not 0 < arguments.batch <= len(dump.batches):
        raise ValueError(
            f"--batch is {arguments.batch}, {arguments.paths} has batches 1 to {len(dump.batches)}"
        )
    requests = dump.batches[arguments.batch - 1]
    if any(getattr(arguments, name) is not None for name in _TARGET_OPTIONS):
        return requests, *make_target(arguments, len(requests.seq_lens))
    target = dump.target
    device = dump.header.get("device", "unknown")
    machine = f"{device} with {target.num_sms} SMs or threads"
    return requests, target, f"{machine}, {_heads_of(target)}, as the server"


def _heads_of(target: Target) -> str:
    return f"{target.num_q_heads}/{target.num_kv_heads} heads of dim {target.head_dim}"


def make_target(arguments: argparse.Namespace, num_queries: int) -> tuple[Target, str]:
    """The target of the options and of a server's environment, and the machine in words.

    Raises ValueError that names the option, its value and what is allowed.
    """
    from sglang_pat import _C, Target
    from sglang_pat.config import PatConfig
    from sglang_pat.target import LATENT_DIMS

    config = PatConfig.from_env(os.environ)
    name, heads, head_dim, draft_tokens, kv_dtype, sms = (
        default if getattr(arguments, option) is None else getattr(arguments, option)
        for option, (default, _) in _TARGET_OPTIONS.items()
    )
    q_heads, _, kv_heads = heads.partition("/")
    if not (q_heads.isdecimal() and kv_heads.isdecimal() and int(kv_heads)):
        raise ValueError(f"--heads is {heads!r}, must be query heads / KV heads, as in 32/8")
    if kv_dtype not in ("auto", "fp8_e4m3"):
        raise ValueError(f"--kv-cache-dtype is {kv_dtype!r}, must be auto or fp8_e4m3")
    options: dict[str, Any] = {
        "num_q_heads": int(q_heads),
        "num_kv_heads": int(kv_heads),
        "head_dim": head_dim,
        "v_head_dim": LATENT_DIMS[1] if head_dim == LATENT_DIMS[0] else head_dim,
        "draft_tokens": draft_tokens,
        "max_queries": max(num_queries, _LEAST_QUERIES),
        "policy": config.policy,
        **({"kv_bytes": 1} if kv_dtype == "fp8_e4m3" else {}),
    }
    if name.lower() == "cpu":
        threads = _CPU_THREADS if sms is None else sms
        target = Target.cpu(threads=threads, **options)
        return target, f"a CPU with {threads} threads, {_heads_of(target)}"
    try:
        machine = machine_of(name)
    except ValueError as error:
        way_out = "plan for the cpu, or for another GPU take the nearest with --sms"
        raise ValueError(f"--target {error}; {way_out}") from None
    if head_dim not in (served := (*_C.CUDA_HEAD_DIMS, LATENT_DIMS[0])):
        dims = ", ".join(map(str, served))
        raise ValueError(f"--head-dim is {head_dim}, on a GPU pat serves {dims}: try --target cpu")
    target = Target.gpu(machine, **options, **({} if sms is None else {"num_sms": sms}))
    return target, f"{machine.name} with {target.num_sms} SMs, {_heads_of(target)}"
