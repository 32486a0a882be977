# SPDX-License-Identifier: Apache-2.0
"""Streaming requests from one process, cheap enough for hundreds at once.

While a run lasts, bytes and the times of their arrival are kept and nothing is parsed: 256 requests
at steps of 10 ms are 25,000 events a second, which asyncio's plain protocols take on one core where
an HTTP library does not. SGLang's own HTTP process needs some 75 us for an event, so beyond about
100 requests it, not the engine, decides how fast tokens arrive: then stream every few tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from benchmarks.serving.workload import Prompt

_EVENT = re.compile(rb'data: (\{[^\n]*"completion_tokens":\s*(\d+)[^\n]*\})\n')
_TOKEN_IDS = re.compile(rb'"output_ids":\s*\[([\d,\s]*)\]')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')


class RequestError(RuntimeError):
    """The server refused a request or did not finish it."""


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """What arrived for one request: tokens so far after each event, and when, in seconds of one
    clock. ``sent`` is when the request was written, ``cached`` how many prompt tokens the server
    had in its cache."""

    sent: float
    times: list[float]
    tokens: list[int]
    cached: int


def body(prompt: Prompt, output_tokens: int, stream_interval: int) -> bytes:
    """The JSON of a greedy request of exactly ``output_tokens`` tokens."""
    parameters = {
        "temperature": 0,
        "ignore_eos": True,
        "max_new_tokens": output_tokens,
        "stream_interval": stream_interval,
    }
    request = {"input_ids": prompt, "sampling_params": parameters, "stream": True}
    return json.dumps(request).encode()


def stream(port: int, bodies: Sequence[bytes], *, timeout_s: float) -> list[AnswerTimes]:
    """Send requests to the server at ``port``, all at once.

    Raises:
        RequestError: one was refused or broken off, or not all have ended after ``timeout_s``.
    """

    async def all_of_them() -> list[_Exchange]:
        loop = asyncio.get_running_loop()
        exchanges = [await _connect(loop, port) for _ in bodies]
        for exchange, body in zip(exchanges, bodies, strict=True):
            exchange.send(body)
        await asyncio.gather(*(exchange.ended for exchange in exchanges))
        return exchanges

    try:
        exchanges = asyncio.run(asyncio.wait_for(all_of_them(), timeout_s))
    except asyncio.TimeoutError:
        raise RequestError(f"requests have not ended after {timeout_s:.0f} s") from None
    return [exchange.answer_times() for exchange in exchanges]


def converse(
    port: int,
    places: int,
    next_body: Callable[[int], bytes],
    answered: Callable[[int, list[int]], None],
    *,
    duration_s: float,
    timeout_s: float,
) -> tuple[list[list[AnswerTimes]], float]:
    """``places`` clients of the server at ``port``, each of which sends a request as soon as its
    last one has been answered, for ``duration_s`` seconds; then the last answers are waited for.

    ``next_body(place)`` makes the request of a client, ``answered(place, token_ids)`` hears of each
    answer. Returns the answers by client, and when the last request was allowed, by their clock.

    Raises:
        RequestError: one was refused or broken off, or not all have ended ``timeout_s`` after that.
    """

    async def one(place: int, until: float) -> list[AnswerTimes]:
        loop = asyncio.get_running_loop()
        found: list[AnswerTimes] = []
        while not found or time.perf_counter() < until:
            request = next_body(place)
            exchange = await _connect(loop, port)
            exchange.send(request)
            await exchange.ended
            found.append(exchange.answer_times())
            answered(place, exchange.token_ids())
        return found

    async def everyone() -> tuple[list[list[AnswerTimes]], float]:
        until = time.perf_counter() + duration_s
        talks = asyncio.gather(*(one(place, until) for place in range(places)))
        try:
            return list(await asyncio.wait_for(talks, duration_s + timeout_s)), until
        except asyncio.TimeoutError:
            raise RequestError(
                f"requests have not ended {timeout_s:.0f} s after the last was sent"
            ) from None

    return asyncio.run(everyone())


class _Exchange(asyncio.Protocol):
    """One request and its answer over a connection that the server closes at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self._sent = 0.0
        self._times: list[float] = []
        self._parts: list[bytes] = []
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, body: bytes) -> None:
        head = (
            "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._sent = time.perf_counter()
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._times.append(time.perf_counter())
        self._parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def answer_times(self) -> AnswerTimes:
        return parse(self._sent, self._times, self._parts)

    def token_ids(self) -> list[int]:
        """Of the answer, if the server streams with ``--incremental-streaming-output``."""
        events = _TOKEN_IDS.findall(b"".join(self._parts))
        return [int(token) for event in events for token in event.split(b",") if token.strip()]


async def _connect(loop: asyncio.AbstractEventLoop, port: int) -> _Exchange:
    _, exchange = await loop.create_connection(lambda: _Exchange(loop), "127.0.0.1", port)
    return exchange


def parse(sent: float, times: Sequence[float], parts: Sequence[bytes]) -> AnswerTimes:
    """The events in an answer of which ``parts`` arrived at ``times``. An event has arrived when
    its last byte has. Raises RequestError if the answer is not a finished stream."""
    answer = b"".join(parts)
    events = list(_EVENT.finditer(answer))
    refused = b" 200 " not in answer.split(b"\r\n", 1)[0]
    ended = b"data: [DONE]" in answer and events
    if refused or b'"type":"abort"' in answer or not ended:
        shown = (answer[:300] + b" ... " + answer[-300:]).decode(errors="replace")
        raise RequestError(f"the server did not answer a request with a whole stream: {shown!r}")
    ends = list(accumulate(map(len, parts)))
    cached = _CACHED.search(events[-1][1])
    return AnswerTimes(
        sent=sent,
        times=[times[bisect_left(ends, event.end())] for event in events],
        tokens=[int(event[2]) for event in events],
        cached=int(cached[1]) if cached else 0,
    )
