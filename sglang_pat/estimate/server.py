# SPDX-License-Identifier: Apache-2.0
"""What a running server says of itself: pat's counters, or what SGLang's own gauges tell."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_pat.estimate.requests import InputError
from sglang_pat.stats import NAMESPACE

TIMEOUT_S = 10.0
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# Of SGLang: of the decode batch the sum of its lengths, and of the K/V pool the slots that running
# requests hold, each once.
_LENGTHS, _HELD = "sglang:decode_sum_seq_lens", "sglang:kv_used_tokens"
_RUNNING, _CACHE_HITS = "sglang:num_running_reqs", "sglang:cache_hit_rate"
_TOKEN_TIME = "sglang:inter_token_latency_seconds"
Fetch = Callable[[str], str]
Sample = tuple[str, dict[str, str], float]


@dataclass(frozen=True, slots=True)
class Observed:
    """``read`` and ``unpacked``: K/V tokens a decode step, of one layer and KV head, with pat and
    without; None where nothing can be said. ``by_pat``: pat counted them; else ``read`` is the
    least that any packing could read, by SGLang's gauges. ``period``: what the numbers are of.
    ``steps`` and ``packed``: decode steps of pat, and those in which requests shared. ``running``:
    requests at a time, in the readings with any. ``token_s``: seconds between tokens as SGLang
    measured them. The rest is None where the server does not say.
    """

    url: str
    backend: str
    model: str
    tp: int
    by_pat: bool
    serving: bool
    period: str
    read: float | None = None
    unpacked: float | None = None
    steps: int = 0
    packed: int = 0
    running: float | None = None
    cache_hits: float | None = None
    token_s: float | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    base_forwards: dict[str, int] = field(default_factory=dict)

    @property
    def saved(self) -> float:
        """Share of the K/V reads that pat saves, or could at most."""
        if not self.unpacked or self.read is None:
            return 0.0
        return 1 - self.read / self.unpacked


def samples(exposition: str) -> list[Sample]:
    """Name, labels and value of each line of a ``/metrics`` answer; others are left out."""
    found = []
    for line in exposition.splitlines():
        match = _SAMPLE.match(line.strip())
        if match:
            labels = dict(_LABEL.findall(match[2] or ""))
            try:
                found.append((match[1], labels, float(match[3])))
            except ValueError:
                continue
    return found


def fetch(url: str) -> str:
    """The text behind a URL. Raises OSError."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


def observe(
    url: str,
    seconds: float,
    *,
    get: Fetch = fetch,
    sleep: Callable[[float], None] = time.sleep,
) -> Observed:
    """Read the server for ``seconds``, about once a second.

    Of a server with pat, what its counters grew by in that time; if no decode step ran in it, their
    totals since the start. Of a stock server, the mean of SGLang's gauges.

    Raises InputError for a URL that does not answer or answers without metrics.
    """
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url is {url!r}, must be as http://localhost:30000")
    info = _server_info(url, get)
    readings = [_metrics(url, get)]
    for _ in range(max(0, round(seconds))):
        sleep(1.0)
        readings.append(_metrics(url, get))
    first, last = _sums(readings[0]), _sums(readings[-1])
    common: dict[str, Any] = {
        "url": url,
        "backend": str(info.get("decode_attention_backend") or info.get("attention_backend") or ""),
        "model": str(info.get("model_path") or ""),
        "tp": int(info.get("tp_size") or 1),
        "token_s": _mean_time(first, last),
        "running": _mean_running([_sums(reading).get(_RUNNING) for reading in readings]),
        "cache_hits": last.get(_CACHE_HITS),
    }
    if f"{NAMESPACE}_decode_steps_total" in last:
        return _of_pat(common, first, last, readings[-1], seconds)
    return _of_stock(common, readings, seconds)


def _server_info(url: str, get: Fetch) -> dict[str, Any]:
    for page in ("server_info", "get_server_info"):
        try:
            found = json.loads(get(f"{url}/{page}"))
        except urllib.error.HTTPError:
            continue
        except OSError as error:
            raise InputError(
                f"--url {url} does not answer ({error}): give the address of a running SGLang "
                "server, as http://localhost:30000"
            ) from None
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def _metrics(url: str, get: Fetch) -> list[Sample]:
    try:
        found = samples(get(f"{url}/metrics"))
    except OSError as error:
        raise InputError(
            f"--url {url}: /metrics does not answer ({error}): start the server with "
            "--enable-metrics"
        ) from None
    if not found:
        raise InputError(f"--url {url}: /metrics is empty: start the server with --enable-metrics")
    return found


def _sums(reading: list[Sample]) -> dict[str, float]:
    """Over all label sets: of a server with data parallelism those of all its replicas."""
    totals: defaultdict[str, float] = defaultdict(float)
    for name, _, value in reading:
        totals[name] += value
    return dict(totals)


def _of_pat(
    common: dict[str, Any],
    first: dict[str, float],
    last: dict[str, float],
    reading: list[Sample],
    seconds: float,
) -> Observed:
    def count(name: str, since: dict[str, float]) -> float:
        key = f"{NAMESPACE}_{name}_total"
        return last.get(key, 0.0) - since.get(key, 0.0)

    since = first if count("decode_steps", first) > 0 else {}
    steps = count("decode_steps", since)
    period = f"the last {seconds:g} s" if since else "the time since its start"
    return Observed(
        **common,
        by_pat=True,
        serving=last.get(f"{NAMESPACE}_serving", 1.0) > 0,
        period=period,
        read=count("kv_tokens_read", since) / steps if steps else None,
        unpacked=count("kv_tokens_unpacked", since) / steps if steps else None,
        steps=int(steps),
        packed=int(count("packed_steps", since)),
        fallbacks=_labelled(reading, "fallbacks", "reason"),
        base_forwards=_labelled(reading, "base_forwards", "kind"),
    )


def _labelled(reading: list[Sample], name: str, label: str) -> dict[str, int]:
    found: defaultdict[str, int] = defaultdict(int)
    for sample, labels, value in reading:
        if sample == f"{NAMESPACE}_{name}_total" and value:
            found[labels.get(label, "")] += int(value)
    return dict(found)


def _of_stock(common: dict[str, Any], readings: list[list[Sample]], seconds: float) -> Observed:
    decoding = [
        sums
        for sums in map(_sums, readings)
        if sums.get(_LENGTHS, 0) > 0 and sums.get(_RUNNING, 2) >= 1 and sums.get(_HELD, 0) > 0
    ]
    lengths = _mean([sums[_LENGTHS] for sums in decoding])
    held = _mean([min(sums[_HELD], sums[_LENGTHS]) for sums in decoding])
    period = f"{len(decoding)} of {len(readings)} readings in {seconds:g} s"
    return Observed(
        **common, by_pat=False, serving=False, period=period, read=held, unpacked=lengths
    )


def _mean_time(first: dict[str, float], last: dict[str, float]) -> float | None:
    """Seconds between tokens while the server was read, else since its start."""
    names = (f"{_TOKEN_TIME}_sum", f"{_TOKEN_TIME}_count")
    if names[1] not in last:
        return None
    since = first if last[names[1]] > first.get(names[1], 0) else {}
    total, count = (last.get(name, 0.0) - since.get(name, 0.0) for name in names)
    return total / count if count else None


def _mean_running(readings: list[float | None]) -> float | None:
    """Requests at a time while there were any; None where the server does not say."""
    known = [value for value in readings if value is not None]
    return _mean([value for value in known if value >= 1]) or (0.0 if known else None)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
