# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat demo``: one workload on the stock backend and on ``pat``, side by side.

Everything is made here (model, tokenizer, prompts), so nothing is downloaded. In fp32, the default
on a CPU, both must choose the same tokens. In bf16, the default on a GPU, rounding may flip a
near-tie, so the stock's tokens are forced through pat's decode and their log-probabilities compared
(see ``forcing``). The GPU's way has been rehearsed in bf16 on a CPU; on a GPU it has not yet run to
its end.
"""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_pat.demo import compare as agreement
from sglang_pat.demo.model import make_model
from sglang_pat.demo.report import Run, summary, table, to_line
from sglang_pat.demo.server import Server, default_device
from sglang_pat.demo.tokenizer import make_tokenizer
from sglang_pat.demo.workload import Generation, Workload, run_workload

VOCAB = 1024
MODEL: dict[str, Any] = {
    "hidden": 256,
    "layers": 4,
    "q_heads": 8,
    "kv_heads": 2,
    "head_dim": 64,
    "vocab": VOCAB,
}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # default by device
_KV_TOKENS = 65536  # 24 contexts of 1,900 tokens with room to spare: no request is retracted


@dataclass(frozen=True, slots=True)
class Options:
    """How to run it; ``auto`` takes a GPU that pat serves, and the dtype that suits the device."""

    device: str = "auto"  # cpu, cuda or auto
    dtype: str = "auto"  # float32, bfloat16 or auto
    cache: Path | None = None  # folder for the model and the servers' logs


def run_demo(options: Options) -> int:
    """Run the demo; the last line on standard output is a JSON object. 0 if the backends agree.

    Raises:
        ServerError: a server did not start; the message has the end of its log.
    """
    device = default_device() if options.device == "auto" else options.device
    dtype = DTYPES[device] if options.dtype == "auto" else options.dtype
    cache = options.cache or _default_cache()
    workload = Workload.load()
    print(
        f"sglang_pat {metadata.version('sglang-pat')} on SGLang {metadata.version('sglang')}, "
        f"{_device_name(device)}, {dtype}.\n"
        f"{len(workload.agents)} agents, {workload.num_conversations} conversations at once, "
        f"{workload.num_requests} requests; logs in {cache}\n",
        flush=True,
    )
    model = make_model(cache / f"model-{dtype}", dtype=dtype, **MODEL)
    make_tokenizer(model, vocab=VOCAB)
    started = time.monotonic()

    stock_backend = "torch_native" if device == "cpu" else None  # None: SGLang's own choice
    with _serve(model, stock_backend, device, dtype, cache) as server:
        stock = _measure(server, workload)
    with _serve(model, "pat", device, dtype, cache) as server:
        pat = _measure(server, workload)
        if dtype == "float32":
            agreed = agreement.compare(pat.generations, stock.generations)
        else:
            agreed = _force(server, stock.generations, pat.generations)

    passed = _passes(agreed, dtype) and pat.counters.packed_steps > 0
    facts = {
        "device": _device_name(device),
        "dtype": dtype,
        "sglang": metadata.version("sglang"),
        "sglang_pat": metadata.version("sglang-pat"),
        "model": "llama {layers} x {hidden}, {q_heads}/{kv_heads} heads of {head_dim}".format(
            **MODEL
        ),
        "seconds": time.monotonic() - started,
    }
    print(f"\n{table(pat, stock, agreed)}\n\n  {_verdict(pat, agreed, dtype, passed)}\n")
    print(to_line(summary(pat, stock, agreed, facts=facts, passed=passed)), flush=True)
    return 0 if passed else 1


def _serve(model: Path, backend: str | None, device: str, dtype: str, cache: Path) -> Server:
    args = ["--dtype", dtype, "--max-total-tokens", str(_KV_TOKENS)]
    if dtype != "float32":
        # Logits in fp32 leave the attention as the main thing that rounds.
        args += ["--enable-fp32-lm-head", "--enable-custom-logit-processor"]
    name = backend or "stock"
    print(
        f"starting SGLang with {'its own choice' if backend is None else backend} ...", flush=True
    )
    log = cache / f"server-{name}.log"
    return Server(model, backend=backend, device=device, log=log, args=args)


def _measure(server: Server, workload: Workload) -> Run:
    backend = server.get("/server_info")["attention_backend"]
    before = server.counters()
    began = time.perf_counter()
    generations = run_workload(server.url, workload, label=f"{backend:>12}")
    seconds = time.perf_counter() - began
    server.check_alive()
    return Run(backend, generations, seconds, server.counters() - before)


def _force(server: Server, stock: list[Generation], pat: list[Generation]) -> agreement.Agreement:
    """Let ``server`` decode the stock's answers, all at once, so that their prefixes are packed."""
    from sglang_pat.demo import forcing  # imports SGLang

    def force(answer: Generation) -> list[float]:
        body = forcing.request(answer.prompt_ids, answer.output_ids)
        return forcing.forced_logprobs(server.post("/generate", body), answer.output_ids)

    with ThreadPoolExecutor(max_workers=len(stock)) as pool:
        forced = list(pool.map(force, stock))
    free = agreement.compare(pat, stock)
    return agreement.compare_forced(forced, stock, free.token_match_rate)


def _passes(agreed: agreement.Agreement, dtype: str) -> bool:
    if dtype == "float32":
        return agreed.tokens_equal and agreed.max_logprob_diff <= agreement.MAX_LOGPROB_DIFF_FP32
    return (  # false for NaN
        agreed.max_logprob_diff <= agreement.MAX_LOGPROB_DIFF_BF16
        and agreed.mean_logprob_diff <= agreement.MEAN_LOGPROB_DIFF_BF16
    )


def _verdict(pat: Run, agreed: agreement.Agreement, dtype: str, passed: bool) -> str:
    if passed:
        return "PASSED: pat agrees with the stock backend."
    if not pat.counters.packed_steps:
        return f"FAILED: no decode step was packed; not served by pat: {pat.counters.fallbacks}"
    if math.isnan(agreed.max_logprob_diff):
        return "FAILED: a log-probability is NaN, or a token could not be forced."
    if dtype == "float32" and not agreed.tokens_equal:
        return "FAILED: the tokens differ."
    return (
        f"FAILED: log-probabilities differ by {agreed.mean_logprob_diff:.2e} on average and by "
        f"{agreed.max_logprob_diff:.2e} at most."
    )


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang_pat" / "demo"


def _device_name(device: str) -> str:
    import torch

    if device == "cpu":
        return f"CPU, {torch.get_num_threads()} threads"
    return str(torch.cuda.get_device_name(0))
