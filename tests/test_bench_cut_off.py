# SPDX-License-Identifier: Apache-2.0
"""Requests that have not ended when the time is up: cut off, and counted as far as they came."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_pat.bench.serving.client import AnswerTimes, RequestError, converse, parse, stream
from sglang_pat.bench.serving.timing import request_times


def test_times_of_requests_are_of_those_sent_and_ended_in_the_window() -> None:
    # Sent at 0.5, 2 and 4; the last has not begun when the window closes, and is cut off later.
    answers = [
        AnswerTimes(sent=0.5, times=[1.0, 3.0], tokens=[1, 5], cached=0),
        AnswerTimes(sent=2.0, times=[3.0, 9.0], tokens=[1, 3], cached=0),
        AnswerTimes(sent=4.0, times=[6.0, 8.0], tokens=[1, 2], cached=0, whole=False),
        AnswerTimes(sent=4.5, times=[], tokens=[], cached=0, whole=False),
    ]
    found = request_times(answers, 1.0, 5.0)
    assert (found.sent, found.begun, found.ended, found.tpots) == (3, 1 / 3, 0.0, 0)
    assert found.tpot_ms is found.tpot_p99_ms is found.e2e_ms is None
    assert found.ttft_ms == 1500 and found.ttft_p99_ms == pytest.approx(1990)
    found = request_times(answers, 0.0, 5.0, grace_s=4.0)
    assert (found.sent, found.begun, found.ended, found.tpots) == (4, 0.5, 0.5, 2)
    assert found.tpot_ms == (500 + 3000) / 2 and found.tpot_p99_ms == pytest.approx(2975)
    assert found.e2e_ms == (2500 + 7000) / 2
    # What was cut off counts as far as it came, if that is far enough.
    found = request_times(answers, 0.0, 5.0, grace_s=3.5, cut_tokens=2)
    assert found.ended == 0.25 and found.tpots == 2 and found.tpot_ms == (500 + 2000) / 2
    assert request_times(answers, 0.0, 5.0, grace_s=3.5, cut_tokens=3).tpots == 1
    assert request_times(answers, 20.0, 30.0).begun == 0.0


class _Endless(BaseHTTPRequestHandler):
    """Answers with a token every 20 ms, or not at all, until the client goes."""

    def do_POST(self) -> None:
        server: Any = self.server
        self.rfile.read(int(self.headers["Content-Length"]))
        if server.silent:
            server.closed.wait(10)
            return
        self.send_response(200)
        self.end_headers()
        tokens = 0
        with suppress(OSError):
            while not server.closed.is_set():
                tokens += 1
                meta = {"completion_tokens": tokens, "cached_tokens": 0}
                event = {"output_ids": [tokens], "meta_info": meta}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                time.sleep(0.02)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endless() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Endless)
    server.silent, server.closed = False, threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.closed.set()
    server.shutdown()
    thread.join()
    server.server_close()


def as_far_as_it_came(answer: AnswerTimes) -> bool:
    """Whether it was cut off and has all that came before: on a busy machine maybe nothing."""
    count = len(answer.times)
    return not answer.whole and answer.tokens == list(range(1, count + 1))


def test_what_has_not_ended_is_cut_off(endless: Any) -> None:
    began = time.perf_counter()
    answers = stream(endless.server_port, [b"{}"] * 2, at_s=[0.0, 0.2], cut_s=0.5, timeout_s=30.0)
    assert time.perf_counter() - began >= 0.5
    assert len(answers) == 2 and all(map(as_far_as_it_came, answers))
    heard: list[int] = []
    found, until = converse(
        endless.server_port,
        2,
        lambda place: b"{}",
        lambda place, ids: heard.append(place),
        duration_s=0.3,
        timeout_s=30.0,
        cut=True,
    )
    assert until > began
    assert [len(of_client) for of_client in found] == [1, 1] and sorted(heard) == [0, 1]
    assert all(as_far_as_it_came(one) for (one,) in found)
    endless.silent = True
    (silent,) = stream(endless.server_port, [b"{}"], at_s=[0.0], cut_s=0.2, timeout_s=30.0)
    assert silent.times == silent.tokens == [] and not silent.whole


def test_what_was_cut_off_may_lack_its_end_but_not_be_refused() -> None:
    head = b"HTTP/1.1 200 OK\r\n\r\n"
    assert parse(0.5, [], [], whole=False) == AnswerTimes(0.5, [], [], 0, whole=False)
    assert parse(0.5, [1.0], [head], whole=False).times == []
    with pytest.raises(RequestError, match="busy"):
        parse(0.5, [1.0], [b"HTTP/1.1 503 Unavailable\r\n\r\nbusy"], whole=False)
