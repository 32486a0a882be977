# SPDX-License-Identifier: Apache-2.0
"""The demo's server, as the tests start it, on a CPU or a GPU, and how they ask it for tokens."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from math import nan
from pathlib import Path
from typing import Any, TypeVar

from kit.forks import (
    PLUGINS,
    READ_LATE,
    counters_of,
    cpu_server,
    search_path,
    start_server,
    start_server_apart,
)

from sglang_pat.demo.counters import Counters
from sglang_pat.demo.server import Server, ServerError

from .workloads import PATIENT, Prompt, Workload

DEVICE_ARGS = {
    # SGLang serves fp32 weights in bf16 unless told otherwise.
    "cpu": ("--dtype", "float32", "--max-total-tokens", "20000"),
    # SGLang's defaults, but for memory: some twenty servers share a GPU. Each may fill it to this
    # fraction of what was free when it started, the others' growth counted as its own.
    "cuda": ("--max-total-tokens", "60000", "--mem-fraction-static", "0.9"),
}
# With these a server logs a line when a request arrives, without the prompt.
LOG_REQUESTS = ("--log-requests", "--log-requests-level", "0")
WAIT_S = 60.0  # for a request to arrive, a step to be logged or an event to come
LOGPROB_TOLERANCE = 2e-3  # natural log, fp32
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What a server generated for one prompt. ``verify_steps``: where it speculates, the steps
    that verified drafts."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    finish_reason: str
    verify_steps: int = 0

    def begin(self, tokens: int) -> Answer:
        """Its first ``tokens``."""
        kept = self.tokens[:tokens], self.logprobs[:tokens]
        return Answer(*kept, self.cached_tokens, self.finish_reason)


@dataclass(frozen=True)
class Config:
    """How to start a server. ``plugins``: load the tests' own SGLang plugins into it.
    ``tokenizer``: it takes text, too, as OpenAI's API has it."""

    name: str
    backend: str = "pat"
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    plugins: bool = False
    tokenizer: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        return self.name


class ServingServer(Server):
    """A server whose prompts and answers are token ids, mostly without a tokenizer. In fp32 on the
    CPU, in bf16 on a GPU, where it takes little memory, so that several can run on one."""

    def __init__(self, model: Path, config: Config, folder: Path) -> None:
        on_cpu = config.device == "cpu"
        if on_cpu:
            env = cpu_server(plugins=config.plugins)
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
                *("--max-running-requests", "64"),
                *([] if config.tokenizer else ["--skip-tokenizer-init"]),
                *DEVICE_ARGS[config.device],
                *config.args,
            ),
            env=env | dict(config.env),
            # On a GPU many start at once, and FlashInfer's compile their kernels meanwhile.
            ready_s=300.0 if on_cpu else 540.0,
        )
        self._forked = on_cpu
        self._late = all(name.startswith(READ_LATE) for name, _ in config.env)

    def _spawn(self) -> Any:
        if not self._forked:
            return super()._spawn()
        return start_server(self) if self._late else start_server_apart(self)

    def counters(self) -> Counters:
        return counters_of(self) if self._forked else super().counters()

    def alive(self) -> bool:
        with contextlib.suppress(ServerError):
            self.check_alive()
            return True
        return False

    def arrived(self) -> int:
        """How many requests have come since the start; the server must have ``LOG_REQUESTS``."""
        return self.text().count("Receive: obj=GenerateReqInput")

    def wait_until_arrived(self, requests: int) -> None:
        """Return once so many have come since the start."""
        wait_until(lambda: self.arrived() >= requests, f"less than {requests} requests came")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is decoded within this block, so that how many requests decode together does not
        depend on how fast they came."""
        self.post("/pause_generation", {"mode": "in_place"})
        try:
            yield
        finally:
            self.post("/continue_generation")

    def generate(
        self,
        prompts: Sequence[Prompt],
        new_tokens: int | Sequence[int],
        *,
        samples: int = 1,
        ignore_eos: bool = True,
        **fields: Any,
    ) -> list[Answer]:
        """Greedy answers to all prompts, sent at once; ``samples`` in a row for each prompt.
        ``fields``: further ones of the body, as ``rid`` and ``lora_path`` (of each prompt; None is
        the bare model).

        For an answer that ignores the end token SGLang keeps all its memory free beforehand.
        """
        lengths = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": [
                greedy(length) | {"n": samples, "ignore_eos": ignore_eos} for length in lengths
            ],
            "return_logprob": True,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return [answer_of(entry) for entry in self.post("/generate", body | given)]

    def ask(self, work: Workload) -> list[Answer]:
        return self.generate(work.prompts, work.new_tokens, ignore_eos=work.ignore_eos)

    def counted(self, call: Callable[..., T], *given: Any, **options: Any) -> tuple[T, Counters]:
        """What a call gives, and what pat counted meanwhile, until no step runs any more."""
        before = self.counters()
        return call(*given, **options), self.counters() - before

    def update_weights(self, model: Path) -> None:
        told = self.post("/update_weights_from_disk", {"model_path": str(model)})
        assert told["success"], told

    def start_patient(self, pool: ThreadPoolExecutor, **fields: Any) -> Future[list[Answer]]:
        """Send the long answers' prompts, and return once they are being generated: something else
        happens to the server beside them. ``fields``: as of ``generate``."""
        logged = len(self.text())
        future = pool.submit(self.generate, PATIENT.prompts, PATIENT.new_tokens, **fields)
        self.wait_until_decoded(logged, len(PATIENT.prompts), future)
        return future

    def wait_until_decoded(self, logged: int, requests: int, future: Future[list[Answer]]) -> None:
        """Return once the log behind its first ``logged`` characters has a step of ``requests``,
        whose answers ``future`` will have. SGLang logs every 40th step."""

        def decoded() -> bool:
            found = f"Decode batch, #running-req: {requests}," in self.text()[logged:]
            assert found or not future.done()
            return found

        wait_until(decoded, f"no step of {requests} requests")

    def quit_after(self, prompt: Prompt, events: int, *, new_tokens: int) -> None:
        """Ask for ``new_tokens`` tokens as a stream, read ``events`` events and close the
        connection, as browsers and timeouts do."""
        body = {"input_ids": prompt, "sampling_params": greedy(new_tokens), "stream": True}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(connection):
            header = {"Content-Type": "application/json"}
            connection.request("POST", "/generate", json.dumps(body), header)
            answer = connection.getresponse() if events else None
            while answer and events:
                line = answer.readline()
                assert line and b"[DONE]" not in line, "the server closed the stream first"
                events -= line.startswith(b"data: ")


def wait_until(holds: Callable[[], bool], otherwise: str) -> None:
    """Fails, saying ``otherwise``, if something does not hold within WAIT_S seconds."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Start servers side by side; they are ready within this block, and end with it."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield


def greedy(new_tokens: int) -> dict[str, Any]:
    """Sampling parameters."""
    return {"temperature": 0, "ignore_eos": True, "max_new_tokens": new_tokens}


def answer_of(entry: dict[str, Any]) -> Answer:
    """What SGLang returned for one prompt."""
    meta = entry["meta_info"]
    return Answer(
        tokens=tuple(entry["output_ids"]),
        # SGLang writes NaN as null.
        logprobs=tuple(nan if p is None else p for p, *_ in meta["output_token_logprobs"]),
        cached_tokens=meta["cached_tokens"],
        finish_reason=meta["finish_reason"]["type"],
        verify_steps=meta.get("spec_verify_ct", 0),
    )


def disagreements(got: Sequence[Answer], expected: Sequence[Answer]) -> list[str]:
    """What differs between two servers' greedy answers to the same prompts; [] if nothing does."""
    found = []
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if ours.tokens != theirs.tokens:
            pairs = zip(ours.tokens, theirs.tokens, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), "the shorter one's end")
            found.append(f"answer {index}: tokens differ from token {at} on")
            continue
        gaps = [abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)]
        if not all(gap <= LOGPROB_TOLERANCE for gap in gaps):  # NaN is a disagreement
            found.append(f"answer {index}: log-probabilities differ by {max(gaps):.2e}")
    return found


def check_left(answers: Sequence[Answer], expected: Sequence[Answer], aborted: set[int]) -> None:
    """The ``aborted`` of some requests got the begin of their answers, the others all of them."""
    left = {i for i, answer in enumerate(answers) if answer.finish_reason == "abort"}
    assert left == aborted
    for i, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        if i in aborted:
            assert len(answer.tokens) < len(wanted.tokens)
            assert answer.tokens == wanted.tokens[: len(answer.tokens)]
        else:
            assert disagreements([answer], [wanted]) == []


def check_adapters_share_no_kv(server: ServingServer, prompt: Prompt, requests: int) -> None:
    """Equal prompts under the adapters red and blue and the bare model are other nodes of the tree:
    each is prefilled for itself, and nothing of them is packed. Under one adapter they are one."""
    colours = ("red", "blue", None)
    for colour in colours:
        (cold,) = server.generate([prompt], 1, lora_path=[colour])
        assert cold.cached_tokens == 0
    answers, counted = server.counted(server.generate, [prompt] * 3, 24, lora_path=colours)
    assert all(answer.cached_tokens > 0.8 * len(prompt) for answer in answers)
    assert len({answer.tokens for answer in answers}) == 3  # the adapters do make a difference
    assert counted.packed_steps == 0 and counted.kv_tokens_read == counted.kv_tokens_unpacked
    same = {"lora_path": ["red"] * requests}
    _, counted = server.counted(server.generate, [prompt] * requests, 24, **same)
    assert counted.packed_steps >= 20
    assert counted.kv_tokens_read < 0.5 * counted.kv_tokens_unpacked
