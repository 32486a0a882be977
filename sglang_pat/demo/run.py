# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat demo``: one workload on the stock backend and on ``pat``, side by side.

Model and prompts are made here, so nothing is downloaded. Six agents work on four tasks each, or on
several parts of each: all prompts begin with the same tokens, those of an agent with more of them.
Each conversation has two turns, and the second prompt holds the first answer.

In fp32, on a CPU, both must choose the same tokens. In bf16, on a GPU, rounding may flip a
near-tie, so log-probabilities are compared, of each answer up to the first token that differs.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from sglang_pat.demo.counters import Counters
from sglang_pat.demo.model import make_model
from sglang_pat.demo.server import Server, ServerError, default_device
from sglang_pat.srt.launch import reason_against_options

VOCAB = 1024
AGENTS, TASKS, TURNS = 6, 4, 2
# Tokens that an agent adds to the common ones, those that a conversation adds, and those of its
# second question.
OF_AGENT, OF_TASK, OF_QUESTION = 120, 60, 50
_LIKELIEST = 8  # tokens of each step whose log-probabilities are asked for
_SEED = 9  # of the prompts: on a CPU no step has a near-tie that rounding could turn round
# Bounds on differences of log-probabilities, in natural-log units. In fp32 rounding explains them
# for these models, whose sharp attention amplifies it: 2e-5 at most was measured on a CPU.
MAX_LOGPROB_DIFF_FP32 = 2e-3
# In bf16 they depend on the model. On the one of four layers bf16 itself differs from fp32 by 0.039
# on average and 0.24 at most (transformers, 512 random tokens, on a CPU), two correct backends by
# less; the right tokens after another agent's prompt differ by 2.2.
MEAN_LOGPROB_DIFF_BF16 = 0.04
MAX_LOGPROB_DIFF_BF16 = 0.3


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a demo.

    ``parts``: conversations for each task. ``apart``: compare answers of another pass, of one part
    and so many tokens, which also warms the server up; the timed pass then asks for no
    log-probabilities, whose host time is paid by no user without them. None: compare the timed one.
    ``mean_diff``, ``max_diff``: of log-probabilities in bf16.
    """

    dtype: str
    model: dict[str, Any]  # arguments of make_model
    kv_tokens: int  # K/V pool of either server
    common: int  # tokens with which all prompts begin
    parts: int
    answer: int  # tokens
    apart: int | None = None
    mean_diff: float = MEAN_LOGPROB_DIFF_BF16
    max_diff: float = MAX_LOGPROB_DIFF_BF16

    @property
    def conversations(self) -> int:
        return AGENTS * TASKS * self.parts

    def __str__(self) -> str:
        return (
            f"{self.conversations} conversations of {AGENTS} agents at once, {self.common} common "
            f"tokens, answers of {self.answer}; llama {{layers}} x {{hidden}}, {{q_heads}}/"
            f"{{kv_heads}} heads of {{head_dim}}, random weights, {self.dtype}"
        ).format(**self.model)


_HEADS = {"head_dim": 128, "vocab": VOCAB}
SCALES = {
    # Two cores: a decode step of 24 requests takes a tenth of a second without packing. The pool
    # holds 24 contexts of 1,700 tokens with room to spare, so that no request is retracted.
    "cpu": Scale(
        dtype="float32",
        model={"hidden": 256, "layers": 4, "q_heads": 4, "kv_heads": 1, "seed": 1, **_HEADS},
        kv_tokens=65_536,
        common=1400,
        parts=1,
        answer=32,
    ),
    # A decode step must be made of attention's K/V reads, or it shows SGLang's host time alone. K/V
    # of a token take 64 KiB, so the stock reads 144 x 5,000 x 64 KiB = 47 GB a step: 10 ms at the
    # 4.8 TB/s of an H200; pat reads 5 GB. The weights are 0.44 GB, the pool 12.9 GB, of which 4,400
    # + 144 x 1,000 tokens are needed. With answers of 128 tokens half of the time was prefill.
    # The bounds: pat differed from FA3 by 0.025 on average and 0.16 at most, FA3 from itself in
    # other batches by 0.004 and 0.12 (H100, 2026-11-22).
    "cuda": Scale(
        dtype="bfloat16",
        model={"hidden": 1024, "layers": 8, "q_heads": 64, "kv_heads": 16, **_HEADS},
        kv_tokens=196_608,
        common=4400,
        parts=6,
        answer=384,
        apart=128,
        mean_diff=0.06,
        max_diff=0.5,
    ),
}


class Generation(NamedTuple):
    """One answer. ``likeliest``: of each step the log-probabilities (natural logarithm) of the
    likeliest tokens, the one chosen first; empty where they were not asked for."""

    prompt: list[int]
    tokens: list[int]
    likeliest: list[dict[int, float]]
    tpot_s: float  # seconds per output token after the first


class Run(NamedTuple):
    """One backend's pass through the workload: what was timed, and what is compared."""

    backend: str
    timed: list[Generation]
    compared: list[Generation]
    seconds: float
    counters: Counters  # of the timed pass; all 0 on a stock backend

    @property
    def tpot_ms(self) -> float:
        return 1000 * statistics.median(each.tpot_s for each in self.timed)

    @property
    def tokens_per_s(self) -> float:
        return sum(len(each.tokens) for each in self.timed) / self.seconds


class Agreement(NamedTuple):
    """``max_diff`` and ``mean_diff`` of the log-probabilities that both backends give to the
    stock's tokens: NaN if one is NaN, infinite if pat has it not among its likeliest tokens.
    ``least_margin``: by how much the stock's tokens lead the next best, at least."""

    token_match_rate: float  # share of positions with the same token, 0 to 1
    max_diff: float
    mean_diff: float
    least_margin: float

    def passes(self, scale: Scale) -> bool:
        """Whether no more than rounding keeps the two apart; false for NaN."""
        if scale.dtype == "float32":
            return self.token_match_rate == 1 and self.max_diff <= MAX_LOGPROB_DIFF_FP32
        return self.max_diff <= scale.max_diff and self.mean_diff <= scale.mean_diff


def compare(pat: Sequence[Generation], stock: Sequence[Generation]) -> Agreement:
    """Agreement of two runs. An answer counts up to and with its first other token, as what follows
    has another context; not at all after another prompt."""
    equal: list[bool] = []
    diffs: list[float] = []
    for ours, theirs in zip(pat, stock, strict=True):
        same = [a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
        equal += same
        if ours.prompt != theirs.prompt:  # an earlier turn differed
            continue
        end = same.index(False) + 1 if False in same else len(same)
        for token, mine, other in zip(
            theirs.tokens[:end], ours.likeliest[:end], theirs.likeliest[:end], strict=True
        ):
            diffs.append(abs(mine.get(token, -math.inf) - other[token]))
    largest = math.nan if any(map(math.isnan, diffs)) else max(diffs)  # max() passes over a NaN
    margins = (
        first - max(others)
        for theirs in stock
        for first, *others in map(dict.values, theirs.likeliest)
    )
    return Agreement(statistics.fmean(equal), largest, statistics.fmean(diffs), min(margins))


def run_workload(server: Server, scale: Scale, *, logprobs: bool) -> tuple[list[Generation], float]:
    """The answers by turn and conversation, and the seconds of all turns together."""
    rng = random.Random(_SEED)

    def some(count: int) -> list[int]:
        return rng.choices(range(1, VOCAB), k=count)

    common = some(scale.common)
    agents = [common + some(OF_AGENT) for _ in range(AGENTS)]
    prompts = [agents[n % AGENTS] + some(OF_TASK) for n in range(scale.conversations)]
    question = some(OF_QUESTION)
    _ask(server, [common], 1, logprobs=False)  # cached, as where a server has been up for a while
    answers, seconds = [], 0.0
    for _ in range(TURNS):
        began = time.perf_counter()
        turn = _ask(server, prompts, scale.answer, logprobs=logprobs)
        seconds += time.perf_counter() - began
        answers += turn
        prompts = [[*each.prompt, *each.tokens, *question] for each in turn]
    return answers, seconds


def _ask(
    server: Server, prompts: list[list[int]], tokens: int, *, logprobs: bool
) -> list[Generation]:
    """Greedy answers to all prompts, sent at once."""
    asked = {"return_logprob": True, "top_logprobs_num": _LIKELIEST} if logprobs else {}
    greedy = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": greedy, **asked}
    return [
        Generation(
            prompt,
            answer["output_ids"],
            [
                {token: math.nan if logprob is None else logprob for logprob, token, _ in step}
                for step in answer["meta_info"].get("output_top_logprobs", ())
            ],
            1 / answer["meta_info"].get("decode_throughput", math.inf),
        )
        for prompt, answer in zip(prompts, server.post("/generate", body), strict=True)
    ]


def run_demo(device: str, cache: Path | None) -> int:
    """Run the demo on ``device``, cpu, cuda or auto; ``cache``: folder for the model and the
    servers' logs. 0 if the backends agree and pat packed.

    Raises ServerError, with the end of the log, if a server did not start, if there is no GPU for
    cuda, and for a wrong option in the environment.
    """
    if reason := reason_against_options():  # pat's server would say so a minute later
        raise ServerError(reason)
    device = default_device() if device == "auto" else device
    name = _device_name(device)
    scale = SCALES[device]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = cache or Path(base) / "sglang_pat" / "demo"
    versions = (f"{each} {metadata.version(each)}" for each in ("sglang-pat", "sglang"))
    print(", ".join(versions), name, scale, f"logs in {cache}", sep="\n", flush=True)
    model = make_model(cache / f"model-{device}", dtype=scale.dtype, **scale.model)
    pat, stock = run_both(model, scale, device, cache)
    agreed = compare(pat.compared, stock.compared)
    passed = agreed.passes(scale) and pat.counters.packed_steps > 0
    print(report(pat, stock, agreed), "PASSED" if passed else "FAILED", sep="\n")
    return 0 if passed else 1


def _device_name(device: str) -> str:
    import torch

    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        raise ServerError(
            f"--device cuda: there is no CUDA device that torch {torch.__version__} can use; leave "
            "the option out or give cpu"
        )
    return torch.cuda.get_device_name(0)


def run_both(model: Path, scale: Scale, device: str, logs: Path) -> list[Run]:
    """The runs of pat and of SGLang's own choice of a backend, of torch_native on a CPU.

    On a CPU both servers start at once, as a start takes a minute; on a GPU the two pools might not
    fit beside each other. One is measured while the other sleeps.
    """
    args = ["--skip-tokenizer-init", "--dtype", scale.dtype]
    args += ["--max-total-tokens", str(scale.kv_tokens)]
    if scale.dtype != "float32":
        args.append("--enable-fp32-lm-head")  # leaves attention as the main thing that rounds
    ours, stock = (  # pat first: what it refuses ends it at once
        Server(model, backend=backend, device=device, log=logs / f"server-{name}.log", args=args)
        for name, backend in (
            ("pat", "pat"),
            ("stock", "torch_native" if device == "cpu" else None),
        )
    )
    runs = []
    with contextlib.ExitStack() as servers:
        for group in [[ours, stock]] if device == "cpu" else [[ours], [stock]]:
            print(f"starting {len(group)} server{'s'[: len(group) - 1]} ...", flush=True)
            for server in group:
                servers.callback(server.stop)
                server.start()
            for server in group:
                server.wait_until_ready()
            for server in group:
                runs.append(measure(server, scale))
                server.stop()
    return runs


def measure(server: Server, scale: Scale) -> Run:
    """Run the workload on a server that is ready."""
    backend = server.get("/server_info")["attention_backend"]
    print(f"asking {backend} ...", flush=True)
    compared: list[Generation] = []
    if scale.apart is not None:
        small = replace(scale, parts=1, answer=scale.apart)
        compared, _ = run_workload(server, small, logprobs=True)
        server.post("/flush_cache?timeout=30")  # waits until the server is idle
    before = server.counters()
    timed, seconds = run_workload(server, scale, logprobs=scale.apart is None)
    server.check_alive()
    return Run(backend, timed, compared or timed, seconds, server.counters() - before)


def report(pat: Run, stock: Run, agreed: Agreement) -> str:
    """The two runs side by side, then what pat did and whether they agree."""
    counted = pat.counters
    steps = max(counted.decode_steps, 1)
    read, unpacked = counted.kv_tokens_read, counted.kv_tokens_unpacked
    rows = [
        ("time per output token, median, ms", stock.tpot_ms, pat.tpot_ms),
        ("output tokens per second", stock.tokens_per_s, pat.tokens_per_s),
        ("total time, s", stock.seconds, pat.seconds),
        ("K/V tokens read per decode step", unpacked / steps, read / steps),
    ]
    return "\n".join(
        [
            f"{'':<36}{stock.backend:>14}{pat.backend:>14}",
            *(f"{name:<36}{theirs:>14,.1f}{mine:>14,.1f}" for name, theirs, mine in rows),
            f"K/V reads saved: {1 - read / unpacked if unpacked else 0:.0%}",
            f"steps packed: {counted.packed_steps} of {counted.decode_steps}; "
            f"{counted.plans_made} plans made, {counted.plans_reused} reused, "
            f"{1e6 * counted.host_seconds / steps:.0f} us of host time a step",
            f"tokens equal to {stock.backend}: {agreed.token_match_rate:.1%}; log-probabilities "
            f"differ by {agreed.mean_diff:.1e} on average, {agreed.max_diff:.1e} at most, and the "
            f"closest choice was by {agreed.least_margin:.1e}",
            *([f"not served by pat: {counted.fallbacks}"] if counted.fallbacks else []),
        ]
    )
