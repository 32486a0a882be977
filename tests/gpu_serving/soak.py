# SPDX-License-Identifier: Apache-2.0
"""Hours of traffic in minutes: ``python -m gpu_serving.soak --device cuda`` in tests/.

Two servers at the same time, with and without the radix cache, both with ``SGLANG_PAT_CHECK=1`` and
a pool too small for their traffic: requests join, share, branch, are aborted and retracted. Fails,
with a JSON summary of what was found, unless everything sent was answered right, the counters add
up and no memory grew after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serving.server import Config, ServingServer
from serving.workloads import VOCAB, random_prompt

from sglang_pat.demo.model import make_model

from . import footprint, traffic

MIB = 1 << 20
# Free greedy answers to equal prompts agree but for near-ties; a wrong slot leaves nothing alike.
# Drafts bring more near-ties, as batches differ more: 0.67 on an H200, with no radix cache 0.80.
MIN_REPEATED_EQUAL = {"cpu": 0.999, "cuda": 0.7}


@dataclass(frozen=True)
class Scale:
    """How much: per server ``clients``; in all at least ``steps`` decode steps and ``requests``."""

    seconds: float
    warm_up: float  # seconds of these, in which whatever runs for the first time may take memory
    clients: int
    pool: int  # tokens of a server's K/V cache
    longest: int  # tokens of the longest system prompt
    new_tokens: int
    steps: int
    requests: int
    growth: int  # bytes that may be held more than after the warm-up


SCALES = {
    "cpu": Scale(40, 4, 8, 1200, 500, 90, steps=300, requests=60, growth=32 * MIB),
    "cuda": Scale(300, 30, 24, 5000, 1500, 120, steps=20_000, requests=5_000, growth=16 * MIB),
}
BATCH = 64  # the most requests that a server runs at once
# Of servers that speculate: draft tokens of a request, and the top k of the draft model. With trees
# the servers prefill with FlashInfer, which may compile for minutes before they are ready.
DRAFTS = {"chains": (4, 1), "trees": (8, 4)}
MODELS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32"},
    "cuda": {"dtype": "bfloat16", "hidden": 512, "layers": 2, "head_dim": 128},
}


def soak(device: str, scale: Scale, folder: Path, *, drafts: str = "") -> dict[str, Any]:
    """Run the traffic; the summary, with what was wrong under ``failures``. ``drafts``: a key of
    ``DRAFTS``; the servers speculate with such drafts, which are mostly right."""
    model = make_model(folder / "model", vocab=VOCAB, **MODELS[device])
    args = ("--max-total-tokens", str(scale.pool), "--schedule-conservativeness", "0.05")
    tokens_a_step, top_k = DRAFTS.get(drafts, (1, 1))  # of a request, at most; of the drafts
    if drafts:
        args += (
            *("--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "3"),
            *("--speculative-draft-model-path", str(model)),
            *("--speculative-eagle-topk", str(top_k)),
            *("--speculative-num-draft-tokens", str(tokens_a_step)),
            *("--decode-log-interval", "4"),  # steps; see _launch_all_moves
        )
    configs = [
        Config("radix", args=args, device=device),
        Config("no-radix", args=(*args, "--disable-radix-cache"), device=device),
    ]
    with ExitStack() as stack:
        servers = [ServingServer(model, config, folder / config.name) for config in configs]
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_until_ready()
            if top_k > 1:
                _launch_all_moves(server)
        ledgers = [traffic.Ledger(tokens_a_step) for _ in servers]
        began = time.monotonic()
        before = _held_after(scale, scale.warm_up, servers, ledgers, device, first_seed=0)
        rest = scale.seconds - scale.warm_up
        after = _held_after(scale, rest, servers, ledgers, device, first_seed=scale.clients)
        seconds = time.monotonic() - began
        rows = {
            config.name: _row(server, ledger)
            for config, server, ledger in zip(configs, servers, ledgers, strict=True)
        }
    summary: dict[str, Any] = {"device": device, "seconds": round(seconds, 1), "servers": rows}
    summary["held_mib"] = {
        name: [round(held[name] / MIB, 1) for held in (before, after)] for name in before
    }
    summary["steps"] = sum(row["decode_steps"] for row in rows.values())
    summary["requests"] = sum(row["requests"] for row in rows.values())
    summary["failures"] = [
        *(
            f"{name}: {wrong}"
            for name, row in rows.items()
            for wrong in _wrong_with(name, row, device, tokens_a_step)
        ),
        *(
            f"{name} grew from {before[name]} to {after[name]} bytes"
            for name in before
            if after[name] - before[name] > scale.growth
        ),
    ]
    for name, least in (("steps", scale.steps // tokens_a_step), ("requests", scale.requests)):
        if summary[name] < least:
            summary["failures"].append(f"{summary[name]} {name}, want {least}")
    return summary


def _launch_all_moves(server: ServingServer) -> None:
    """Have a server that drafts trees move the K/V of a full batch's accepted drafts.

    SGLang's kernel for that (``copy_all_layer_kv_cache_tiled``) is compiled for powers of two of
    requests x tokens. From its first launch on the one for 256 holds 10,448 bytes of local memory
    for each thread, 2,430 MiB of an H200, and more than 32 requests at once come sooner or later.
    """
    prompts = [random_prompt(seed=seed, length=16) for seed in range(BATCH)]
    server.generate(prompts, 48)  # a dozen steps or more, so that some are logged
    running = [int(count) for count in re.findall(r"#running-req: (\d+)", server.text())]
    assert max(running, default=0) > 32, f"at most {max(running, default=0)} requests ran at once"


def _held_after(
    scale: Scale,
    seconds: float,
    servers: list[ServingServer],
    ledgers: list[traffic.Ledger],
    device: str,
    *,
    first_seed: int,
) -> dict[str, int]:
    """Bytes held after so much more traffic, by what holds them.

    Servers are idle and flushed then: what torch's allocator keeps for the next large prefill says
    nothing, and a flush gives it back.
    """
    stopping = threading.Event()
    size = {"longest": scale.longest, "new_tokens": scale.new_tokens}
    with ThreadPoolExecutor(len(servers) * scale.clients) as pool:
        clients = [
            pool.submit(traffic.send_all, server, traffic.Mix(seed, **size), ledger, stopping)
            for server, ledger in zip(servers, ledgers, strict=True)
            for seed in range(first_seed, first_seed + scale.clients)
        ]
        wait(clients, timeout=seconds, return_when=FIRST_EXCEPTION)
        stopping.set()
    for client in clients:
        client.result()  # raises what it failed with
    for server in servers:
        server.post("/flush_cache?timeout=30")
    held = {
        f"scheduler {server.log.parent.name}": footprint.scheduler_bytes(server.pid)
        for server in servers
    }
    return held | ({"device": footprint.device_bytes()} if device == "cuda" else {})


def _row(server: ServingServer, ledger: traffic.Ledger) -> dict[str, Any]:
    server.check_alive()
    log = server.text()
    return {
        **ledger.counts,
        "wrong": ledger.wrong,
        "kv_tokens_answered": ledger.kv_tokens,
        **vars(server.counters()),
        "retractions": len(re.findall(r"#retracted|[Rr]etract requests", log)),
        "tracebacks": log.count("Traceback (most recent call last)"),
    }


def _wrong_with(name: str, row: dict[str, Any], device: str, tokens_a_step: int) -> Iterator[str]:
    """What is wrong with a server's row."""
    equal = row.get("repeated tokens equal", 0) / max(row.get("repeated tokens", 0), 1)
    least = MIN_REPEATED_EQUAL[device] - (0.1 if tokens_a_step > 1 else 0.0)
    yield from row["wrong"]
    if not row.get("finished by abort", 0):
        yield "nothing was aborted"
    if not row["retractions"]:
        yield "nothing was retracted"
    if row["tracebacks"]:
        yield "there is a traceback in the log"
    if equal < least:
        yield f"only {equal:.4f} of the tokens after equal prompts are equal"
    yield from _wrong_counters(name, row, tokens_a_step)


def _wrong_counters(name: str, row: dict[str, Any], tokens_a_step: int) -> Iterator[str]:
    """What a server counted that does not fit what it answered."""
    steps, packed = row["decode_steps"], row["packed_steps"]
    read, unpacked = row["kv_tokens_read"], row["kv_tokens_unpacked"]
    if row["plans_made"] + row["plans_reused"] != steps:
        yield f"{row['plans_made']} plans made and {row['plans_reused']} reused in {steps} steps"
    if row["verify_steps"] != (steps if tokens_a_step > 1 else 0):
        yield f"{row['verify_steps']} of {steps} steps verified drafts"
    # A retracted request's tokens are prefilled again, so a few were not decoded.
    least = 0.9 * row["kv_tokens_answered"] / tokens_a_step
    if unpacked < least:
        yield f"{unpacked} K/V tokens, the answers need {least}"
    if name == "radix":
        if not (0 < packed <= steps and read < unpacked):
            yield f"{packed} of {steps} steps packed, {read} of {unpacked} K/V tokens read"
    elif packed or read != unpacked:
        yield f"{packed} steps packed without a radix cache, {read} of {unpacked} K/V tokens read"
    if row["fallbacks"]:
        yield f"not served by pat: {row['fallbacks']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(SCALES), required=True)
    parser.add_argument("--seconds", type=float, help="of traffic, twice the warm-up or more")
    parser.add_argument("--drafts", nargs="?", const="trees", default="", choices=sorted(DRAFTS))
    parser.add_argument("--json", type=Path, help="where to write the summary, too")
    parser.add_argument("--logs", type=Path, help="folder for the model and the servers' logs")
    options = parser.parse_args()
    scale = SCALES[options.device]
    scale = replace(scale, seconds=options.seconds or scale.seconds)
    if scale.seconds < 2 * scale.warm_up:
        parser.error(f"--seconds is {scale.seconds:g}, must be {2 * scale.warm_up:g} or more")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        summary = soak(options.device, scale, folder, drafts=options.drafts)
    text = json.dumps(summary)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
