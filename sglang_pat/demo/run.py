# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat demo``: eight conversations of a support desk (``desk``) at once, on a server with
``pat`` and on one with SGLang's own backend, side by side.

The answers are printed as they come, with the pack tree of the prompts and what was read. On a CPU
the servers compute in fp32, where both backends must choose the same tokens; on a GPU, in 16 bits,
they part at near-ties.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import metadata
from itertools import starmap, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from sglang_pat.demo.counters import Counters
from sglang_pat.demo.desk import CUSTOMERS, conversations
from sglang_pat.demo.server import Server, ServerError, own_device
from sglang_pat.demo.smollm2 import cache_folder
from sglang_pat.demo.standin import demo_model
from sglang_pat.srt.launch import reason_against_options

ANSWER = 48  # tokens, at most
_SENTENCE = re.compile(r"(?<=[.!?:])\s+|\n+")
_WORDS = 56  # characters of a node's text
_SLOWER = (
    "pat was slower here: one run each of a small model, one after the other, which any other load "
    "of the machine upsets. Packing and tokens are judged, not time."
)


class Run(NamedTuple):
    """One backend's answers to ``desk.CUSTOMERS``, as the texts of their tokens, and what they
    took: the seconds of all together, and the mean milliseconds per token after an answer's first.
    ``counters``: what pat counted meanwhile; all 0 on a stock backend."""

    backend: str
    answers: list[list[str]]
    seconds: float
    token_ms: float
    counters: Counters


def run_demo(model: str | None, cache: Path | None) -> int:
    """Run the demo on ``model``, a folder or a hub's name, or on ``standin.demo_model``; ``cache``:
    folder for the servers' logs. 0 if pat packed and, on a CPU, chose the same tokens, else 1.

    Raises ServerError, with the end of the log, if a server did not start or ended, and for a wrong
    option in the environment; OSError and ValueError for a model without a tokenizer that chats.
    """
    if reason := reason_against_options():  # pat's server would say so a minute later
        raise ServerError(reason)
    logs = cache or cache_folder() / "demo"
    device = own_device()
    print(", ".join(f"{each} {metadata.version(each)}" for each in ("sglang-pat", "sglang")))
    model = model or str(demo_model())
    print(
        f"{len(CUSTOMERS)} conversations at once, answers of at most {ANSWER} tokens, {model} on a "
        f"{device.upper()}; logs in {logs}\n\nThe pack tree of the prompts (a decode step reads "
        f"each line once):\n{tree_of_words(model)}\n",
        flush=True,
    )
    text, passed = report(_run_both(model, device, logs), exact=device == "cpu")
    print(text)
    return 0 if passed else 1


def tree_of_words(model: str) -> str:
    """The pack tree of the conversations as ``print(plan)`` draws it, with the beginning of each
    node's text, and the number of a query's conversation for its name."""
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
    requests = [Request(np.array(each), len(each), ANSWER) for each in prompts]
    drawn = str(plan(shared_paths(requests, 1), [len(each) + 1 for each in prompts], target))

    def with_words(line: re.Match[str]) -> str:
        start, end, query = (int(found) if found else None for found in line.groups()[1:])
        assert query is not None
        text = tokenizer.decode(prompts[query][start:end], skip_special_tokens=True)
        words = " ".join(text.split())
        return f"{line[0]:<52} {words[:_WORDS]}{'...' if len(words) > _WORDS else ''}"

    node = r"^( *)tokens \[(\d+), (?:(\d+)|end of sequence)\) of quer(?:y|ies) (\d+).*$"
    tree = drawn.partition("tree:\n")[2].partition("\nitems")[0]
    return re.sub(node, with_words, tree, flags=re.M)


def _run_both(model: str, device: str, logs: Path) -> list[Run]:
    """The runs of pat and of the stock backend. On a CPU a start takes most of a minute, so both
    servers start at once; one is measured while the other sleeps. A GPU has room for one."""
    # Without a bound the pool of K/V takes most of the memory.
    args = ["--max-total-tokens", "16384", *(["--dtype", "float32"] if device == "cpu" else [])]
    backends = ("pat", "torch_native" if device == "cpu" else None)  # None: SGLang's own choice
    servers = [
        Server(model, backend=name, device=device, log=logs / f"server-{label}.log", args=args)
        for name, label in zip(backends, ("pat", "stock"), strict=True)
    ]
    runs: list[Run] = []
    with ExitStack() as stack:
        for together in (servers,) if device == "cpu" else ([server] for server in servers):
            print(f"starting {len(together)} of 2 servers ...", flush=True)
            for server in together:  # pat first: what it refuses ends it at once
                stack.callback(server.stop)
                server.start()
            began = time.monotonic()
            for server in together:
                server.wait_until_ready()
                print(f"  ready after {time.monotonic() - began:.0f} s", flush=True)
            for server in together:
                runs.append(_measure(server, runs[0] if runs else None))
                server.stop()
    return runs


def _measure(server: Server, pat: Run | None) -> Run:
    """Ask a server all conversations at once. pat's answers are printed as they come, of those of a
    stock backend whether they are the same."""
    from httpx import HTTPError
    from openai import OpenAIError

    backend = server.get("/server_info")["attention_backend"] if pat else "pat"
    print(f"{backend} answers:", flush=True)
    for talk in conversations():  # cached then, as where a server has been up for a while
        asked = {"model": "default", "messages": talk, "max_tokens": 1}
        server.post("/v1/chat/completions", asked)
    before = server.counters()
    began = time.perf_counter()
    try:
        answers, token_s = zip(*asyncio.run(_ask_all(server.url, pat)), strict=True)
    except (OpenAIError, HTTPError):
        server.check_alive()  # with the end of its log, if that is why
        raise
    seconds = time.perf_counter() - began
    token_ms = 1e3 * statistics.fmean(token_s)
    return Run(backend, [*answers], seconds, token_ms, server.counters() - before)


async def _ask_all(url: str, pat: Run | None) -> list[tuple[list[str], float]]:
    """The tokens of each conversation's answer, and its seconds per token after the first."""
    from openai import AsyncOpenAI

    async def ask(number: int, messages: Any) -> tuple[list[str], float]:
        said: list[str] = []
        times: list[float] = []
        rest = ""
        stream = await client.chat.completions.create(
            model="default",
            messages=messages,
            temperature=0,
            max_tokens=ANSWER,
            stream=True,
            logprobs=True,  # they name the tokens
        )
        async for chunk in stream:
            for choice in chunk.choices:
                times.append(time.perf_counter())
                said += [each.token for each in (choice.logprobs and choice.logprobs.content) or ()]
                *whole, rest = _SENTENCE.split(rest + (choice.delta.content or ""))
                for sentence in filter(str.strip, () if pat else whole):
                    _print(number, sentence)
        if pat:
            same = said == pat.answers[number]
            _print(number, f"the same {len(said)} tokens" if same else f"other: {''.join(said)}")
        elif rest.strip():
            _print(number, rest)
        return said, (times[-1] - times[0]) / max(len(said) - 1, 1)

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        return await asyncio.gather(*starmap(ask, enumerate(conversations())))


def _print(number: int, text: str) -> None:
    """A line of a conversation: its number, as in the tree, and its customer."""
    print(f"  {number} {CUSTOMERS[number][0]:<6} {text}", flush=True)


def report(runs: Sequence[Run], *, exact: bool) -> tuple[str, bool]:
    """The runs of pat and of a stock backend side by side, what pat did, and the judgement, which
    is also given as a bool. ``exact``: whether all tokens must be equal."""
    pat, stock = runs
    counted = pat.counters
    steps = max(counted.decode_steps, 1)
    read, unpacked = counted.kv_tokens_read, counted.kv_tokens_unpacked
    rows = [
        ("seconds", stock.seconds, pat.seconds),
        ("ms per token after the first", stock.token_ms, pat.token_ms),
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
        f"steps packed: {counted.packed_steps} of {counted.decode_steps}; "
        f"{counted.plans_made} plans made, {counted.plans_reused} reused",
        f"tokens equal to {stock.backend}: {sum(tokens)} of {len(tokens)}, in "
        f"{sum(one == other for one, other in pairs)} of {len(pairs)} answers all",
        *([f"not served by pat: {counted.fallbacks}"] if counted.fallbacks else []),
        *([_SLOWER] if pat.token_ms > stock.token_ms else []),
        "PASSED" if passed else "FAILED",
    ]
    return "\n".join(lines), passed
