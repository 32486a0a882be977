# SPDX-License-Identifier: Apache-2.0
"""What the examples share: their arguments, and the summary: time, and the K/V reads saved."""

from __future__ import annotations

import argparse
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sglang_pat.demo.counters import Counters, read_counters


def arguments(doc: str | None, *, max_tokens: int) -> argparse.ArgumentParser:
    """The arguments of every example; ``doc`` is the program's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:30000",
        type=lambda url: url.rstrip("/"),
        help="of the SGLang server",
    )
    parser.add_argument("--model", default="default", help="SGLang serves one model, by any name")
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, help=f"of an answer (default: {max_tokens})"
    )
    return parser


def first_line(text: str, width: int = 72) -> str:
    """The beginning of an answer, for a table."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


@contextmanager
def savings(url: str) -> Iterator[None]:
    """Print, at the end, how long it took and what pat saved in between; say so if the server has
    no such counters.

    Both are the server's: what other clients asked meanwhile is in them, too. To compare the times,
    run the example against a stock server as well.
    """
    why_not = _why_no_counters(url)
    before = Counters() if why_not else read_counters(url)
    requests_before, seconds_before = _token_times(url)
    began = time.perf_counter()
    yield
    seconds = time.perf_counter() - began
    saved = why_not or summary(read_counters(url) - before)
    requests, token_seconds = _token_times(url)
    print(f"\nWhat was saved: {saved}")
    print(f"  seconds in all             {seconds:>12.1f}")
    if requests > requests_before:
        mean_ms = 1e3 * (token_seconds - seconds_before) / (requests - requests_before)
        print(f"  ms per output token        {mean_ms:>12.1f}   after the first, mean of answers")


def summary(counted: Counters) -> str:
    """K/V reads of the decode steps counted; of one layer and KV head, as the counters are."""
    read, unpacked = counted.kv_tokens_read, counted.kv_tokens_unpacked
    if not unpacked:
        other = counted.fallbacks or counted.base_forwards
        return f"nothing, pat served no decode step; SGLang's own attention ran {other}"
    return (
        f"{1 - read / unpacked:.0%} of the K/V reads\n"
        f"  K/V tokens read            {read:>12,}\n"
        f"  without packing            {unpacked:>12,}   {unpacked / read:.1f} x as many\n"
        f"  decode steps               {counted.decode_steps:>12,}\n"
        f"  of which packed            {counted.packed_steps:>12,}"
    )


def _open(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=10)


def _token_times(url: str) -> tuple[float, float]:
    """Answers so far, and the sum of their times per output token after the first, in seconds, as
    the server counts them; zeros without its metrics."""
    totals = {"count": 0.0, "sum": 0.0}
    with suppress(urllib.error.HTTPError), _open(f"{url}/metrics") as answer:
        for name, value in re.findall(
            r"^sglang:request_time_per_output_token_seconds_(count|sum)(?:{.*})? (\S+)$",
            answer.read().decode(),
            re.M,
        ):
            totals[name] += float(value)
    return totals["count"], totals["sum"]


def _why_no_counters(url: str) -> str | None:
    try:
        with _open(f"{url}/metrics") as answer:
            metrics = answer.read().decode()
    except urllib.error.HTTPError as error:
        return f"unknown, {url}/metrics answers {error.code}; start SGLang with --enable-metrics"
    except urllib.error.URLError as error:
        raise SystemExit(f"no server at {url} ({error.reason}); see examples/launch.sh") from None
    if "sglang_pat_" not in metrics:
        return "unknown, this server has no counters of pat; start it with --attention-backend pat"
    return None
