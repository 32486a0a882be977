# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat demo``: one workload on the stock backend and on ``pat``, side by side on a CPU.

Model and prompts are made here, so nothing is downloaded. Six agents work on four tasks each: all
prompts begin with the same tokens, those of an agent with more of them. Each conversation has two
turns, and the second prompt holds the first answer. In fp32 both must choose the same tokens.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from contextlib import ExitStack
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from sglang_pat.demo.counters import Counters
from sglang_pat.demo.model import make_model
from sglang_pat.demo.server import Server, ServerError
from sglang_pat.srt.launch import reason_against_options

VOCAB = 1024
MODEL: dict[str, Any] = {
    **{"hidden": 256, "layers": 4, "vocab": VOCAB, "seed": 1},
    **{"q_heads": 4, "kv_heads": 1, "head_dim": 128},
}
AGENTS, TASKS, TURNS = 6, 4, 2
# Tokens with which all prompts begin, those that an agent adds, those that a conversation adds, and
# those of its second question. Without packing a decode step takes two cores a tenth of a second.
COMMON, OF_AGENT, OF_TASK, OF_QUESTION = 1400, 120, 60, 50
ANSWER = 32  # tokens
_SEED = 9  # of the prompts: no step has a near-tie that rounding could turn round


class Run(NamedTuple):
    """One backend's pass through the workload: the tokens of all answers by turn and conversation,
    the seconds they took, and what pat counted meanwhile; all 0 on a stock backend."""

    backend: str
    tokens: list[int]
    seconds: float
    counters: Counters


def run_demo(cache: Path | None) -> int:
    """Run the demo; ``cache``: folder for the model and the servers' logs. 0 if the backends choose
    the same tokens and pat packed, else 1.

    Raises ServerError, with the end of the log, if a server did not start, and for a wrong option
    in the environment.
    """
    if reason := reason_against_options():  # pat's server would say so a minute later
        raise ServerError(reason)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = cache or Path(base) / "sglang_pat" / "demo"
    versions = (f"{each} {metadata.version(each)}" for each in ("sglang-pat", "sglang"))
    print(
        ", ".join(versions),
        f"{AGENTS * TASKS} conversations of {AGENTS} agents at once, {COMMON} common tokens, "
        f"{TURNS} answers of {ANSWER}; a Llama of {MODEL['layers']} layers with random weights, "
        f"fp32, on a CPU; logs in {cache}",
        sep="\n",
        flush=True,
    )
    pat, stock = _run_both(make_model(cache / "model", **MODEL), cache)
    text, passed = report(pat, stock)
    print(text)
    return 0 if passed else 1


def _run_both(model: Path, logs: Path) -> list[Run]:
    """The runs of pat and of torch_native. A start takes a minute, so both servers start at once;
    one is measured while the other sleeps."""
    # Room for 24 contexts of 1,700 tokens, so that no request is retracted.
    args = ["--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", "65536"]
    servers = {
        name: Server(model, backend=name, device="cpu", log=logs / f"server-{name}.log", args=args)
        for name in ("pat", "torch_native")  # pat first: what it refuses ends it at once
    }
    runs = []
    print("starting 2 servers ...", flush=True)
    with ExitStack() as stack:
        for server in servers.values():
            stack.callback(server.stop)
            server.start()
        for server in servers.values():
            server.wait_until_ready()
        for name, server in servers.items():
            runs.append(_measure(name, server))
            server.stop()
    return runs


def _measure(backend: str, server: Server) -> Run:
    rng = random.Random(_SEED)

    def some(count: int) -> list[int]:
        return rng.choices(range(1, VOCAB), k=count)

    def ask(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        answers = server.post("/generate", {"input_ids": prompts, "sampling_params": greedy})
        return [answer["output_ids"] for answer in answers]

    print(f"asking {backend} ...", flush=True)
    common = some(COMMON)
    agents = [common + some(OF_AGENT) for _ in range(AGENTS)]
    prompts = [agents[n % AGENTS] + some(OF_TASK) for n in range(AGENTS * TASKS)]
    question = some(OF_QUESTION)
    ask([common], 1)  # cached, as where a server has been up for a while
    before = server.counters()
    tokens: list[int] = []
    began = time.perf_counter()
    for _ in range(TURNS):
        turn = ask(prompts, ANSWER)
        tokens += chain(*turn)
        prompts = [[*old, *said, *question] for old, said in zip(prompts, turn, strict=True)]
    seconds = time.perf_counter() - began
    server.check_alive()
    return Run(backend, tokens, seconds, server.counters() - before)


def report(pat: Run, stock: Run) -> tuple[str, bool]:
    """The two runs side by side, what pat did, and the judgement, which is also given as a bool."""
    counted = pat.counters
    steps = max(counted.decode_steps, 1)
    read, unpacked = counted.kv_tokens_read, counted.kv_tokens_unpacked
    equal = statistics.fmean(a == b for a, b in zip(pat.tokens, stock.tokens, strict=True))
    rows = [
        ("seconds", stock.seconds, pat.seconds),
        ("output tokens per second", *(len(run.tokens) / run.seconds for run in (stock, pat))),
        ("K/V tokens read per decode step", unpacked / steps, read / steps),
    ]
    passed = equal == 1 and counted.packed_steps > 0
    lines = [
        f"{'':<36}{stock.backend:>14}{pat.backend:>14}",
        *(f"{name:<36}{other:>14,.1f}{mine:>14,.1f}" for name, other, mine in rows),
        f"K/V reads saved: {1 - read / unpacked if unpacked else 0:.0%}",
        f"steps packed: {counted.packed_steps} of {counted.decode_steps}; "
        f"{counted.plans_made} plans made, {counted.plans_reused} reused",
        f"tokens equal to {stock.backend}: {equal:.1%}",
        *([f"not served by pat: {counted.fallbacks}"] if counted.fallbacks else []),
        "PASSED" if passed else "FAILED",
    ]
    return "\n".join(lines), passed
