# SPDX-License-Identifier: Apache-2.0
"""The subcommand ``sglang-pat explain``: its options, its machines, what it prints and writes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pat.explain.requests import DEFAULT_TREE
from sglang_pat.explain.text import PARTS
from sglang_pat.gpus import GPUS, Machine, machine_of

if TYPE_CHECKING:
    from sglang_pat import Target
    from sglang_pat.dump import Requests


_TARGETS = (*GPUS, "cpu")
_CPU_THREADS = 8
_LEAST_QUERIES = 256
# Options that say what is planned for.
_OF_TARGET = ("target", "heads", "head_dim", "draft_tokens", "kv_cache_dtype", "sms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` the options of the subcommand."""
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--tree",
        metavar="SPEC",
        default=DEFAULT_TREE,
        help="the batch: a number is a request and counts its private tokens, TOKENS(...) is a "
        "prefix that the requests in parentheses share, COUNTx repeats what follows; or a tree of "
        f"the benchmarks, as 1,8,512_32,512,256 (default: {DEFAULT_TREE}, three requests on a "
        "prefix of 512 tokens, two of which share 256 more)",
    )
    batch.add_argument(
        "--paths",
        type=Path,
        metavar="FILE",
        help="the batch out of a server's SGLANG_PAT_DUMP (default: --tree)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="which batch of a dump, from 1 on (default: 1)",
    )
    add_target(parser)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw to FILE, too (default: no)")
    parser.add_argument(
        "--part",
        choices=("all", *PARTS),
        default="all",
        help="print one part only; structs are the plan's arrays as in csrc/plan.h, which all "
        "leaves out (default: all)",
    )
    parser.add_argument(
        "--lines",
        type=int,
        metavar="N",
        default=40,
        help="lines of each list that are printed, 0 for all (default: 40)",
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` the options that say what is planned for."""
    parser.add_argument(
        "--target",
        metavar="NAME",
        help=f"what to plan for: {', '.join(_TARGETS)} (default: h200; of a dump, with no option "
        "from here to --sms, what its server planned for)",
    )
    parser.add_argument(
        "--heads",
        metavar="Q/KV",
        help="query and KV heads of one rank (default: 32/8, or the dump's)",
    )
    parser.add_argument(
        "--head-dim",
        type=int,
        metavar="D",
        help="elements of a head (default: 128, or the dump's)",
    )
    parser.add_argument(
        "--draft-tokens",
        type=int,
        metavar="T",
        help="tokens of a request that attend at once, the last of its sequence: more than 1 where "
        "speculative decoding verifies them (default: 1, or the dump's)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8_e4m3"),
        help="of K and V, as of a server; auto is 16 bits on a GPU and 32 on a CPU (default: auto, "
        "or the dump's)",
    )
    parser.add_argument(
        "--sms",
        type=int,
        metavar="N",
        help=f"SMs or threads that run items (default: the GPU's SMs, {_CPU_THREADS} threads)",
    )


def run_explain(arguments: argparse.Namespace) -> int:
    """Explains the batch of the options; exit status 0, or 1 with a line that says what is wrong,
    which value it has and what would do."""
    try:
        said = _explained(arguments)
    except (ValueError, OSError) as error:
        print(f"sglang-pat explain: {error}", file=sys.stderr)
        return 1
    print(said)
    return 0


def _explained(arguments: argparse.Namespace) -> str:
    import sglang_pat
    from sglang_pat.explain.reading import explain
    from sglang_pat.explain.svg import write_svg
    from sglang_pat.explain.text import write_text

    if arguments.lines < 0:
        raise ValueError(f"--lines is {arguments.lines}, must be 0 (all) or more")
    requests, target, machine = _batch(arguments)
    plan = sglang_pat.plan(requests.paths, requests.seq_lens, target)
    found = explain(plan, requests, target)
    if arguments.svg is not None:
        arguments.svg.write_text(write_svg(found, machine), encoding="utf-8")
    return write_text(found, machine, arguments.lines, arguments.part)


def _batch(arguments: argparse.Namespace) -> tuple[Requests, Target, str]:
    """The batch of the options, and the target and machine that ``make_target`` says; of a dump
    without an option about these, what its server planned for."""
    from sglang_pat.dump import read_dump
    from sglang_pat.explain.requests import parse_tree

    if arguments.paths is None:
        if arguments.batch is not None:
            raise ValueError("--batch goes with a dump only: name one as --paths FILE")
        requests = parse_tree(arguments.tree)
        return requests, *make_target(arguments, len(requests.seq_lens))
    dump = read_dump(arguments.paths)
    number = 1 if arguments.batch is None else arguments.batch
    if not 0 < number <= len(dump.batches):
        raise ValueError(
            f"--batch is {number}, {arguments.paths} has batches 1 to {len(dump.batches)}"
        )
    requests = dump.batches[number - 1]
    if all(getattr(arguments, name) is None for name in _OF_TARGET):
        target, device = dump.target, dump.header.get("device", "unknown")
        return requests, target, f"{device} with {target.num_sms} SMs or threads, as the server"
    return requests, *make_target(_completed(arguments, dump.target), len(requests.seq_lens))


def _completed(arguments: argparse.Namespace, server: Target) -> argparse.Namespace:
    """Options with the heads, K/V and draft tokens of a server where they name no others."""
    defaults = {
        "heads": f"{server.num_q_heads}/{server.num_kv_heads}",
        "head_dim": server.head_dim,
        "kv_cache_dtype": "fp8_e4m3" if server.kv_bytes == 1 else "auto",
        "draft_tokens": server.draft_tokens,
    }
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    return argparse.Namespace(**{**vars(arguments), **defaults, **given})


def make_target(arguments: argparse.Namespace, num_queries: int) -> tuple[Target, str]:
    """The target of the options and of a server's environment, and the machine in words.

    Raises ValueError that names the option, its value and what is allowed.
    """
    from sglang_pat import Target
    from sglang_pat.config import PatConfig

    config = PatConfig.from_env(os.environ)
    name = arguments.target or "h200"
    machine = None if name.lower() == "cpu" else _gpu(name)
    num_q_heads, num_kv_heads = _heads("32/8" if arguments.heads is None else arguments.heads)
    head_dim = 128 if arguments.head_dim is None else arguments.head_dim
    draft_tokens = 1 if arguments.draft_tokens is None else arguments.draft_tokens
    for option, value, most in (
        ("--heads, query heads,", num_q_heads, 1024),
        ("--heads, KV heads,", num_kv_heads, 1024),
        ("--head-dim", head_dim, 1024),
        ("--draft-tokens", draft_tokens, 1024),
        ("--sms", arguments.sms, 65_536),
    ):
        if value is not None and not 0 < value <= most:
            raise ValueError(f"{option} is {value}, must be from 1 to {most:,}")
    options: dict[str, Any] = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "draft_tokens": draft_tokens,
        "max_queries": max(num_queries, _LEAST_QUERIES),
        "partial_bytes": config.partial_dtype.itemsize,
        "policy": config.policy,
    }
    if arguments.kv_cache_dtype == "fp8_e4m3":
        options["kv_bytes"] = 1
    if machine is None:
        threads = _CPU_THREADS if arguments.sms is None else arguments.sms
        target = Target.cpu(threads=threads, **options)
        return target, f"a CPU with {threads} threads"
    if arguments.sms is not None:
        options["num_sms"] = arguments.sms
    target = Target.gpu(machine, **options)
    return target, f"{machine.name} with {target.num_sms} SMs"


def _gpu(name: str) -> Machine:
    try:
        return machine_of(name)
    except ValueError as error:
        way_out = "plan for the cpu, or for another GPU take the nearest with --sms"
        raise ValueError(f"--target {error}; {way_out}") from None


def _heads(given: str) -> tuple[int, int]:
    q_heads, _, kv_heads = given.partition("/")
    if not (q_heads.isdecimal() and kv_heads.isdecimal()):
        raise ValueError(f"--heads is {given!r}, must be query heads / KV heads, as in 32/8")
    return int(q_heads), int(kv_heads)
