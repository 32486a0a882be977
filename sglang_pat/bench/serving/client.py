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

from sglang_pat.bench.serving.workload import Prompt

_EVENT = re.compile(rb'data: (\{[^\n]*"completion_tokens":\s*(\d+)[^\n]*\})\n')
_TOKEN_IDS = re.compile(rb'"output_ids":\s*\[([\d,\s]*)\]')
_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')
_SERVER = re.compile(rb'"weight_version":\s*"([^"]*)"')
_PREFILL_BEGAN = re.compile(rb'"forward_entry_time":\s*([\d.]+)')
_PREFILL_ENDED = re.compile(rb'"prefill_finished_time":\s*([\d.]+)')
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked\r\n", re.IGNORECASE)
_CHUNK_HEAD = re.compile(rb"(?:\r\n)?([0-9a-fA-F]+)[^\r\n]*\r\n")


class RequestError(RuntimeError):
    """The server refused a request or did not finish it."""


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """What arrived for one request: tokens so far after each event, and when, in seconds of one
    clock. ``sent`` is when the request was written, ``cached`` how many prompt tokens the server
    had in its cache, ``server`` its ``--weight-version``, which tells servers behind a router
    apart. Not ``whole``: it was cut off, maybe before its first event. ``prefill``: when the
    server's scheduler began the prefill and when it had the result, if the server says so."""

    sent: float
    times: list[float]
    tokens: list[int]
    cached: int
    whole: bool = True
    server: str = ""
    prefill: tuple[float, float] | None = None


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


def stream(
    port: int,
    bodies: Sequence[bytes],
    *,
    at_s: Sequence[float] | None = None,
    cut_s: float | None = None,
    timeout_s: float,
) -> list[AnswerTimes]:
    """Send requests to the server at ``port``, all at once or each at its time from now; with
    ``at_s``, cut off what has not ended ``cut_s`` seconds from now.

    Raises:
        RequestError: one was refused or broken off, or not all have ended after ``timeout_s``.
    """
    return asyncio.run(_stream(port, bodies, at_s, cut_s, timeout_s))


async def _stream(
    port: int,
    bodies: Sequence[bytes],
    at_s: Sequence[float] | None,
    cut_s: float | None,
    timeout_s: float,
) -> list[AnswerTimes]:
    loop = asyncio.get_running_loop()

    async def later(at: float, body: bytes) -> _Exchange:
        await asyncio.sleep(at - (time.perf_counter() - started))
        exchange = await _connect(loop, port)
        exchange.send(body)
        await exchange.end(None if cut_s is None else started + cut_s)
        return exchange

    async def all_of_them() -> list[_Exchange]:
        if at_s is not None:
            return list(await asyncio.gather(*map(later, at_s, bodies)))
        exchanges = [await _connect(loop, port) for _ in bodies]
        for exchange, body in zip(exchanges, bodies, strict=True):
            exchange.send(body)
        await asyncio.gather(*(exchange.ended for exchange in exchanges))
        return exchanges

    started = time.perf_counter()
    try:
        exchanges = await asyncio.wait_for(all_of_them(), timeout_s)
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
    cut: bool = False,
) -> tuple[list[list[AnswerTimes]], float]:
    """``places`` clients of the server at ``port``, each of which sends a request as soon as its
    last one has been answered, for ``duration_s`` seconds; then the last answers are waited for, or
    ``cut`` off.

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
            await exchange.end(until if cut else None)
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
        self._whole = True

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

    async def end(self, cut_at: float | None) -> None:
        """Wait for the end of the answer; at ``cut_at``, by ``time.perf_counter``, close the
        connection if it has not come."""
        if cut_at is None:
            await self.ended
            return
        left_s = max(0.0, cut_at - time.perf_counter())
        await asyncio.wait([self.ended], timeout=left_s)
        if not self.ended.done():
            self._whole = False
            self._transport.abort()
            await self.ended

    def answer_times(self) -> AnswerTimes:
        epoch = time.time() - time.perf_counter()
        return parse(self._sent, self._times, self._parts, whole=self._whole, epoch=epoch)

    def token_ids(self) -> list[int]:
        """Of the answer, if the server streams with ``--incremental-streaming-output``."""
        events = _TOKEN_IDS.findall(b"".join(self._parts))
        return [int(token) for event in events for token in event.split(b",") if token.strip()]


async def _connect(loop: asyncio.AbstractEventLoop, port: int) -> _Exchange:
    _, exchange = await loop.create_connection(lambda: _Exchange(loop), "127.0.0.1", port)
    return exchange


def parse(
    sent: float,
    times: Sequence[float],
    parts: Sequence[bytes],
    *,
    whole: bool = True,
    epoch: float = 0.0,
) -> AnswerTimes:
    """The events in an answer of which ``parts`` arrived at ``times``. An event has arrived when
    its last byte has. Not ``whole``: the client cut it off. ``epoch``: of the clock of ``times``,
    in seconds since 1970, which the server's times count from. Raises RequestError if the answer
    is not a finished stream, or one that may have been cut off."""
    arrived = b"".join(parts)
    answer, place = _without_chunks(arrived)
    events = list(_EVENT.finditer(answer))
    status = answer.split(b"\r\n", 1)[0]
    ended = b"data: [DONE]" in answer and events
    refused = answer and b" 200 " not in status
    if refused or b'"type":"abort"' in answer or (whole and not ended):
        shown = (answer[:300] + b" ... " + answer[-300:]).decode(errors="replace")
        raise RequestError(f"the server did not answer a request with a whole stream: {shown!r}")
    ends = list(accumulate(map(len, parts)))
    last = events[-1][1] if events else b""
    cached, server = _CACHED.search(last), _SERVER.search(last)
    began, finished = _PREFILL_BEGAN.search(last), _PREFILL_ENDED.search(last)
    prefill = None
    if began and finished:
        prefill = (float(began[1]) - epoch, float(finished[1]) - epoch)
    return AnswerTimes(
        sent=sent,
        times=[times[bisect_left(ends, place(event.end()))] for event in events],
        tokens=[int(event[2]) for event in events],
        cached=int(cached[1]) if cached else 0,
        whole=whole,
        server=server[1].decode() if server else "",
        prefill=prefill,
    )


def _without_chunks(arrived: bytes) -> tuple[bytes, Callable[[int], int]]:
    """An answer without the frames of HTTP's chunks, and where an end in it was before.

    A server sends each event as a chunk; a router may divide the stream anywhere.
    """
    head = arrived.find(b"\r\n\r\n") + 4
    if head < 4 or not _CHUNKED.search(arrived, 0, head):
        return arrived, lambda end: end
    pieces, ends, removed = [arrived[:head]], [head], [0]  # bytes of frames before each piece
    at = head
    while (frame := _CHUNK_HEAD.match(arrived, at)) and (size := int(frame[1], 16)):
        at = frame.end() + size
        pieces.append(arrived[frame.end() : at])
        removed.append(frame.end() - ends[-1])
        ends.append(ends[-1] + len(pieces[-1]))
    return b"".join(pieces), lambda end: end + removed[bisect_left(ends, end)]
