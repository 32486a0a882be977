# SPDX-License-Identifier: Apache-2.0
"""Adapters, a cache of two levels, and a pair of servers for prefill and decode, each beside a
stock server."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from serving.server import Config, ServingServer, check_adapters_share_no_kv, greedy
from serving.workloads import random_prompt

from sglang_pat.demo.server import reserve_port

from .agreement import NEW_TOKENS, Load, answers, beside, equal_share, forced_logprobs
from .fleet import ADAPTERS, COMPARED, SMALL_POOL, Fleet

ADAPTED, STOCK_ADAPTED = "ratio4-pat-adapters", "ratio4-fa3-adapters"
TWO_LEVELS, STOCK = "ratio4-pat-two_levels", "ratio4-fa3"
SERVERS = (ADAPTED, STOCK_ADAPTED, TWO_LEVELS, STOCK)
COLOURS = (*ADAPTERS, None)
SYSTEM = random_prompt(seed=31, length=1000)


def load_of(requests: int) -> Load:
    return Load(tuple(SYSTEM + random_prompt(seed=40 + i, length=30) for i in range(requests)))


def test_a_batch_of_several_adapters(server: Fleet) -> None:
    """And the bare model."""
    load = replace(load_of(36), adapters=COLOURS * 12)
    theirs = server(STOCK_ADAPTED)
    texts = answers(theirs, load)
    found, counted = beside(server(ADAPTED), load, texts, forced_logprobs(theirs, load, texts))
    assert found.small
    assert counted.packed_steps > 0  # the requests of an adapter share its system prompt
    assert not [reason for reason in counted.fallbacks if reason.startswith("layer")]
    # Had the adapters done nothing, or all the same, this would have shown nothing.
    bare = answers(theirs, replace(load, adapters=None))
    adapted = [i for i in range(36) if COLOURS[i % 3] is not None]
    assert equal_share([texts[i] for i in adapted], [bare[i] for i in adapted]) < 0.5


def test_adapters_share_no_kv(server: Fleet) -> None:
    check_adapters_share_no_kv(server(ADAPTED), random_prompt(seed=32, length=500), 12)


def test_nodes_that_were_evicted_to_the_host_and_loaded_back(server: Fleet) -> None:
    """They answer right, and pack."""
    load, ours, theirs = load_of(8), server(TWO_LEVELS), server(STOCK)
    texts = answers(theirs, load)
    wanted = forced_logprobs(theirs, load, texts)
    assert beside(ours, load, texts, wanted)[0].small
    for _ in range(2):
        for i in range(SMALL_POOL // 1000 + 1):  # prompts that only take room
            ours.generate([random_prompt(seed=70 + i, length=1000)], 1)
        body = {"input_ids": load.prompts[0], "sampling_params": greedy(1)}
        details = ours.post("/generate", body)["meta_info"]["cached_tokens_details"]
        assert details and details["host"] >= len(SYSTEM), "not evicted, or not loaded back"
        found, counted = beside(ours, load, texts, wanted)
        assert found.small
        assert counted.packed_steps >= NEW_TOKENS - 8  # requests do not all begin at once
        assert counted.kv_tokens_read < 0.5 * counted.kv_tokens_unpacked
        assert not counted.fallbacks


class Pair(ServingServer):
    """A decode server with its radix cache, which gets K/V over NIXL from ``prefill``, another
    server; no router between. Both get every request, with a room where they meet. The prefill
    server samples the first token, the decode server all others."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._port, self._rooms = reserve_port(), count(1, 1000)  # SGLang counts on in a batch
        common = ("--disaggregation-transfer-backend", "nixl")
        common += ("--disaggregation-bootstrap-port", str(self._port), "--disaggregation-mode")

        def config(mode: str, *more: str) -> Config:
            env = (("SGLANG_HOST_IP", "127.0.0.1"),)  # else it looks for a network
            return Config("pair", args=(*COMPARED, *common, mode, *more), env=env, device="cuda")

        self.prefill = ServingServer(model, config("prefill"), folder / "prefill")
        radix = "--disaggregation-decode-enable-radix-cache"
        super().__init__(model, config("decode", radix), folder / "decode")

    def post(self, path: str, body: Any = None, **options: Any) -> Any:
        if path != "/generate":
            return super().post(path, body, **options)
        body = body | {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._port}
        body["bootstrap_room"] = next(self._rooms)
        rest, parameters = body, body["sampling_params"]
        if "custom_params" in parameters:  # tokens are forced, and each server counts for itself
            forced = {"forced": parameters["custom_params"]["forced"][1:]}
            rest = body | {"sampling_params": parameters | {"custom_params": forced}}
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(self.prefill.post, path, body)
            answer = super().post(path, rest, **options)
            first.result()
        return answer

    def close(self) -> None:
        self.stop()
        self.prefill.stop()


@pytest.fixture
def pair(server: Fleet, tmp_path: Path) -> Iterator[Pair]:
    with closing(Pair(server.model("ratio4"), tmp_path)) as both:
        both.prefill.start()
        both.start()
        both.prefill.wait_until_ready()
        both.wait_until_ready()
        yield both


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl (see README.md)")
def test_a_decode_server_with_its_radix_cache(server: Fleet, pair: Pair) -> None:
    load, theirs = load_of(10), server(STOCK)
    texts = answers(theirs, load)
    wanted = forced_logprobs(theirs, load, texts)
    for _ in range(2):
        found, counted = beside(pair, load, texts, wanted)
        assert found.small
        assert counted.decode_steps >= NEW_TOKENS - 2
        assert counted.packed_steps >= NEW_TOKENS // 2  # requests arrive one after another
        assert counted.kv_tokens_read < counted.kv_tokens_unpacked
    assert pair.prefill.counters().decode_steps == 0
