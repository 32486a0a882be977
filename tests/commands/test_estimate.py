# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate``: what prompts share, what a plan reads, and what keeps them apart."""

from __future__ import annotations

import json
import random
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from sglang_pat import Target, cli, plan
from sglang_pat.demo.standin import make_tokenizer
from sglang_pat.estimate import (
    Request,
    common_prefix,
    find_differences,
    reads_of,
    shared_paths,
)

pytestmark = pytest.mark.usefixtures("fresh_shell")
Capture = pytest.CaptureFixture[str]
H200 = Target.h200(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=64)
RULES = "Answer for a shop. Look up the order before you promise anything. Be polite. " * 20
PARTS = [list(range(1000 * n, 1000 * n + 300)) for n in range(1, 4)]


def request(tokens: list[int], output: int = 1) -> Request:
    return Request(np.array(tokens, np.int64), len(tokens), output)


def write(folder: Path, lines: list[Any]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


def said(capsys: Capture, *arguments: object, status: int = 0) -> str:
    assert cli.main(["estimate", *map(str, arguments)]) == status
    out, err = capsys.readouterr()
    assert err.count("\n") == status and (not out) == bool(status)
    return out or err


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("unit", [1, 512])
def test_nodes_are_what_requests_begin_with_in_common(seed: int, unit: int) -> None:
    rng = random.Random(seed)
    words = [rng.choices(range(3), k=rng.randint(1, 12)) for _ in range(rng.randint(1, 30))]
    batch = [Request(np.array(word), len(word) * unit, 1) for word in words]
    paths = shared_paths(batch, unit)
    for n, path in enumerate(paths):
        assert [start for _, start, _ in path] == [0, *(end for *_, end in path)][: len(path)]
        for m in set(range(len(batch))) - {n}:
            both = {node for node, *_ in path} & {node for node, *_ in paths[m]}
            common = max((end for node, _, end in path if node in both), default=0)
            assert common == common_prefix(batch[n].symbols, batch[m].symbols) * unit


def test_a_last_block_that_is_part_filled_ends_with_its_request() -> None:
    batch = [Request(np.array([7, 8]), length, 1) for length in (700, 600, 1024)]
    assert {end for path in shared_paths(batch, 512) for *_, end in path} == {600}


def test_reads_are_those_of_the_plan() -> None:
    tokens = list(range(4096))
    batch = [request([*tokens, 5000 + n], output=100) for n in range(64)]
    lengths = [4097 + (2 * n + 1) * 100 // 128 + 1 for n in range(64)]
    made = plan([[(7, 0, 4096)]] * 64, lengths, H200)
    read = made.kv_tokens_read(sum(lengths))
    assert reads_of(batch, 1, 64, H200) == (sum(lengths), read, 4096)
    assert read < 0.1 * sum(lengths)
    alone, read, shared = reads_of([request([n, *tokens]) for n in range(64)], 1, 64, H200)
    assert alone == read and shared == 0


def test_parts_in_another_order_are_found() -> None:
    a, b, c = PARTS
    batch = [request([*a, *b, *c]), request([*a, *c, *b]), request([*a, *b, *c, 9])]
    (found,) = find_differences(batch, lambda tokens: f"{tokens.tolist()}")
    assert (found.first, found.prompts, found.start, found.common) == (0, [1], 300, 300)
    for text, part in zip(found.texts, (b, c), strict=True):
        assert text.startswith(f"{[*range(1294, 1300), *part[:2]]}"[:-1])
    # Not where too few equal tokens stand behind what differs.
    rng = random.Random(1)
    private = [rng.choices(range(5000, 50_000), k=200) for _ in range(8)]
    assert find_differences([request([*a, *mine, *b[:60]]) for mine in private], None) == []


def test_a_timestamp_is_named_with_what_it_costs(
    tokenizer: Path, tmp_path: Path, capsys: Capture
) -> None:
    times = [f"Time: 2026-11-23 10:{n:02d}:00." for n in range(32)]
    first = [f"{time} {RULES} Order {n}" for n, time in enumerate(times)]
    behind = [{"prompt": f"{RULES} {time} Order {n}"} for n, time in enumerate(times)]
    plain = tmp_path / "prompts.txt"
    plain.write_text("\n\n".join(first))
    text = said(capsys, "--prompts", plain, "--tokenizer", tokenizer)
    assert " 0% saved\n32 prompts" in text
    assert all(f" 10:0{minute}:00" in text for minute in (0, 1))
    text = said(capsys, "--prompts", write(tmp_path, behind), "--tokenizer", tokenizer)
    assert int(text.split()[-2][:-1]) > 40 and "differ" not in text


def test_conversations_of_the_openai_sdk(tokenizer: Path, tmp_path: Path, capsys: Capture) -> None:
    """Which write no text as None, and arguments of calls as JSON text, to be read by a template
    as SGLang has them."""
    config = copytree(tokenizer, tmp_path / "tokenizer") / "tokenizer_config.json"
    template = "{{ messages[0].content + '.' + messages[0].tool_calls[0].function.arguments.a }}"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))

    def tokens(content: str | None, arguments: object) -> str:
        call = {"function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        body = {"messages": [message], "max_tokens": 3}
        file = write(tmp_path, [{"custom_id": name, "body": body} for name in "ab"])
        return said(capsys, "--prompts", file, "--tokenizer", config.parent)

    text = tokens(None, json.dumps({"a": RULES}))
    assert text == tokens("", {"a": RULES})
    count = int(text.split()[3].replace(",", ""))
    assert count > 500 and f"another of the batch: {count:,} tokens" in text
    # A token is being decoded, and of answers of 3 tokens there are 0 and 2 before it.
    assert f"instead of {2 * count + 2 + 0 + 2:,}," in text


def test_a_trace(tmp_path: Path, capsys: Capture) -> None:
    lines = [
        {"input_length": 4196, "output_length": 0, "hash_ids": [*range(6), *range(n, n + 3)]}
        for n in range(100, 700, 3)
    ]
    text = said(capsys, "--trace", write(tmp_path, lines), "--target", "a100", "--heads", "64/8")
    assert "200 prompts of 4,196 tokens, 64 at a time" in text and ": 3,072 tokens of a" in text
    assert "64% saved" in text and "differ" not in text


TRACE = {"input_length": 700, "output_length": 1, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("line", "arguments", "message"),
    [
        ({"prompt": "text"}, [], "line 1: is text: name the model's tokenizer with --tokenizer"),
        ({"input_ids": ["a"]}, [], "line 1: must have a form as"),
        ({"input_ids": []}, [], "line 1: 0 tokens, must be 1 to"),
        ([], [], "line 1: must be an object"),
        ({"input_ids": [1]}, ["--concurrency", "0"], "--concurrency is 0, must be from 1"),
        ({"input_ids": [1]}, ["--tokenizer", "/nowhere"], "--tokenizer /nowhere: "),
        (TRACE, [], "an id for each 512 tokens"),
    ],
)
def test_mistakes_are_one_line(
    line: object, arguments: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    option = "--trace" if line is TRACE else "--prompts"
    assert message in said(capsys, option, write(tmp_path, [line]), *arguments, status=1)
