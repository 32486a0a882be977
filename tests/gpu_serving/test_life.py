# SPDX-License-Identifier: Apache-2.0
"""What happens to a server while it lives: clients that go away, requests that are aborted, and
other weights."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from serving.quitters import quit_after
from serving.server import ServingServer

from .agreement import LOADS, NEW_TOKENS, Distance, answers, equal_share, forced_logprobs
from .fleet import Fleet

OURS, STOCK, OTHER = "ratio4-pat", "ratio4-fa3", "ratio4b-fa3"
SERVERS = (OURS, STOCK, OTHER)
LOAD = LOADS["multi_level"]
ANSWERED_AGAIN = 3
LEAVERS_TOKENS = 3000  # ten seconds of decoding, if nobody noticed
# At another temperature SGLang compiles its sampling kernels first: two minutes in which the
# scheduler, and with it every client, waits.
GREEDY = {"temperature": 0, "max_new_tokens": LEAVERS_TOKENS, "ignore_eos": True}
# Between two requests of a leaver. SGLang aborts a broken stream after two seconds, so some dozen
# requests at most decode for nobody, and the others find room.
PAUSE_S = 0.3


@contextmanager
def _leavers(server: ServingServer) -> Iterator[list[Future[int]]]:
    """Clients that share the load's prompts and leave in mid-stream, until the block ends; each
    gives how many requests it left."""
    stopping = Event()

    def disconnect(first: int) -> int:
        left = 0
        while not stopping.is_set():
            prompt = LOAD.prompts[(first + left) % len(LOAD.prompts)]
            quit_after(server, prompt, left % 7, new_tokens=LEAVERS_TOKENS)
            left += 1
            stopping.wait(PAUSE_S)
        return left

    def abort(first: int) -> int:
        left = 0
        while not stopping.is_set():
            rid = uuid.uuid4().hex
            body = {
                "rid": rid,
                "input_ids": list(LOAD.prompts[(first + left) % len(LOAD.prompts)]),
                "sampling_params": GREEDY,
            }
            with ThreadPoolExecutor(max_workers=1) as one:
                answer = one.submit(server.post, "/generate", body)
                while not answer.done():  # the first may come before the request
                    time.sleep(0.05)
                    server.post("/abort_request", {"rid": rid})
                assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"
            left += 1
        return left

    with ThreadPoolExecutor(max_workers=4) as pool:
        left = [pool.submit(leave, i) for i, leave in enumerate((disconnect, abort) * 2)]
        try:
            yield left
        finally:
            stopping.set()


def test_survivors_of_aborts_answer_the_same(server: Fleet) -> None:
    ours, theirs = server(OURS), server(STOCK)
    texts = answers(theirs, LOAD)
    wanted = forced_logprobs(theirs, LOAD, texts)
    before = ours.counters()
    with _leavers(ours) as left:
        found = [
            Distance.between(forced_logprobs(ours, LOAD, texts), wanted)
            for _ in range(ANSWERED_AGAIN)
        ]
    counted = ours.counters() - before  # waits until no step runs any more
    numbers = [one.result() for one in left]
    print(f"{numbers} left; {found}; {counted}")
    assert all(number >= 2 for number in numbers)
    assert all(distance.small for distance in found)
    assert counted.plans_made + counted.plans_reused == counted.decode_steps
    assert 0 < counted.packed_steps <= counted.decode_steps
    assert counted.kv_tokens_read < counted.kv_tokens_unpacked
    assert not counted.fallbacks
    assert Distance.between(forced_logprobs(ours, LOAD, texts), wanted).small


def test_other_weights_from_disk(server: Fleet) -> None:
    """There and back: each time the answers are those of a fresh stock server with these weights,
    from an empty cache.

    Without ``recapture_cuda_graph``, with which stock servers die, too. By reading, torch 2.14 then
    frees memory that SGLang's prefill graphs still use (docs/operating.md, "Weight updates").
    """
    ours = server(OURS)
    stock = {"ratio4b": server(OTHER), "ratio4": server(STOCK)}
    texts = {name: answers(one, LOAD) for name, one in stock.items()}
    assert equal_share(texts["ratio4"], texts["ratio4b"]) < 0.5
    try:
        for name in ("ratio4b", "ratio4"):
            answers(ours, LOAD)  # the cache holds K/V of the weights before
            body = {"model_path": str(server.model(name))}
            told = ours.post("/update_weights_from_disk", body)
            assert told["success"], told
            (first,) = ours.generate(LOAD.prompts[:1], 1)
            assert first.cached_tokens == 0
            before = ours.counters()
            forced = forced_logprobs(ours, LOAD, texts[name])
            counted = ours.counters() - before
            found = Distance.between(forced, forced_logprobs(stock[name], LOAD, texts[name]))
            print(f"{name}: {found}, {counted}")
            assert found.small
            assert counted.packed_steps >= NEW_TOKENS - 8
    finally:
        body = {"model_path": str(server.model("ratio4"))}
        ours.post("/update_weights_from_disk", body)
