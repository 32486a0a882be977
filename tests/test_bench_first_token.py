# SPDX-License-Identifier: Apache-2.0
"""Where the time to the first token goes: parsed, divided and shown."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_pat.bench.serving.client import AnswerTimes, parse
from sglang_pat.bench.serving.first_token import first_token_table
from sglang_pat.bench.serving.timing import first_token_ms


def answer(sent: float, *edges: float) -> AnswerTimes:
    """``edges``: when its prefill began and ended, and when its only event came."""
    *prefill, first = edges
    began, ended = prefill or (0.0, 0.0)
    return AnswerTimes(sent, [first], [1], 0, prefill=(began, ended) if prefill else None)


def test_the_servers_times_are_brought_to_the_clients_clock() -> None:
    meta = b'"completion_tokens":1,"forward_entry_time":1000.75,"prefill_finished_time": 1001.5'
    parts = [b"HTTP/1.1 200 OK\r\n\r\n" + b"data: {%s}\n\ndata: [DONE]\n\n" % meta]
    assert parse(0.25, [2.0], parts, epoch=1000.0).prefill == (0.75, 1.5)
    without = [parts[0].replace(b"prefill_finished_time", b"another_time")]
    assert parse(0.25, [2.0], without, epoch=1000.0).prefill is None


def test_parts_follow_one_another_and_late_ones_are_a_twentieth() -> None:
    quick = [answer(float(i), i + 0.010, i + 0.030, i + 0.031) for i in range(38)]
    late = [answer(50.0, 50.5, 50.6, 50.61), answer(60.0, 60.3, 60.6, 60.63)]
    found = first_token_ms([*quick, *late])
    assert found is not None
    means = [found[name] for name in ("waiting", "prefill", "delivery")]
    assert means == pytest.approx([(380 + 800) / 40, (760 + 400) / 40, (38 + 40) / 40])
    assert sum(means) == pytest.approx((38 * 31 + 610 + 630) / 40)
    slow = [found[f"late_{name}"] for name in ("waiting", "prefill", "delivery")]
    assert slow == pytest.approx([400, 200, 20])


def test_answers_without_the_servers_times_are_left_out() -> None:
    assert first_token_ms([answer(0.0, 1.0)]) is None
    assert first_token_ms([AnswerTimes(0.0, [], [], 0, whole=False)]) is None
    found = first_token_ms([answer(0.0, 9.0), answer(0.0, 1.0, 2.0, 4.0)])
    assert found is not None and found["delivery"] == found["late_delivery"] == 2000


def test_the_table_has_a_line_for_every_load_and_backend_that_says() -> None:
    known = first_token_ms([answer(0.0, 0.001, 0.003, 0.007)])
    about = {"subject": "toolagent", "unit": "requests/s", "load": 4.0}
    rows = [
        SimpleNamespace(**about, backend="pat", first_token=known),
        SimpleNamespace(**about, backend="fa3", first_token=None),
    ]
    title, heads, line = first_token_table(rows)[1:]
    assert "of all, then of the latest 5 %" in title and heads.split()[:2] == ["waiting", "prefill"]
    assert line.split() == [*["toolagent", "4", "requests/s", "pat"], *["1.0", "2.0", "4.0"] * 2]
    assert first_token_table(rows[1:]) == []
