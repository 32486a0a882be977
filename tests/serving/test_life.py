# SPDX-License-Identifier: Apache-2.0
"""What happens to batches and to the cache while a server runs does not show in the answers; what
would be wrong in attention does."""

from __future__ import annotations

import re
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpu_serving.soak import SCALES, soak

from sglang_pat.demo.server import ServerError

from .conftest import Serve, Stock
from .server import Config, ServingServer, check_left, disagreements
from .workloads import PATIENT, WORKLOADS

LITTLE_MEMORY = Config(
    "little-memory", args=("--max-total-tokens", "1100", "--schedule-conservativeness", "0.05")
)
AWAKE = "sglang_pat: awake, the next plan is loaded anew"
LONG = 500  # so many tokens that three other requests come and go meanwhile
LEAVERS_TOKENS = 4000  # a minute of decoding, if the server did not notice


@pytest.fixture
def server(serve: Serve, fault: Path) -> ServingServer:
    """Overlap scheduling and the Rust tree core, as SGLang has them; it may sleep, and commits the
    ``fault``."""
    fault.write_text("")
    env = (("PAT_TEETH_SLEEP", "1"), ("PAT_TEETH_FAULT", str(fault)))
    return serve(Config("life", env=env, plugins=True))


def test_requests_aborted_and_clients_that_disconnect(server: ServingServer, stock: Stock) -> None:
    """The others' answers stay the same, nobody is decoded for who left, and the counters add
    up."""
    before, rids = server.counters(), [f"abort-{i}" for i in range(8)]
    with ThreadPoolExecutor() as pool:
        future = server.start_patient(pool, rid=rids)
        for index in (1, 4, 5):
            server.post("/abort_request", {"rid": rids[index]})
        for events in (0, 1, 20):  # before the first token, and while tokens come
            server.quit_after(PATIENT.prompts[0], events, new_tokens=LEAVERS_TOKENS)
        check_left(future.result(), stock["patient"], {1, 4, 5})
    counted = server.counters() - before  # waits until no step runs any more
    assert counted.plans_made + counted.plans_reused == counted.decode_steps
    assert PATIENT.new_tokens[0] <= counted.decode_steps + 1 < LEAVERS_TOKENS
    assert counted.packed_steps > 0 and not counted.fallbacks


def test_a_profile_is_written(server: ServingServer, tmp_path: Path) -> None:
    """By SGLang, of which our platform for a CPU has to name what torch records."""
    server.post("/start_profile", {"output_dir": str(tmp_path), "activities": ["CPU"]})
    server.generate(WORKLOADS["shared"].prompts, 2)
    server.post("/stop_profile")
    assert len(list(tmp_path.glob("*.trace.json.gz"))) == 1


def test_flush_is_refused_while_running_and_forgets_when_idle(
    server: ServingServer, stock: Stock
) -> None:
    with ThreadPoolExecutor() as pool:
        future = server.start_patient(pool)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.post("/flush_cache")
        assert not future.done()
        assert disagreements(future.result(), stock["patient"]) == []
    again = server.generate(PATIENT.prompts, 20)
    assert all(answer.cached_tokens for answer in again)
    server.post("/flush_cache")
    cold = server.generate(PATIENT.prompts, 20)
    assert not any(answer.cached_tokens for answer in cold)
    assert disagreements(again + cold, [one.begin(20) for one in stock["patient"]] * 2) == []


def test_new_weights_leave_no_kv_of_the_old_ones(
    model: Path, other_model: Path, server: ServingServer, stock: Stock
) -> None:
    """The answers are those of a stock server with these weights; there and back."""
    work = WORKLOADS["multi_level"]
    assert disagreements(server.ask(work), stock["multi_level"]) == []
    for folder, right in ((other_model, stock["other weights"]), (model, stock["multi_level"])):
        server.update_weights(folder)
        cold = server.ask(work)
        warm, counted = server.counted(server.ask, work)
        assert disagreements(cold + warm, right * 2) == []
        assert min(answer.cached_tokens for answer in cold) == 0 < counted.packed_steps


@pytest.mark.parametrize("meanwhile", ["flush", "new weights", "prompt logprobs"])
def test_requests_that_all_have_to_start_again_after_a_pause(
    meanwhile: str, model: Path, server: ServingServer, stock: Stock
) -> None:
    """As in every step of reinforcement learning. For log-probabilities of a prompt SGLang computes
    it whole."""
    before = server.counters()
    fields = {"logprob_start_len": 0} if meanwhile == "prompt logprobs" else {}
    with ThreadPoolExecutor() as pool:
        future = server.start_patient(pool, **fields)
        for _ in range(3):
            server.post("/pause_generation", {"mode": "retract"})
            if meanwhile == "flush":
                server.post("/flush_cache")
            elif meanwhile == "new weights":
                server.update_weights(model)
            logged = len(server.text())
            server.post("/continue_generation")
            server.wait_until_decoded(logged, len(PATIENT.prompts), future)
        assert disagreements(future.result(), stock["patient"]) == []
    counted = server.counters() - before
    assert counted.packed_steps > 0 and not counted.fallbacks


def test_a_server_that_slept_answers_as_before(server: ServingServer, stock: Stock) -> None:
    """Without the memory saver no memory is released, but the plan is forgotten and made anew."""
    work = WORKLOADS["multi_level"]
    short = [answer.begin(9) for answer in stock["multi_level"]]
    assert disagreements(server.generate(work.prompts, 9), short) == []
    for tags in (None, ["kv_cache"]):
        server.post("/flush_cache?timeout=30")  # once it is idle, as it must be to sleep
        server.post("/release_memory_occupation", {"tags": tags})
        server.post("/resume_memory_occupation", {"tags": tags})
        answers, counted = server.counted(server.ask, work)
        assert disagreements(answers, stock["multi_level"]) == [] and counted.packed_steps > 0
    assert server.text().count(AWAKE) == 2


def test_one_then_two_then_one(server: ServingServer, stock: Stock) -> None:
    """Another request joins and leaves, three times, while one runs on."""
    before, logged = server.counters(), len(server.text())
    with ThreadPoolExecutor() as pool:
        runs_on = pool.submit(server.generate, PATIENT.prompts[:1], LONG)
        server.wait_until_decoded(logged, 1, runs_on)
        for prompt, expected in zip(PATIENT.prompts[1:4], stock["patient"][1:4], strict=True):
            assert disagreements(server.generate([prompt], 20), [expected.begin(20)]) == []
        assert not runs_on.done()
        (answer,) = runs_on.result()
    assert disagreements([answer.begin(PATIENT.new_tokens[0])], stock["patient"][:1]) == []
    counted = server.counters() - before
    assert counted.base_forwards["small_batch"] > LONG // 2
    assert counted.decode_steps >= 3 * 15 and counted.packed_steps > 0
    assert not counted.fallbacks


@pytest.mark.parametrize("name", ["wrong_scale", "drop_pack", "swap_slot"])
def test_faults_show(name: str, server: ServingServer, fault: Path, stock: Stock) -> None:
    for made in ("", name, ""):
        fault.write_text(made)
        found = disagreements(server.ask(WORKLOADS["shared"]), stock["shared"])
        assert (found != []) == bool(made)


def test_slots_that_no_request_owns_are_not_read(
    server: ServingServer, fault: Path, stock: Stock
) -> None:
    fault.write_text("poison")
    assert disagreements(server.ask(WORKLOADS["shared"]), stock["shared"]) == []


def test_check_mode_stops_a_server_whose_rows_disagree(server: ServingServer, fault: Path) -> None:
    server.ask(WORKLOADS["shared"])
    fault.write_text("corrupt_row")
    with pytest.raises((ServerError, OSError)):  # the connection breaks off
        server.ask(WORKLOADS["shared"])
        server.check_alive()
    log = server.text()
    assert "SGLANG_PAT_CHECK: request" in log
    assert "at token 3" in log


def test_retracted_requests_and_evicted_nodes(serve: Serve, stock: Stock) -> None:
    server, hungry = serve(LITTLE_MEMORY), WORKLOADS["hungry"]
    assert disagreements(server.ask(hungry), stock["hungry"]) == []
    assert re.search(r"#retracted|[Rr]etract requests", server.text())
    (kept,) = server.generate(hungry.prompts[-1:], 1)
    for name in ("disjoint", "identical"):
        server.ask(WORKLOADS[name])
    (evicted,) = server.generate(hungry.prompts[-1:], 1)
    assert evicted.cached_tokens < kept.cached_tokens
    assert disagreements(server.ask(hungry), stock["hungry"]) == []
    assert not server.counters().fallbacks


def test_mixed_traffic_loses_nothing(tmp_path: Path) -> None:
    """The soak, small; on a GPU it is a program."""
    summary = soak("cpu", SCALES["cpu"], tmp_path)
    assert summary["failures"] == [], summary
