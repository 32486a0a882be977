# SPDX-License-Identifier: Apache-2.0
"""A real model in real conversations, over OpenAI's API: pat's tokens are the stock backend's."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from kit import seeds
from kit.chats import Library, say, tool

from .adapters import RANK, TARGETS, make_adapter
from .server import (
    Answer,
    Config,
    ServingServer,
    check_adapters_share_no_kv,
    disagreements,
)
from .workloads import random_prompt

NEW_TOKENS = 8
COLOURS = ("red", "blue")
SCHEMA = tool("open", "ticket")["function"]["parameters"] | {"additionalProperties": False}
GRAMMAR = {"type": "json_schema", "json_schema": {"name": "ticket", "schema": SCHEMA}}
LIBRARY = Library(pages=3, chars=350)
EACH = 11  # kind of conversation
MORE = (("samples", 3), ("streams", 8), ("schemas", 4), ("adapters", 8), ("seeds", 1))
AGAIN = say("user", "Say that again for a child of six years.")


def requests() -> dict[str, list[dict[str, Any]]]:
    """Bodies of a hundred requests, by what they are about."""
    more = LIBRARY.documents(first=200)
    plain = {name: islice(kind(), EACH) for name, kind in LIBRARY.kinds().items()}
    found = {name: [{"messages": chat} for chat in chats] for name, chats in plain.items()}
    of = {name: [{"messages": chat} for chat in islice(more, count)] for name, count in MORE}
    colours = zip(of["adapters"], cycle(COLOURS))
    return found | {
        "samples": [body | {"n": 3} for body in of["samples"]],
        "streams": [body | {"stream": True} for body in of["streams"]],
        "schemas": [
            body | {"response_format": GRAMMAR, "max_tokens": 20} for body in of["schemas"]
        ],
        "adapters": [body | {"lora_path": colour} for body, colour in colours],
        "seeds": [of["seeds"][0] | each for each in seeds.fields(range(6))],
    }


def ask(server: ServingServer, body: dict[str, Any]) -> list[Answer]:
    """Each sample's, with the two likeliest tokens' log-probabilities beside its own."""
    fields = {"model": "", "temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": True}
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        data=json.dumps(fields | {"top_logprobs": 2} | body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        lines = answer.read().decode().removesuffix("data: [DONE]\n\n").strip().split("\n\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [choice for part in parts for choice in part["choices"]]
    by_sample = {choice["index"]: [] for choice in choices}
    for choice in choices:
        by_sample[choice["index"]].append(choice)
    return [joined(by_sample[index]) for index in sorted(by_sample)]


def joined(parts: Sequence[dict[str, Any]]) -> Answer:
    """An answer of its only part or, streamed, of many; its tokens are text."""
    entries = [each for part in parts for each in (part["logprobs"] or {}).get("content", ())]
    values = [(each, *each["top_logprobs"]) for each in entries]
    return Answer(
        tokens=tuple(each["token"] for each in entries),
        logprobs=tuple(one["logprob"] for each in values for one in each),
        cached_tokens=0,
        finish_reason=parts[-1]["finish_reason"],
    )


Answers = dict[str, list[Answer]]


def ask_all(server: ServingServer) -> Answers:
    """Two rounds: all at once; and the next turns of those that asked about pages.

    Before, what several share is prefilled: all at once, most of them would prefill it again."""
    first = requests()
    for name, prefixes in (("documents", 3), ("tools", 3), ("turns", 3), ("adapters", 6)):
        for body in first[name][:prefixes]:
            ask(server, body | {"max_tokens": 1})
    with ThreadPoolExecutor(128) as pool:

        def answers(asked: dict[str, list[dict[str, Any]]]) -> Answers:
            futures = {
                name: [pool.submit(ask, server, body) for body in bodies]
                for name, bodies in asked.items()
            }
            return {
                name: [answer for future in each for answer in future.result()]
                for name, each in futures.items()
            }

        found = answers(first)
        pairs = zip(first["documents"], found["documents"], strict=True)
        second = [
            {"messages": [*body["messages"], say("assistant", "".join(one.tokens)), AGAIN]}
            for body, one in pairs
        ]
        return found | answers({"next turns": second})


@pytest.fixture(scope="module")
def config(smollm2_folder: Path, fault: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of pat's server; ``fault`` is what it does wrong."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = [
        f"{name}={make_adapter(folder / name, smollm2_folder, seed=seed)}"
        for seed, name in enumerate(COLOURS)
    ]
    args = ("--enable-lora", "--lora-backend", "torch_native", "--max-loras-per-batch", "3")
    args += ("--max-lora-rank", str(RANK), "--lora-target-modules", *TARGETS)
    args += ("--lora-paths", *paths, "--enable-custom-logit-processor")
    env = (("PAT_TEETH_UNPINNED", "1"), ("PAT_TEETH_FAULT", str(fault)))
    return Config("real", args=args, env=env, plugins=True, tokenizer=True)


@pytest.fixture(scope="module")
def stock(
    config: Config, smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Answers:
    of_stock = replace(config, name="stock-real", backend="torch_native")
    with ServingServer(smollm2_folder, of_stock, tmp_path_factory.mktemp("stock-real")) as server:
        return ask_all(server)


@pytest.fixture(scope="module")
def server(
    config: Config, smollm2_folder: Path, stock: Answers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServingServer]:
    """Started when the stock one has ended."""
    with ServingServer(smollm2_folder, config, tmp_path_factory.mktemp("real")) as server:
        yield server


@pytest.mark.timeout(1200)  # two servers, on a busy machine
def test_answers_equal_the_stock_backends(
    server: ServingServer, stock: Answers, fault: Path
) -> None:
    fault.write_text("")
    answers, counted = server.counted(ask_all, server)
    found = {name: disagreements(answers[name], stock[name]) for name in stock}
    assert not any(found.values()), found
    assert sum(map(len, answers.values())) >= 100
    # Of the base are steps with one request alone, as the last ones of a round may be.
    assert counted.packed_steps > 0.8 * (
        counted.decode_steps + counted.base_forwards.get("small_batch", 0)
    )
    assert counted.kv_tokens_read < 0.7 * counted.kv_tokens_unpacked
    assert not counted.fallbacks
    assert len({answer.tokens for answer in answers["seeds"]}) > 1
    assert all(answer.tokens[0].startswith("{") for answer in answers["schemas"])


@pytest.mark.parametrize("name", ["wrong_scale", "drop_pack"])
def test_faults_show(name: str, server: ServingServer, stock: Answers, fault: Path) -> None:
    """In the answers about pages, which all share one."""
    bodies = requests()["documents"]
    fault.write_text(name)
    try:
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = [answer for each in pool.map(partial(ask, server), bodies) for answer in each]
    finally:
        fault.write_text("")
    assert disagreements(answers, stock["documents"]) != []


def test_adapters_share_no_kv(server: ServingServer, fault: Path) -> None:
    fault.write_text("")
    check_adapters_share_no_kv(server, random_prompt(seed=21, length=150), 3)
