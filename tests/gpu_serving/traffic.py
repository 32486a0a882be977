# SPDX-License-Identifier: Apache-2.0
"""Mixed requests, each answered or aborted as asked: what the soak sends. Seeded."""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from serving.server import ServingServer
from serving.workloads import VOCAB

EOS = 0  # of the demo's model
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    prompt: Tokens
    new_tokens: int
    samples: int = 1
    abort_after_s: float | None = None


class Mix:
    """Requests without end: system prompts of all lengths, users of their own and repeated ones,
    strangers; short and long answers; one in ten with samples, one in ten aborted."""

    def __init__(self, seed: int, *, longest: int, new_tokens: int) -> None:
        self._rng = random.Random(seed)
        self._new_tokens = new_tokens
        lengths = (20, 60, 150, 400, longest // 2, longest)
        # The same for all seeds: the clients of a server share them.
        common = random.Random(0)
        self._systems = [_text(common, length) for length in lengths]
        self._repeated = [
            self._systems[i % len(lengths)] + _text(common, 5 + 7 * i) for i in range(24)
        ]

    def __iter__(self) -> Iterator[Request]:
        rng = self._rng
        while True:
            kind = rng.random()
            if kind < 0.3:
                prompt = rng.choice(self._repeated)
            elif kind < 0.8:
                prompt = rng.choice(self._systems) + _text(rng, rng.randint(1, 60))
            else:
                prompt = _text(rng, rng.choice((1, 3, 17, 90, 300)))
            new_tokens = rng.randint(1, self._new_tokens)
            if rng.random() < 0.1:
                yield Request(prompt, new_tokens, abort_after_s=rng.uniform(0, 0.3))
            else:
                yield Request(prompt, new_tokens, samples=3 if rng.random() < 0.1 else 1)


def _text(rng: random.Random, length: int) -> Tokens:
    return tuple(rng.randrange(3, VOCAB) for _ in range(length))


@dataclass
class Ledger:
    """What all clients of a server sent and got. ``tokens_a_step``: of a request, at most. Of an
    aborted request SGLang keeps all tokens of its last step, also those beyond what was asked for
    (``Req.update_finish_state``)."""

    tokens_a_step: int = 1
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    # K/V tokens that decoding the answers reads at least: all tokens before each but the first.
    kv_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _seen: dict[Tokens, Tokens] = field(default_factory=dict)  # longest answer by prompt

    def enter(self, request: Request, answers: list[dict[str, Any]]) -> None:
        with self._lock:
            self.counts["requests"] += 1
            if len(answers) != request.samples:
                self.wrong.append(f"{len(answers)} answers for {request.samples} samples")
            for answer in answers:
                self._enter_answer(request, answer)

    def _enter_answer(self, request: Request, answer: dict[str, Any]) -> None:
        tokens = tuple(answer["output_ids"])
        reason = answer["meta_info"]["finish_reason"]["type"]
        self.counts["answers"] += 1
        self.counts["tokens"] += len(tokens)
        self.counts[f"finished by {reason}"] += 1
        self.kv_tokens += sum(len(request.prompt) + i for i in range(1, len(tokens)))
        complete = len(tokens) == request.new_tokens
        right = {
            "length": complete,
            "stop": len(tokens) <= request.new_tokens and EOS in tokens[-1:],
            "abort": request.abort_after_s is not None
            and len(tokens) < request.new_tokens + self.tokens_a_step,
        }
        if not right.get(reason, False):
            self.wrong.append(
                f"{len(tokens)} of {request.new_tokens} tokens, finished by {reason}, "
                f"abort after {request.abort_after_s}"
            )
        seen = self._seen.get(request.prompt)
        if seen is not None:
            pairs = list(zip(tokens, seen, strict=False))
            equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            self.counts["repeated tokens"] += len(pairs)
            self.counts["repeated tokens equal"] += equal
        if len(tokens) > len(seen or ()):
            self._seen[request.prompt] = tokens


def send_all(server: ServingServer, mix: Mix, ledger: Ledger, stopping: threading.Event) -> None:
    """A client: one request of a mix after another, until told to stop."""
    for request in mix:
        if stopping.is_set():
            return
        ledger.enter(request, _send(server, request))


def _send(server: ServingServer, request: Request) -> list[dict[str, Any]]:
    body: dict[str, Any] = {
        "input_ids": list(request.prompt),
        # Without ignore_eos: only then the scheduler overcommits its memory, and retracts.
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": request.new_tokens,
            "n": request.samples,
        },
    }
    if request.abort_after_s is None:
        answer = server.post("/generate", body)
        return answer if isinstance(answer, list) else [answer]
    rid = {"rid": uuid.uuid4().hex}
    timer = threading.Timer(request.abort_after_s, server.post, ["/abort_request", rid])
    timer.start()
    answer = server.post("/generate", body | rid)
    timer.cancel()
    timer.join()
    return [answer]
