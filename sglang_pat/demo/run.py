# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat demo``: eight conversations of a support desk (``desk``) at once, on a server with
``pat`` and on one with SGLang's own backend, side by side.

On a CPU the servers compute in fp32, where both backends must choose the same tokens; on a GPU, in
16 bits, they part at near-ties.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from sglang_pat.demo.counters import Counters
from sglang_pat.demo.desk import CUSTOMERS, conversations
from sglang_pat.demo.server import Server, ServerError, own_device
from sglang_pat.demo.smollm2 import cache_folder, model_folder
from sglang_pat.srt.launch import reason_against_options

ANSWER = 48  # tokens, at most


class Run(NamedTuple):
    """One backend's answers to ``desk.CUSTOMERS``, as the texts of their tokens, and what they
    took: the seconds of all together, and the mean milliseconds of a token. ``counters``: what pat
    counted meanwhile; all 0 on a stock backend."""

    backend: str
    answers: list[list[str]]
    seconds: float
    token_ms: float
    counters: Counters


def run_demo(model: str | None) -> int:
    """Run the demo on ``model``, a folder or a hub's name, or on SmolLM2. 0 if pat packed and, on a
    CPU, chose the same tokens, else 1.

    Raises ServerError, with the end of the log, if a server did not start or ended, and for a wrong
    option in the environment; NoPackage without SmolLM2; OSError and ValueError for a model without
    a tokenizer that chats.
    """
    if reason := reason_against_options():  # pat's server would say so a minute later
        raise ServerError(reason)
    model, device = model or str(model_folder()), own_device()
    print(
        f"sglang-pat {metadata.version('sglang-pat')}, sglang {metadata.version('sglang')}\n"
        f"{len(CUSTOMERS)} conversations at once, answers of at most {ANSWER} tokens, {model} on a "
        f"{device.upper()}; logs in {_logs()}\n\nThe pack tree of the prompts (a decode step reads "
        f"each line once):\n{pack_tree(model)}\n",
        flush=True,
    )
    text, passed = report(_run_both(model, device), exact=device == "cpu")
    print(text)
    return 0 if passed else 1


def _logs() -> Path:
    return cache_folder() / "demo"


def pack_tree(model: str) -> str:
    """The pack tree of the conversations as ``print(plan)`` draws it."""
    import numpy as np
    from transformers import AutoTokenizer

    from sglang_pat import Target, plan
    from sglang_pat.estimate import Request, shared_paths

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=False)
        for each in conversations()
    ]
    # The tree depends on the prompts alone, so any heads do.
    target = Target.cpu(threads=2, max_queries=256, num_q_heads=9, num_kv_heads=3, head_dim=64)
    paths = shared_paths([Request(np.array(each), len(each), ANSWER) for each in prompts], 1)
    drawn = str(plan(paths, [len(each) + 1 for each in prompts], target))
    return drawn.partition("tree:\n")[2].partition("\nitems")[0]


def _run_both(model: str, device: str) -> list[Run]:
    """The runs of pat and of the stock backend. On a CPU a start takes most of a minute, so both
    servers start at once; one is measured while the other sleeps. A GPU has room for one."""
    # Without a bound the pool of K/V takes most of the memory.
    args = ["--max-total-tokens", "16384", *(["--dtype", "float32"] if device == "cpu" else [])]
    backends = ("pat", "torch_native" if device == "cpu" else None)  # None: SGLang's own choice
    servers = [
        Server(model, backend=name, device=device, log=_logs() / f"server-{label}.log", args=args)
        for name, label in zip(backends, ("pat", "stock"), strict=True)
    ]
    runs: list[Run] = []
    with ExitStack() as stack:
        for together in (servers,) if device == "cpu" else ([server] for server in servers):
            print(f"starting {len(together)} of 2 servers ...", flush=True)
            for server in together:  # pat first: what it refuses ends it at once
                stack.callback(server.stop)
                server.start()
            for server in together:
                server.wait_until_ready()
            for server in together:
                runs.append(_measure(server, runs[0] if runs else None))
                server.stop()
    return runs


def _measure(server: Server, pat: Run | None) -> Run:
    """Ask a server all conversations at once. Of pat the answers are printed as they come, of a
    stock backend whether they are the same."""
    backend = server.get("/server_info")["attention_backend"] if pat else "pat"
    print(f"{backend} answers:", flush=True)
    asked = [{"model": "default", "messages": talk, "temperature": 0} for talk in conversations()]

    def ask(number: int) -> tuple[list[str], float]:
        began = time.perf_counter()
        # With log-probabilities come the tokens.
        more = {"max_tokens": ANSWER, "logprobs": True}
        (choice,) = server.post("/v1/chat/completions", asked[number] | more)["choices"]
        took = time.perf_counter() - began
        tokens = [each["token"] for each in choice["logprobs"]["content"]]
        text = " ".join(choice["message"]["content"].split())
        if pat:
            same = tokens == pat.answers[number]
            text = f"the same {len(tokens)} tokens" if same else f"other: {text}"
        print(f"  {number} {CUSTOMERS[number][0]:<6} {text}", flush=True)
        return tokens, took / len(tokens)

    try:
        for one in asked:  # cached then, as where a server has been up for a while
            server.post("/v1/chat/completions", one | {"max_tokens": 1})
        before, began = server.counters(), time.perf_counter()
        with ThreadPoolExecutor(len(asked)) as pool:
            answers, token_s = zip(*pool.map(ask, range(len(asked))), strict=True)
        seconds = time.perf_counter() - began
        counted = server.counters() - before
    except OSError:
        server.check_alive()  # with the end of its log, if that is why
        raise
    return Run(backend, [*answers], seconds, 1e3 * statistics.fmean(token_s), counted)


def report(runs: Sequence[Run], *, exact: bool) -> tuple[str, bool]:
    """The runs of pat and of a stock backend side by side, what pat did, and the judgement, which
    is also given as a bool. ``exact``: whether all tokens must be equal."""
    pat, stock = runs
    counted = pat.counters
    steps = max(counted.decode_steps, 1)
    read, unpacked = counted.kv_tokens_read, counted.kv_tokens_unpacked
    rows = [
        ("seconds (one run of a small model)", stock.seconds, pat.seconds),
        ("ms per token", stock.token_ms, pat.token_ms),
        ("K/V tokens read per decode step", unpacked / steps, read / steps),
    ]
    pairs = list(zip(pat.answers, stock.answers, strict=True))
    tokens = [one == other for both in pairs for one, other in zip_longest(*both)]
    packed = counted.packed_steps > 0
    passed = packed and (all(tokens) or not exact)
    lines = [
        f"\n{'':<36}{stock.backend:>14}{pat.backend:>14}",
        *(f"{name:<36}{other:>14,.1f}{mine:>14,.1f}" for name, other, mine in rows),
        f"K/V reads saved: {1 - read / unpacked if unpacked else 0:.0%}",
        f"steps packed: {counted.packed_steps} of {counted.decode_steps}",
        f"tokens equal to {stock.backend}: {sum(tokens)} of {len(tokens)}, in "
        f"{sum(one == other for one, other in pairs)} of {len(pairs)} answers all",
        *([f"not served by pat: {counted.fallbacks}"] if counted.fallbacks else []),
        "PASSED" if passed else "FAILED",
    ]
    return "\n".join(lines), passed
