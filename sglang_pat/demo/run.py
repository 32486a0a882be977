# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat demo``: one workload on the stock backend and on ``pat``, side by side.

Everything is made here (model, tokenizer, prompts), so nothing is downloaded. In fp32, the default
on a CPU, both must choose the same tokens. In bf16, the default on a GPU, rounding may flip a
near-tie, so the stock's tokens are forced through pat's decode and their log-probabilities compared
(see ``forcing``), and through the stock's own, which shows what rounding alone does. On a GPU model
and workload are larger (see ``Scale``), and both servers are warmed up before anything is measured.

Both servers start at once where both fit: a start takes one to two minutes. They are measured one
after the other, and a server without requests sleeps.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from sglang_pat.demo import compare as agreement
from sglang_pat.demo.model import make_model
from sglang_pat.demo.report import Run, summary, table, to_line
from sglang_pat.demo.scale import SCALES, VOCAB, Scale
from sglang_pat.demo.server import LOG_REQUESTS, Server, ServerError, default_device
from sglang_pat.demo.tokenizer import make_tokenizer
from sglang_pat.demo.workload import AgentWorkload, Generation, run_workload
from sglang_pat.srt.launch import reason_against_options

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # default by device


@dataclass(frozen=True, slots=True)
class Options:
    """How to run it; ``auto`` takes a GPU that pat serves, and the dtype that suits the device."""

    device: str = "auto"  # cpu, cuda or auto
    dtype: str = "auto"  # float32, bfloat16 or auto
    cache: Path | None = None  # folder for the model and the servers' logs
    json: Path | None = None  # file for the results: the last line's object, with the table


@dataclass(frozen=True, slots=True)
class _Trial:
    """What is run on both servers."""

    scale: Scale
    device: str
    dtype: str
    cache: Path

    @property
    def timed(self) -> AgentWorkload:
        parts, max_tokens = self.scale.parts, self.scale.max_tokens
        return self._workload(parts, max_tokens, logprobs=self.compared_apart is None)

    @property
    def compared_apart(self) -> AgentWorkload | None:
        """The pass that is compared, where the timed one asks for no log-probabilities."""
        if self.scale.compared_tokens is None:
            return None
        return self._workload(1, self.scale.compared_tokens, logprobs=True)

    @property
    def holds_two_servers(self) -> bool:
        """Whether both K/V pools fit beside each other; on a CPU they are small."""
        if self.device == "cpu":
            return True
        import torch

        # SGLang gives its pool at most some 0.8 of a GPU, and both want graphs and weights too.
        total = torch.cuda.get_device_properties(0).total_memory
        return self.scale.kv_bytes < 0.35 * total

    def _workload(self, parts: int, max_tokens: int, *, logprobs: bool) -> AgentWorkload:
        handbook = self.scale.handbook
        return AgentWorkload.load(
            parts=parts, handbook=handbook, max_tokens=max_tokens, logprobs=logprobs
        )


@dataclass(frozen=True, slots=True)
class _Stock:
    """What the stock answered."""

    run: Run  # the timed pass
    reference: list[Generation]  # what pat's answers are compared with
    itself: agreement.Agreement | None  # with the reference, where that was forced


@dataclass(frozen=True, slots=True)
class _Found:
    """What both servers answered."""

    pat: Run
    stock: _Stock
    agreed: agreement.Agreement


def run_demo(options: Options) -> int:
    """Run the demo; the last line on standard output is a JSON object. 0 if the backends agree.

    Raises:
        ServerError: a server did not start; the message has the end of its log. Or there is no GPU
            for ``cuda``, or an option in the environment is wrong.
        OSError: the file for the results cannot be written; asked before anything runs.
    """
    # pat's server would say so a minute later.
    if reason := reason_against_options():
        raise ServerError(reason)
    device = _device(options.device)
    dtype = DTYPES[device] if options.dtype == "auto" else options.dtype
    trial = _Trial(SCALES[device], device, dtype, options.cache or _default_cache())
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.touch()
    _announce(trial)
    model = make_model(trial.cache / f"model-{device}-{dtype}", dtype=dtype, **trial.scale.model)
    make_tokenizer(model, vocab=VOCAB)
    started = time.monotonic()
    found = _run_both(model, trial)
    passed = _passes(found.agreed, trial) and found.pat.counters.packed_steps > 0
    facts = _facts(trial) | {"seconds": time.monotonic() - started}
    results = (found.pat, found.stock.run, found.agreed, found.stock.itself)
    shown = table(*results)
    print(f"\n{shown}\n\n  {_verdict(found.pat, found.agreed, dtype, passed)}\n")
    fields = summary(*results, facts=facts, passed=passed)
    print(to_line(fields), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({**fields, "table": shown.splitlines()}, indent=2) + "\n"
        )
    return 0 if passed else 1


def _device(asked: str) -> str:
    if asked == "auto":
        return default_device()
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise ServerError(
            f"--device cuda: there is no CUDA device that torch {torch.__version__} can use; leave "
            "the option out or give cpu"
        )
    return asked


def _run_both(model: Path, trial: _Trial) -> _Found:
    """Start both servers on the folder ``model``, measure one after the other and compare."""
    # None: SGLang's own choice.
    stock_backend = "torch_native" if trial.device == "cpu" else None
    with contextlib.ExitStack() as servers:
        server, ours = _server(model, stock_backend, trial), _server(model, "pat", trial)
        if trial.holds_two_servers:
            # pat first: what it refuses ends it at once.
            _start(servers, ours, server)
        else:
            _start(servers, server)
        stock = _measure_stock(server, trial)
        server.stop()
        if not trial.holds_two_servers:
            _start(servers, ours)
        pat = _measure(ours, trial)
        agreed = agreement.compare(pat.generations, stock.run.generations)
        if trial.dtype != "float32":
            forced = _force(ours, stock.reference)
            agreed = replace(forced, token_match_rate=agreed.token_match_rate)
    return _Found(pat, stock, agreed)


def _measure_stock(server: Server, trial: _Trial) -> _Stock:
    run = _measure(server, trial)
    if trial.dtype == "float32":
        return _Stock(run, run.generations, None)
    reference = run.generations
    if trial.compared_apart is not None:
        reference, _ = run_workload(server, trial.compared_apart, label="to compare")
    return _Stock(run, reference, _force(server, reference))


def _announce(trial: _Trial) -> None:
    facts, timed = _facts(trial), trial.timed
    warm = "both servers are warmed up by the same workload first, then their cache is flushed; "
    print(
        f"sglang_pat {facts['sglang_pat']} on SGLang {facts['sglang']}, {facts['device']}, "
        f"{trial.dtype}.\n"
        f"{len(timed.agents)} agents, {timed.num_conversations} conversations at once, "
        f"{timed.num_requests} requests of {timed.max_tokens} tokens; {facts['model']}, random "
        f"weights;\n{warm if trial.scale.warm_up else ''}logs in {trial.cache}\n",
        flush=True,
    )


def _facts(trial: _Trial) -> dict[str, Any]:
    return {
        "device": _device_name(trial.device),
        "dtype": trial.dtype,
        "sglang": metadata.version("sglang"),
        "sglang_pat": metadata.version("sglang-pat"),
        "model": str(trial.scale),
        "warm_up": trial.scale.warm_up,
    }


def _start(servers: contextlib.ExitStack, *starting: Server) -> None:
    """Start them at once and wait for each; ``servers`` stops them."""
    print(f"starting {len(starting)} server{'s'[: len(starting) - 1]} ...", flush=True)
    for server in starting:
        servers.callback(server.stop)
        server.start()
    for server in starting:
        server.wait_until_ready()


def _server(model: Path, backend: str | None, trial: _Trial) -> Server:
    args = ["--dtype", trial.dtype, "--max-total-tokens", str(trial.scale.kv_tokens), *LOG_REQUESTS]
    if trial.dtype != "float32":
        # Logits in fp32 leave the attention as the main thing that rounds.
        args += ["--enable-fp32-lm-head", "--enable-custom-logit-processor"]
    log = trial.cache / f"server-{backend or 'stock'}.log"
    return Server(model, backend=backend, device=trial.device, log=log, args=args)


def _measure(server: Server, trial: _Trial) -> Run:
    backend = server.get("/server_info")["attention_backend"]
    if trial.scale.warm_up:
        run_workload(server, trial.timed, label="warm-up")
        server.post("/flush_cache?timeout=30")  # waits until the server is idle
    before = server.counters()
    generations, seconds = run_workload(server, trial.timed, label=f"{backend:>12}")
    server.check_alive()
    return Run(backend, generations, seconds, server.counters() - before)


def _force(server: Server, reference: list[Generation]) -> agreement.Agreement:
    """What ``server`` thinks of the stock's answers: it decodes them, all at once, so that their
    prefixes are packed."""
    from sglang_pat.demo import forcing  # imports SGLang

    forced = forcing.force_all(
        lambda body: server.post("/generate", body),
        [answer.prompt_ids for answer in reference],
        [answer.output_ids for answer in reference],
    )
    return agreement.compare_forced(forced, reference, 1.0)


def _passes(agreed: agreement.Agreement, trial: _Trial) -> bool:
    if trial.dtype == "float32":
        return agreed.tokens_equal and agreed.max_logprob_diff <= agreement.MAX_LOGPROB_DIFF_FP32
    return (  # false for NaN
        agreed.max_logprob_diff <= trial.scale.max_diff_bf16
        and agreed.mean_logprob_diff <= trial.scale.mean_diff_bf16
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
