# SPDX-License-Identifier: Apache-2.0
"""Streaming sessions: their turns share what their first prompts have in common."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from .conftest import Serve
from .server import LOG_REQUESTS, Answer, Config, ServingServer, answer_of, disagreements, greedy
from .workloads import Prompt, random_prompt

ARGS = ("--enable-streaming-session", *LOG_REQUESTS)
TURNS, NEW_TOKENS = 3, 60
SYSTEM = random_prompt(seed=200, length=256)
NAMES = ("first", "second", "third")


def _said(name: str, turn: int) -> Prompt:
    """What a session's user adds in a turn."""
    own = random_prompt(seed=201 + 10 * NAMES.index(name) + turn, length=20 + 5 * turn)
    return own if turn else SYSTEM + own


def _turn(server: ServingServer, name: str, turn: int) -> Answer:
    body = {
        "input_ids": _said(name, turn),
        "sampling_params": greedy(NEW_TOKENS),
        "return_logprob": True,
        "session_params": {"id": name},
    }
    return answer_of(server.post("/generate", body))


def _talk(server: ServingServer) -> Iterator[list[Answer]]:
    """The answers of all sessions, turn by turn; in each turn all talk at once. The server is
    paused until all have said their part, so that they decode together on a busy machine, too."""
    server.generate([SYSTEM], 1)  # so that all first prompts find it in the tree
    for name in NAMES:
        opened = {"capacity_of_str_len": 10_000, "session_id": name, "streaming": True}
        assert server.post("/open_session", opened) == name
    with ThreadPoolExecutor() as pool:
        for turn in range(TURNS):
            with server.paused():
                come = server.arrived()
                answers = [pool.submit(_turn, server, name, turn) for name in NAMES]
                server.wait_until_arrived(come + len(NAMES))
            yield [answer.result() for answer in answers]
    for name in NAMES:
        server.post("/close_session", {"session_id": name})


def test_turns_of_sessions_are_packed_and_answer_as_whole_prompts_do(serve: Serve) -> None:
    """Which are asked one by one, and so are SGLang's own attention's."""
    server = serve(Config("sessions", args=ARGS))
    before, turns = server.counters(), []
    for turn, answers in enumerate(_talk(server)):
        turns.append(answers)
        counted, before = server.counters() - before, server.counters()
        # In most packed steps two sessions need not read the system prompt.
        saved = counted.kv_tokens_unpacked - counted.kv_tokens_read
        assert saved >= 3 / 2 * len(SYSTEM) * counted.packed_steps, turn
        assert counted.packed_steps > NEW_TOKENS // 2 and not counted.fallbacks
    for name, of_session in zip(NAMES, zip(*turns, strict=True), strict=True):
        prompt: Prompt = ()
        for turn, answer in enumerate(of_session):
            prompt += _said(name, turn)
            assert disagreements([answer], server.generate([prompt], NEW_TOKENS)) == []
            prompt += answer.tokens
    assert server.counters().decode_steps == before.decode_steps
