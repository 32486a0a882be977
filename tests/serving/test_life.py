# SPDX-License-Identifier: Apache-2.0
"""What happens to batches and to the cache while a server runs does not show in the answers."""

from __future__ import annotations

import re
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from .compare import disagreements
from .conftest import Serve
from .patient import PATIENT, start_patient, wait_until_decoded
from .quitters import quit_after
from .server import Answer, Config, ServingServer
from .workloads import WORKLOADS

# Overlap scheduling and the Rust tree core, as SGLang has them; it may sleep.
DEFAULT = Config("life", env=(("PAT_TEETH_SLEEP", "1"),), plugins=True)
LITTLE_MEMORY = Config(
    "little-memory", args=("--max-total-tokens", "1100", "--schedule-conservativeness", "0.05")
)
AWAKE = "sglang_pat: awake, the next plan is loaded anew"
LONG = 3000  # so many tokens that three other requests come and go meanwhile
LEAVERS_TOKENS = 4000  # a minute of decoding, if the server did not notice


def test_several_samples_of_a_prompt(serve: Serve, stock: dict[str, list[Answer]]) -> None:
    work = WORKLOADS["shared"]
    answers = serve(DEFAULT).generate(work.prompts, work.new_tokens, samples=3)
    expected = [answer for answer in stock["shared"] for _ in range(3)]
    assert disagreements(answers, expected) == []


def test_requests_aborted_in_mid_batch(serve: Serve, stock: dict[str, list[Answer]]) -> None:
    server = serve(DEFAULT)
    aborted = {1, 4, 5}
    rids = [f"abort-{i}" for i in range(8)]
    with ThreadPoolExecutor() as pool:
        future = start_patient(pool, server, rids=rids)
        for index in sorted(aborted):
            server.post("/abort_request", {"rid": rids[index]})
        answers = future.result()
    for index, (answer, expected) in enumerate(zip(answers, stock["patient"], strict=True)):
        if index in aborted:
            assert answer.finish_reason == "abort"
            assert len(answer.tokens) < len(expected.tokens)
            assert answer.tokens == expected.tokens[: len(answer.tokens)]
        else:
            assert disagreements([answer], [expected]) == []


def test_clients_that_disconnect_in_mid_stream(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    """Four of eight leave, three while their answers come and one before; the others' answers stay
    the same, nobody is decoded for who left, and the counters add up."""
    server = serve(DEFAULT)
    before = server.counters()
    stay, leave = PATIENT.prompts[:4], PATIENT.prompts[4:]
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(server.generate, stay, PATIENT.new_tokens[:4])
        for prompt, events in zip(leave, (0, 1, 9, 40), strict=True):
            quit_after(server, prompt, events, new_tokens=LEAVERS_TOKENS)
        assert not answers.done()
        assert disagreements(answers.result(), stock["patient"][:4]) == []
    counted = server.counters() - before  # waits until no step runs any more
    assert counted.plans_made + counted.plans_reused == counted.decode_steps
    assert counted.packed_steps > 0
    assert PATIENT.new_tokens[0] <= counted.decode_steps + 1 < LEAVERS_TOKENS
    assert not counted.fallbacks
    later = server.generate(leave, PATIENT.new_tokens[4:])
    assert disagreements(later, stock["patient"][4:]) == []


def test_a_profile_is_written(serve: Serve, tmp_path: Path) -> None:
    """By SGLang, of which our platform for a CPU has to name what torch records."""
    server = serve(DEFAULT)
    server.post("/start_profile", {"output_dir": str(tmp_path), "activities": ["CPU"]})
    server.generate(WORKLOADS["shared"].prompts, 2)
    server.post("/stop_profile")
    assert len(list(tmp_path.glob("*.trace.json.gz"))) == 1


def test_flush_is_refused_while_running_and_forgets_when_idle(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    server = serve(DEFAULT)
    with ThreadPoolExecutor() as pool:
        future = start_patient(pool, server)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.post("/flush_cache")
        assert not future.done()
        assert disagreements(future.result(), stock["patient"]) == []
    again = server.generate(PATIENT.prompts, PATIENT.new_tokens)
    assert all(answer.cached_tokens for answer in again)
    server.post("/flush_cache")
    cold = server.generate(PATIENT.prompts, PATIENT.new_tokens)
    assert not any(answer.cached_tokens for answer in cold)
    assert disagreements(again, stock["patient"]) == []
    assert disagreements(cold, stock["patient"]) == []


def test_new_weights_leave_no_kv_of_the_old_ones(
    model: Path,
    other_model: Path,
    serve: Serve,
    stock: dict[str, list[Answer]],
    stock_other: list[Answer],
) -> None:
    """The answers are those of a stock server that started with these weights; there and back."""
    work = WORKLOADS["multi_level"]

    def ask(server: ServingServer) -> list[Answer]:
        return server.generate(work.prompts, work.new_tokens)

    server = serve(DEFAULT)
    assert disagreements(ask(server), stock["multi_level"]) == []
    for folder, right in ((other_model, stock_other), (model, stock["multi_level"])):
        told = server.post("/update_weights_from_disk", {"model_path": str(folder)})
        assert told["success"], told
        before = server.counters()
        cold, warm = ask(server), ask(server)
        assert disagreements(cold, right) == [] and disagreements(warm, right) == []
        assert min(answer.cached_tokens for answer in cold) == 0
        assert (server.counters() - before).packed_steps > 0


@pytest.mark.parametrize("meanwhile", ["flush", "new weights", "prompt logprobs"])
def test_requests_that_all_have_to_start_again_after_a_pause(
    meanwhile: str, model: Path, serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    """As in every step of reinforcement learning."""
    server = serve(DEFAULT)
    before = server.counters()
    with ThreadPoolExecutor() as pool:
        future = start_patient(pool, server, prompt_logprobs=meanwhile == "prompt logprobs")
        for _ in range(3):
            server.post("/pause_generation", {"mode": "retract"})
            if meanwhile == "flush":
                server.post("/flush_cache")
            elif meanwhile == "new weights":
                told = server.post("/update_weights_from_disk", {"model_path": str(model)})
                assert told["success"], told
            logged = len(server.text())
            server.post("/continue_generation")
            wait_until_decoded(server, logged, len(PATIENT.prompts), future)
        assert disagreements(future.result(), stock["patient"]) == []
    counted = server.counters() - before
    assert counted.packed_steps > 0 and not counted.fallbacks


def test_a_server_that_slept_answers_as_before(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    """Without the memory saver no memory is released, but the plan is forgotten and made anew."""
    server, work = serve(DEFAULT), WORKLOADS["multi_level"]
    assert disagreements(server.generate(work.prompts, 9), _begins(stock["multi_level"], 9)) == []
    for tags in (None, ["kv_cache"]):
        server.post("/flush_cache?timeout=30")  # once it is idle, as it must be to sleep
        server.post("/release_memory_occupation", {"tags": tags})
        server.post("/resume_memory_occupation", {"tags": tags})
        before = server.counters()
        answers = server.generate(work.prompts, work.new_tokens)
        assert disagreements(answers, stock["multi_level"]) == []
        assert (server.counters() - before).packed_steps > 0
    assert server.text().count(AWAKE) == 2


def test_steps_of_several_are_ours_until_one_is_left(
    serve: Serve, stock: dict[str, list[Answer]]
) -> None:
    """Of eight requests that leave one after another the last runs nine steps longer."""
    server, work = serve(DEFAULT), WORKLOADS["ragged"]
    for _ in range(2):  # cold and cached
        before = server.counters()
        answers = server.generate(work.prompts, work.new_tokens)
        assert disagreements(answers, stock["ragged"]) == []
        counted = server.counters() - before
        assert counted.base_forwards["small_batch"] >= 8
        assert counted.decode_steps >= work.new_tokens[-2] - 2 and counted.packed_steps > 0
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
            assert disagreements(server.generate([prompt], 20), _begins([expected], 20)) == []
        assert not runs_on.done()
        answers = _begins(runs_on.result(), PATIENT.new_tokens[0])
    assert disagreements(answers, stock["patient"][:1]) == []
    counted = server.counters() - before
    assert counted.base_forwards["small_batch"] > LONG // 2
    assert counted.decode_steps >= 3 * 15 and counted.packed_steps > 0
    assert not counted.fallbacks


def _begins(answers: list[Answer], tokens: int) -> list[Answer]:
    """The first ``tokens`` of each answer."""
    return [
        replace(one, tokens=one.tokens[:tokens], logprobs=one.logprobs[:tokens]) for one in answers
    ]


def test_retracted_requests_and_evicted_nodes(serve: Serve, stock: dict[str, list[Answer]]) -> None:
    server = serve(LITTLE_MEMORY)
    hungry, identical = WORKLOADS["hungry"], WORKLOADS["identical"]

    def ask_hungry() -> list[Answer]:
        return server.generate(hungry.prompts, hungry.new_tokens, ignore_eos=hungry.ignore_eos)

    assert disagreements(ask_hungry(), stock["hungry"]) == []
    assert re.search(r"#retracted|[Rr]etract requests", server.text())
    (kept,) = server.generate(hungry.prompts[-1:], 1)
    server.generate(WORKLOADS["disjoint"].prompts, 24)
    server.generate(identical.prompts, identical.new_tokens)
    (evicted,) = server.generate(hungry.prompts[-1:], 1)
    assert evicted.cached_tokens < kept.cached_tokens
    assert disagreements(ask_hungry(), stock["hungry"]) == []
    assert not server.counters().fallbacks
