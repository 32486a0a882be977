# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat explain`` draws the plan that the planner makes of a tree or a dumped batch, and
says what is wrong with a batch, a file or an option. ``sglang-pat estimate``: what prompts share,
what a plan reads, and what keeps them apart."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from kit.trees import Batch, batches

import sglang_pat
from benchmarks.common.forests import Tree
from sglang_pat import Target, cli, plan
from sglang_pat.demo.standin import make_tokenizer
from sglang_pat.dump import MAX_REQUESTS, Requests, read_dump
from sglang_pat.estimate import (
    Request,
    common_prefix,
    find_differences,
    reads_of,
    shared_paths,
)
from sglang_pat.explain.command import make_target
from sglang_pat.explain.svg import boxes_of, write_svg
from sglang_pat.explain.tree import DEFAULT_TREE, MAX_DEPTH, parse_tree
from sglang_pat.target import WITHOUT_BRANCHES

HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_queries": 1024}
TARGETS = {
    "h200": Target.h200(**HEADS),
    "branches": Target.h200(**HEADS, cuts=("branches",)),
    "small tiles": Target.h200(**HEADS, row_tiles=(16,), cuts=WITHOUT_BRANCHES),
    "cpu": Target.cpu(threads=4, **HEADS),
}
SVG = "{http://www.w3.org/2000/svg}"
pytestmark = pytest.mark.usefixtures("fresh_shell")
Capture = pytest.CaptureFixture[str]


def planned(requests: Requests, target: Target = TARGETS["h200"]) -> sglang_pat.Plan:
    return sglang_pat.plan(requests.paths, requests.seq_lens, target)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches().filter(lambda batch: batch.paths))
def test_every_token_of_every_query_is_drawn_exactly_once(name: str, batch: Batch) -> None:
    requests = Requests(batch.paths, batch.seq_lens)
    plan = planned(requests, TARGETS[name])
    boxes = boxes_of(plan, requests.seq_lens)
    drawn: Counter[tuple[int, int]] = Counter()
    for box in boxes:
        drawn.update((query, token) for query in box.queries for token in range(box.start, box.end))
    expected = {(q, t) for q, length in enumerate(requests.seq_lens) for t in range(length)}
    assert drawn == Counter(expected)
    read = sum(box.end - box.start for box in boxes)
    assert read == plan.kv_tokens_read(sum(requests.seq_lens))
    assert {box.item for box in boxes} == set(range(plan.num_items))
    root = ElementTree.fromstring(write_svg(plan, requests.seq_lens, ["<below> & more"]))
    titles = {title.text for title in root.iter(f"{SVG}title")}
    assert titles == {f"item {b.item}: {b.kind}, tokens [{b.start}, {b.end})" for b in boxes}
    names = ("x", "y", "width", "height")
    (_, _, right, bottom), *rects = (
        [float(one.get(name, "0")) for name in names] for one in root.iter(f"{SVG}rect")
    )
    for n, (x, y, width, height) in enumerate(rects):
        assert min(x, y) >= 0 and min(width, height) > 0
        assert x + width <= right + 0.1 and y + height <= bottom + 0.1
        for left, top, wide, high in rects[:n]:
            across = min(x + width, left + wide) - max(x, left)
            assert across < 0.2 or min(y + height, top + high) - max(y, top) < 0.2


def said(capsys: Capture, *arguments: object, status: int = 0, command: str = "explain") -> str:
    """What a command prints, or the line with which it exits with 1."""
    assert cli.main([command, *map(str, arguments)]) == status
    out, err = capsys.readouterr()
    assert err.count("\n") == status and (not out) == bool(status)
    assert not err or err.startswith(f"sglang-pat {command}: ")
    return out or err


def test_it_prints_the_plan_and_what_it_reads(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "a.svg"
    text = said(capsys, "--svg", str(file))
    plan = planned(parse_tree(DEFAULT_TREE), Target.h200(**HEADS | {"max_queries": 256}))
    assert text.startswith(f"{plan}\n")
    read, drawn = f"{plan.kv_tokens_read(2203):,} instead of 2,203", file.read_text()
    assert read in text and read in drawn
    assert not any(each in drawn for each in ("href", "src", "url(", "<script", "<image"))


@pytest.mark.parametrize("drafts", [1, 4])
def test_a_partial_result_is_one_of_all_draft_tokens(drafts: int, capsys: Capture) -> None:
    tree = "8192(8x200)"
    text = said(capsys, "--tree", tree, "--target", "h200", "--draft-tokens", drafts)
    partials = planned(parse_tree(tree), Target.h200(**HEADS, draft_tokens=drafts)).num_partials
    written = f"partial results: {partials * drafts * 32 * (128 + 1) * 4 / 1e6:.1f} MB"
    assert partials and written in text


def test_a_tree_is_the_batch_that_the_benchmarks_name_by_levels() -> None:
    nested, levels = parse_tree("32(8x512(4x256))"), Tree.parse("1,8,32_32,512,256")
    assert nested.seq_lens == levels.seq_lens == [800] * 32
    assert str(planned(nested)) == str(planned(Requests(levels.paths, levels.seq_lens)))
    assert parse_tree(" 512 ( 256(40, 25), 90 ) ") == parse_tree(DEFAULT_TREE)
    assert parse_tree("3x7") == Requests([[], [], []], [7, 7, 7])


TREES = {
    "": "character 1: a number of 1 or more must stand here",
    "512(40": 'character 7: a ")" is missing',
    "512(40))": "character 8: the end must stand here",
    "2147483648": "a request has 2,147,483,648 tokens, more than 2,147,483,647",
    f"{'1(' * 65}1{')' * 65}": f"nodes are nested deeper than {MAX_DEPTH}",
    "200x1(200x1)": f"more than {MAX_REQUESTS:,} requests",
}


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        *(("--tree", spec, message) for spec, message in TREES.items()),
        ("--target", "h300", "--target 'h300' is not known; the GPUs are h200, h100"),
        ("--head-dim", "96", "--head-dim is 96, on a GPU pat serves 64, 128, 256, 576: try"),
        ("--heads", "32", "--heads is '32', must be query heads / KV heads, as in 32/8"),
        ("--heads", "8/0", "--heads is '8/0', must be"),
        ("--draft-tokens", "0", "Target.draft_tokens is 0, must be from 1 to"),
        ("--kv-cache-dtype", "int8", "--kv-cache-dtype is 'int8', must be auto or fp8_e4m3"),
        ("--svg", "/no/such/folder/a.svg", "/no/such/folder/a.svg"),
    ],
)
def test_a_wrong_option_says_what_would_do(
    option: str, given: str, message: str, capsys: Capture
) -> None:
    assert message in said(capsys, option, given, status=1)


def test_the_options_of_a_server_count(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    default = said(capsys, "--tree", "512(4x300(8x40))")
    monkeypatch.setenv("SGLANG_PAT_POLICY", "pat")
    assert said(capsys, "--tree", "512(4x300(8x40))") != default
    monkeypatch.setenv("SGLANG_PAT_POLCY", "pat")
    assert "SGLANG_PAT_POLCY" in said(capsys, status=1)


@pytest.mark.parametrize(("name", "sms", "kv_bytes"), [("NVIDIA RTX 3090", 82, 2), ("cpu", 8, 4)])
def test_every_option_of_the_target_counts(name: str, sms: int, kv_bytes: int) -> None:
    def target(*more: str) -> Target:
        flags = ["explain", "--target", name, "--heads", "16/4", "--head-dim", "64", *more]
        return make_target(cli.make_parser().parse_args(flags), 1)[0]

    made = target()
    assert (made.num_sms, made.kv_bytes, made.head_dim) == (sms, kv_bytes, 64)
    assert (made.num_q_heads, made.num_kv_heads) == (16, 4)
    other = target("--sms", "7", "--kv-cache-dtype", "fp8_e4m3", "--draft-tokens", "4")
    assert (other.num_sms, other.kv_bytes, other.draft_tokens) == (7, 1, 4)
    latents = target("--head-dim", "576", "--heads", "16/1")
    assert (latents.v_head_dim, latents.token_values, made.v_head_dim) == (512, 576, 64)


def test_explain_and_estimate_need_neither_sglang_nor_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text('{"input_ids": [1, 2, 3]}\n' * 2)
    code = (
        "import sys; from sglang_pat import cli; import torch; ends = [cli.main(['explain']), "
        "cli.main(['estimate', '--prompts', 'prompts']), 'sglang' in sys.modules, "
        "torch.cuda.is_initialized()]; sys.exit(any(ends))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    """As in ``sglang-pat explain | head -1``; here it leaves before the first line."""
    command = [sys.executable, "-m", "sglang_pat", "explain"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=tmp_path, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 128 + signal.SIGPIPE


TARGET = Target.cpu(threads=3, num_q_heads=8, num_kv_heads=2, head_dim=64, max_queries=64)
HEADER = {"sglang_pat_dump": 1, "device": "cpu", "page_size": 1, "target": asdict(TARGET)}


def written(file: Path, *batches: dict[str, Any], **header: Any) -> Path:
    """A dump as a server writes it."""
    lines = [HEADER | header, *batches]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def batch(spec: str = DEFAULT_TREE) -> dict[str, Any]:
    return asdict(parse_tree(spec))


@pytest.mark.parametrize(
    ("at", "line", "said"),
    [
        (3, "{", "line 3 is not JSON"),
        (3, "[]", "line 3 must be an object"),
        (3, '{"paths": [[]]}', "line 3 must have a path and a length"),
        (3, '{"paths": [[]], "seq_lens": [3, 4]}', "line 3 must have"),
        (3, '{"paths": [], "seq_lens": []}', "line 3 must have"),
        (3, '{"paths": [[[1, 0, -1]]], "seq_lens": [3]}', "line 3 must have"),
        (1, '{"sglang_pat_dump": 2}', "is no dump of version 1"),
    ],
)
def test_a_broken_line_is_named(at: int, line: str, said: str, tmp_path: Path) -> None:
    file = written(tmp_path / "dump", batch())
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[: at - 1], line, *lines[at - 1 :]]))
    with pytest.raises(ValueError, match=said):
        read_dump(file)


def test_ids_of_the_compiled_tree_core_have_64_bits(tmp_path: Path) -> None:
    paths = [[(2**62 + 1, 0, 800)]] * 2
    dump = read_dump(written(tmp_path / "dump", batch(), {"paths": paths, "seq_lens": [801] * 2}))
    assert len(dump.batches) == 2 and dump.batches[1].paths == paths
    assert plan(paths, [801] * 2, dump.target).num_shared_items > 0


def test_explain_draws_a_dumped_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "dump", batch(), batch("2000(8x40)"))

    def explained(*arguments: str) -> str:
        assert cli.main(["explain", *arguments]) == 0
        return capsys.readouterr().out

    own = explained("--paths", str(file), "--batch", "2")
    assert "cpu with 3 SMs or threads, 8/2 heads of dim 64, as the server" in own
    options = ["--target", "cpu", "--sms", "3", "--heads", "8/2", "--head-dim", "64"]
    same = explained("--tree", "2000(8x40)", *options)
    assert own.partition("planned for")[0] == same.partition("planned for")[0]
    assert explained("--paths", str(file), *options[2:]) == explained(*options[2:])
    assert cli.main(["explain", "--paths", str(file), "--batch", "3"]) == 1
    assert "--batch is 3" in capsys.readouterr().err
    written(file, batch(), target=asdict(TARGET) | {"colour": "red"})
    assert cli.main(["explain", "--paths", str(file)]) == 1
    said = "another version of sglang_pat (colour): name one with --target"
    assert said in capsys.readouterr().err


H200 = Target.h200(num_q_heads=32, num_kv_heads=8, head_dim=128, max_queries=64)
RULES = "Answer for a shop. Look up the order before you promise anything. Be polite. " * 20
PARTS = [list(range(1000 * n, 1000 * n + 300)) for n in range(1, 4)]


def request(tokens: list[int], output: int = 1) -> Request:
    return Request(np.array(tokens, np.int64), len(tokens), output)


def write(folder: Path, lines: list[Any]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


estimated = partial(said, command="estimate")


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
    text = estimated(capsys, "--prompts", plain, "--tokenizer", tokenizer)
    assert " 0% saved\n32 prompts" in text
    assert all(f" 10:0{minute}:00" in text for minute in (0, 1))
    text = estimated(capsys, "--prompts", write(tmp_path, behind), "--tokenizer", tokenizer)
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
        return estimated(capsys, "--prompts", file, "--tokenizer", config.parent)

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
    text = estimated(
        capsys, "--trace", write(tmp_path, lines), "--target", "a100", "--heads", "64/8"
    )
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
    assert message in estimated(capsys, option, write(tmp_path, [line]), *arguments, status=1)
