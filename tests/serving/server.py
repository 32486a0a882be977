# SPDX-License-Identifier: Apache-2.0
"""The demo's server, as the tests start it, on a CPU or a GPU, and how they ask it for tokens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.forks import READ_LATE, start_server
from kit.start import PLUGINS, cpu_server, search_path

from sglang_pat.demo.server import Server, ServerError

DEVICE_ARGS = {
    # SGLang serves fp32 weights in bf16 unless told otherwise.
    "cpu": ("--dtype", "float32", "--max-total-tokens", "20000"),
    # SGLang's defaults, but for memory: some twenty servers share a GPU. Each may fill it to this
    # fraction of what was free when it started, the others' growth counted as its own.
    "cuda": ("--max-total-tokens", "60000", "--mem-fraction-static", "0.9"),
}

# With these a server logs a line when a request arrives, without the prompt.
LOG_REQUESTS = ("--log-requests", "--log-requests-level", "0")
ARRIVED_S = 60.0

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What a server generated for one prompt. ``verify_steps``: where it speculates, the steps
    that verified drafts."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    finish_reason: str
    verify_steps: int = 0


@dataclass(frozen=True)
class Config:
    """How to start a server. ``plugins``: load the tests' own SGLang plugins into it. ``spawn``:
    start its processes as SGLang does, which takes longer on a CPU (see ``forks``)."""

    name: str
    backend: str = "pat"
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    plugins: bool = False
    spawn: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        return self.name


class ServingServer(Server):
    """A server without a tokenizer: prompts and answers are token ids. In fp32 on the CPU, in bf16
    on a GPU, where it takes little memory, so that several can run on one."""

    def __init__(self, model: Path, config: Config, folder: Path) -> None:
        if config.device == "cpu":
            env = cpu_server(fork=not config.spawn, plugins=config.plugins)
        else:
            env = search_path(*[PLUGINS] * config.plugins)
        if config.backend == "pat":
            env["SGLANG_PAT_CHECK"] = "1"
        super().__init__(
            model,
            backend=config.backend,
            device=config.device,
            log=folder / "server.log",
            args=(
                # As many as the largest workload has: more would only cost memory and graphs.
                *("--skip-tokenizer-init", "--max-running-requests", "64"),
                *DEVICE_ARGS[config.device],
                *config.args,
            ),
            env=env | dict(config.env),
            # On a GPU many start at once, and FlashInfer's compile their kernels meanwhile.
            ready_s=300.0 if config.device == "cpu" else 540.0,
        )

        may_fork = all(name.startswith(READ_LATE) for name, _ in config.env)
        self._forked = config.device == "cpu" and not config.spawn and may_fork

    def _spawn(self) -> Any:
        if not self._forked:
            return super()._spawn()
        return start_server(self)

    def alive(self) -> bool:
        try:
            self.check_alive()
        except ServerError:
            return False
        return True

    def arrived(self) -> int:
        """How many requests have come since the start; the server must have ``LOG_REQUESTS``."""
        return self.text().count("Receive: obj=GenerateReqInput")

    @contextlib.contextmanager
    def paused_until_arrived(self, requests: int) -> Iterator[None]:
        """Nothing is decoded while requests are sent within this block and until as many as
        ``requests`` have come. How many decode together does not depend on how fast they came."""
        self.post("/pause_generation", {"mode": "in_place"})
        try:
            expected = self.arrived() + requests
            yield
            deadline = time.monotonic() + ARRIVED_S
            while (now := self.arrived()) < expected:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{expected - now} of {requests} requests did not come")
                time.sleep(0.01)
        finally:
            self.post("/continue_generation", {})

    def generate(
        self,
        prompts: Sequence[Prompt],
        new_tokens: int | Sequence[int],
        *,
        samples: int = 1,
        rids: Sequence[str] | None = None,
        adapters: Sequence[str | None] | None = None,
        ignore_eos: bool = True,
        prompt_logprobs: bool = False,
    ) -> list[Answer]:
        """Greedy answers to all prompts, sent at once; ``samples`` in a row for each prompt.
        ``adapters``: the LoRA adapter of each prompt, by name; None is the bare model.
        ``prompt_logprobs``: ask for those, too, for which SGLang computes the whole prompt.

        For an answer that ignores the end token SGLang keeps all its memory free beforehand.
        """
        lengths = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
        body: dict[str, Any] = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [
                {"temperature": 0, "ignore_eos": ignore_eos, "max_new_tokens": length, "n": samples}
                for length in lengths
            ],
            "return_logprob": True,
            "logprob_start_len": 0 if prompt_logprobs else -1,
        }
        if rids is not None:
            body["rid"] = list(rids)
        if adapters is not None:
            body["lora_path"] = list(adapters)
        return [answer_of(entry) for entry in self.post("/generate", body)]


def answer_of(entry: dict[str, Any]) -> Answer:
    """What SGLang returned for one prompt."""
    meta = entry["meta_info"]
    return Answer(
        tokens=tuple(entry["output_ids"]),
        logprobs=tuple(item[0] for item in meta["output_token_logprobs"]),
        cached_tokens=meta["cached_tokens"],
        finish_reason=meta["finish_reason"]["type"],
        verify_steps=meta.get("spec_verify_ct", 0),
    )
