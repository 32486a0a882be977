# SPDX-License-Identifier: Apache-2.0
"""A request alone is decoded by SGLang's own attention, two are ours, and the answers are one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from .compare import disagreements
from .conftest import Serve
from .patient import wait_until_decoded
from .server import Answer, Config
from .workloads import WORKLOADS

DEFAULT = Config("single-requests")  # overlap scheduling, the Rust tree core
SERVED = Config("single-requests-served", env=(("SGLANG_PAT_MIN_BATCH", "1"),))
# So many tokens that three other requests come and go meanwhile.
LONG = 3000
DISJOINT, RAGGED, PATIENT = (WORKLOADS[name] for name in ("disjoint", "ragged", "patient"))


def test_one_at_a_time_is_the_bases(serve: Serve, stock: dict[str, list[Answer]]) -> None:
    server = serve(DEFAULT)
    before = server.counters()
    alone: list[Answer] = []
    for prompt, tokens in zip(DISJOINT.prompts, DISJOINT.new_tokens, strict=True):
        alone += server.generate([prompt], tokens)
    assert disagreements(alone, stock["disjoint"]) == []
    counted = server.counters() - before
    # Each first token comes from a prefill; overlap may decode one token too many.
    steps = sum(DISJOINT.new_tokens) - len(alone)
    assert steps <= counted.base_forwards["small_batch"] <= steps + len(alone)
    assert counted.decode_steps == counted.plans_made == 0 and counted.host_seconds == 0
    assert not counted.fallbacks


def test_steps_of_several_are_ours_until_one_is_left(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    """Of eight requests that leave one after another the last runs nine steps longer."""
    server = serve(DEFAULT)
    for _ in range(2):  # cold and cached
        before = server.counters()
        answers = server.generate(RAGGED.prompts, RAGGED.new_tokens)
        assert disagreements(answers, stock["ragged"]) == []
        counted = server.counters() - before
        assert counted.base_forwards["small_batch"] >= 8
        assert counted.decode_steps >= RAGGED.new_tokens[-2] - 2 and counted.packed_steps > 0
        assert not counted.fallbacks


def test_one_then_two_then_one(serve: Serve, stock: dict[str, list[Answer]]) -> None:
    """Another request joins and leaves, three times, while one runs on."""
    server = serve(DEFAULT)
    before = server.counters()
    logged = len(server.text())
    with ThreadPoolExecutor() as pool:
        runs_on = pool.submit(server.generate, PATIENT.prompts[:1], LONG)
        wait_until_decoded(server, logged, 1, runs_on)
        for prompt, expected in zip(PATIENT.prompts[1:4], stock["patient"][1:4], strict=True):
            (joined,) = server.generate([prompt], 20)
            assert disagreements([joined], [_begin(expected, 20)]) == []
        assert not runs_on.done()
        (answer,) = runs_on.result()
    assert disagreements([_begin(answer, PATIENT.new_tokens[0])], stock["patient"][:1]) == []
    counted = server.counters() - before
    assert counted.base_forwards["small_batch"] > LONG // 2
    assert counted.decode_steps >= 3 * 15 and counted.packed_steps > 0
    assert not counted.fallbacks


def _begin(answer: Answer, tokens: int) -> Answer:
    """The first ``tokens`` of an answer."""
    return replace(answer, tokens=answer.tokens[:tokens], logprobs=answer.logprobs[:tokens])


def test_an_option_gives_single_requests_to_pat(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    server = serve(SERVED)
    before = server.counters()
    prompt, tokens = DISJOINT.prompts[-1], DISJOINT.new_tokens[-1]
    assert disagreements(server.generate([prompt], tokens), stock["disjoint"][-1:]) == []
    counted = server.counters() - before
    assert tokens - 1 <= counted.decode_steps <= tokens
    assert counted.packed_steps == 0 and counted.kv_tokens_read == counted.kv_tokens_unpacked
    assert "small_batch" not in counted.base_forwards and not counted.fallbacks
    assert "min_batch=1" in server.text()
