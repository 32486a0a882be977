# SPDX-License-Identifier: Apache-2.0
"""What the examples share: their arguments, and the summary of the K/V reads that pat saved."""

from __future__ import annotations

import argparse
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_pat.demo.counters import Counters, read_counters


def arguments(doc: str | None, *, max_tokens: int) -> argparse.ArgumentParser:
    """The arguments of every example; ``doc`` is the program's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the SGLang server")
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
    """Print, at the end, what pat saved in between; say so if the server has no such counters.

    The counters are the server's: what other clients asked meanwhile is in them, too.
    """
    why_not = _why_no_counters(url)
    before = Counters() if why_not else read_counters(url)
    yield
    print(f"\nWhat was saved: {why_not or summary(read_counters(url) - before)}")


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


def _why_no_counters(url: str) -> str | None:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
    except urllib.error.HTTPError as error:
        return f"unknown, {url}/metrics answers {error.code}; start SGLang with --enable-metrics"
    except urllib.error.URLError as error:
        raise SystemExit(f"no server at {url} ({error.reason}); see examples/launch.sh") from None
    if "sglang_pat_" not in metrics:
        return "unknown, this server has no counters of pat; start it with --attention-backend pat"
    return None
