# SPDX-License-Identifier: Apache-2.0
"""K/V in fp8_e4m3, by the option and by a checkpoint with scales of each layer: pat packs, and is
as near to fa3 and to flashinfer as these are to each other."""

from __future__ import annotations

import pytest

from .agreement import LOADS, PEERS, answers
from .fleet import Fleet
from .test_agreement import check_beside_peers

KINDS = ("ratio4-{}-fp8_e4m3", "scaled4-{}")  # the option alone; the checkpoint's own
SERVERS = tuple(kind.format(name) for kind in KINDS for name in (*PEERS, "pat"))


@pytest.mark.parametrize("load_name", ["shared", "multi_level", "disjoint"])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_of_a_continuation(kind: str, load_name: str, server: Fleet) -> None:
    check_beside_peers(kind, load_name, LOADS[load_name], server)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_packed_and_nothing_is_left_to_the_base(kind: str, server: Fleet) -> None:
    one = server(kind.format("pat"))
    before = one.counters()
    answers(one, LOADS["multi_level"])
    counted = one.counters() - before
    assert counted.packed_steps > 0
    assert not counted.fallbacks and not counted.base_layers
    assert "attention layers, K/V in float8_e4m3fn" in one.text()
    assert "prefill on SGLang's own attention (FlashAttentionBackend)" in one.text()
