# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on two servers, on one GPU; the decode server has a radix cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving.disaggregation import Pair, serve_pair
from serving.server import Config
from serving.workloads import random_prompt

from .agreement import NEW_TOKENS, Distance, Load, answers, forced_logprobs
from .fleet import COMPARED, Fleet

STOCK = "ratio4-fa3"
SERVERS = (STOCK,)
SYSTEM = random_prompt(seed=81, length=800)
LOAD = Load(tuple(SYSTEM + random_prompt(seed=90 + i, length=40) for i in range(10)))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="needs nixl (see README.md)"
)


@pytest.fixture(scope="module")
def pair(server: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    config = Config("pair", args=COMPARED, device="cuda")
    radix = ("--disaggregation-decode-enable-radix-cache",)
    folder: Path = tmp_path_factory.mktemp("pair")
    with serve_pair(server.model("ratio4"), folder, config, radix) as found:
        yield found


def test_a_decode_server_with_its_radix_cache(server: Fleet, pair: Pair) -> None:
    theirs = server(STOCK)
    texts = answers(theirs, LOAD)
    wanted = forced_logprobs(theirs, LOAD, texts)
    for turn in range(2):
        before = pair.decode.counters()
        forced = pair.forced_logprobs(LOAD.prompts, [text.tokens for text in texts])
        counted = pair.decode.counters() - before
        found = Distance.between(forced, wanted)
        print(f"turn {turn}: {found}, {counted}")
        assert found.small
        assert counted.decode_steps >= NEW_TOKENS - 2
        assert counted.packed_steps >= NEW_TOKENS // 2  # requests arrive one after another
        assert counted.kv_tokens_read < counted.kv_tokens_unpacked
    assert pair.prefill.counters().decode_steps == 0
