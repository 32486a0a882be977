# SPDX-License-Identifier: Apache-2.0
"""Dumps without a server: the file, the request, what writes it, and what it is read by."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sglang_pat import Target, cli, plan
from sglang_pat.dump import watch
from sglang_pat.dump.records import Batch, first_line, is_dump, read_dump
from sglang_pat.dump.request import DumpRequest, Mail
from sglang_pat.dump.watch import Collection, Watch
from sglang_pat.explain.requests import DEFAULT_TREE, parse_tree

TARGET = Target.cpu(threads=3, num_q_heads=8, num_kv_heads=2, head_dim=64, max_queries=64)
HEADER = {"device": "cpu", "page_size": 1, "target": asdict(TARGET)}
REQUESTS = parse_tree(DEFAULT_TREE)
PLAN = {"items": 5, "shared_items": 2, "kv_tokens_read": 900}
ID = "0123456789abcdef"


def add(collection: Collection, *, made: bool = True) -> None:
    """What a step does."""
    if collection.wants(made=made):
        collection.add(REQUESTS.paths, REQUESTS.seq_lens, made=made, plan=PLAN)


def request(batches: int = 3, kept_every: int = 2, seconds: float = 60.0) -> DumpRequest:
    return DumpRequest(ID, batches, kept_every, seconds)


@pytest.fixture
def mail(tmp_path: Path) -> Mail:
    return Mail(tmp_path)


@pytest.fixture
def server(mail: Mail) -> Watch:
    """A watch whose looks the test makes."""
    return Watch(mail.folder, HEADER)


def test_a_dump_has_what_was_asked_for(mail: Mail, server: Watch) -> None:
    server.look()
    assert server.open is None
    mail.ask(request())
    server.look()
    collection = server.open
    assert collection is not None and mail.partial(ID).exists()
    for made in (True, False, False, True, False, False, True, True):
        add(collection, made=made)
    server.look()
    assert server.open is None and not mail.partial(ID).exists()
    dump = read_dump(mail.answer(ID))
    assert [(each.number, each.made, each.step) for each in dump.batches] == [
        (1, True, 1),
        (2, False, 2),
        (3, True, 4),
        (4, False, 5),
        (5, True, 7),
    ]
    for batch in dump.batches:
        assert batch.requests == REQUESTS and batch.plan == PLAN
    assert dump.end == {"end": "complete", "made": 3, "kept": 2, "left_out": 0}
    assert dump.header["asked"] == {"batches": 3, "kept_every": 2}
    assert dump.target == TARGET
    # The request is still there, and is not answered twice.
    server.look()
    assert server.open is None and not mail.partial(ID).exists()


def test_a_dump_may_have_new_plans_only(mail: Mail, server: Watch) -> None:
    mail.ask(request(batches=2, kept_every=0))
    server.look()
    assert server.open is not None
    for made in (False, True, False, False, True):
        add(server.open, made=made)
    server.look()
    assert [each.made for each in read_dump(mail.answer(ID)).batches] == [True, True]


@pytest.mark.parametrize(
    ("end", "why"), [("withdrawn", "the request was withdrawn"), ("late", "the time is up")]
)
def test_a_dump_ends_with_what_there_is(end: str, why: str, mail: Mail, server: Watch) -> None:
    asked = request(seconds=0.0 if end == "late" else 60.0)
    mail.ask(asked)
    server.look()
    assert server.open is not None
    add(server.open)
    if end == "withdrawn":
        server.look()
        assert server.open is not None, "it goes on while it is asked for"
        mail.withdraw(request(batches=9))
        assert mail.request.exists(), "another's"
        mail.withdraw(asked)
    server.look()
    dump = read_dump(mail.answer(ID))
    assert len(dump.batches) == 1 and dump.end["end"] == why


def test_a_dump_is_bounded(mail: Mail, server: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_QUEUED", 4)
    mail.ask(request(batches=100))
    server.look()
    collection = server.open
    assert collection is not None
    for _ in range(6):  # faster than they are written
        add(collection)
    server.look()
    assert (collection.made, collection.left_out) == (4, 2)
    monkeypatch.setattr(watch, "MAX_BYTES", mail.partial(ID).stat().st_size + 1)
    for _ in range(4):
        add(collection)
    server.look()
    server.look()
    dump = read_dump(mail.answer(ID))
    assert dump.end == {"end": "it has more than 0 MB", "made": 5, "kept": 0, "left_out": 5}
    assert len(dump.batches) == 5


def test_a_server_outlives_what_goes_wrong(
    mail: Mail, server: Watch, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is said once, in words."""
    for text in ("{", "[]", '{"id": "../../etc/passwd"}', json.dumps(asdict(request()) | {"x": 1})):
        mail.request.write_text(text)
        server.look()
        server.look()
        assert server.open is None
    outside = asdict(request()) | {"id": "../0123456789"}
    mail.request.write_text(json.dumps(outside))
    server.look()
    assert server.open is None and list(mail.folder.iterdir()) == [mail.request]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said)) == 3
    assert "no request of `sglang-pat dump`" in said[0] and "hexadecimal digits" in said[-1]
    mail.request.unlink()
    caplog.clear()

    def full(self: Any, found: Any) -> None:
        raise OSError(28, "No space left on device")

    mail.ask(request())
    server.look()
    assert server.open is not None
    add(server.open)
    monkeypatch.setattr(watch.Writing, "_line", full)
    server.look()
    assert server.open is None
    assert "No space left" in mail.error(ID).read_text() and not mail.partial(ID).exists()
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "No space left on device" in warning.getMessage()
    server.look()
    mail.request.unlink()
    second = DumpRequest.new(1, 0, 60.0)
    mail.ask(second)
    server.look()  # cannot begin
    assert server.open is None and "No space left" in mail.error(second.id).read_text()


def test_one_of_two_servers_in_a_folder_answers(mail: Mail, server: Watch) -> None:
    other = Watch(mail.folder, {})
    mail.ask(request(batches=1))
    for each in (server, other, server, other):
        each.look()
    assert server.open is not None and other.open is None
    add(server.open)
    for each in (other, server, other):
        each.look()
    assert read_dump(mail.answer(ID)).header["device"] == "cpu"
    assert not mail.error(ID).exists() and not mail.partial(ID).exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"batches": 0}, "batches is 0, must be a whole number from 1 to 10,000"),
        ({"batches": 1.5}, "batches is 1.5"),
        ({"batches": True}, "batches is True"),
        ({"kept_every": -1}, "kept_every is -1"),
        ({"seconds": float("nan")}, "seconds is nan, must be a number from 0 to 86,400"),
        ({"id": "ABCDEF0123"}, "id is 'ABCDEF0123'"),
        ({"id": 7}, "id is 7"),
    ],
)
def test_a_request_out_of_range_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DumpRequest(**(asdict(request()) | values))


def written(file: Path, *batches: dict[str, Any], **header: Any) -> Path:
    """A dump as a server writes it."""
    lines = [first_line(HEADER | header), *batches, {"end": "complete"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def batch(spec: str = DEFAULT_TREE, number: int = 1, **values: Any) -> dict[str, Any]:
    found = parse_tree(spec)
    made = Batch(number, found.paths, found.seq_lens, number, True, PLAN)
    return made.to_json() | values


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3 is not JSON"),
        ("[]", "line 3 must be an object"),
        ('{"paths": [[]]}', "line 3: paths and seq_lens must be lists of one length"),
        ('{"paths": [], "seq_lens": []}', "line 3 has 0 requests"),
        ('{"paths": [[[1, 0]]], "seq_lens": [3]}', "line 3: paths[0] is"),
        ('{"paths": [[]], "seq_lens": [3], "step": "1"}', "line 3: step must be a whole number"),
    ],
)
def test_a_broken_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    file = written(tmp_path / "dump", batch())
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        read_dump(file)
    file.write_text(json.dumps({"sglang_pat_dump": 2}))
    assert is_dump(file)
    with pytest.raises(ValueError, match="is no dump of version 1"):
        read_dump(file)


def test_a_dump_that_was_cut_off_is_read(tmp_path: Path) -> None:
    file = written(tmp_path / "dump", batch(), batch("64x100"))
    file.write_text("\n".join(file.read_text().splitlines()[:-1]))
    dump = read_dump(file)
    assert len(dump.batches) == 2 and dump.end == {}


def test_node_ids_may_be_large(tmp_path: Path) -> None:
    """Ids of SGLang's compiled tree core are numbers of 64 bits."""
    large = 2**62 + 1
    paths = {"paths": [[[large, 0, 800]]] * 2, "seq_lens": [801] * 2}
    (found,) = read_dump(written(tmp_path / "dump", paths)).batches
    made = plan(found.paths, found.seq_lens, TARGET)
    assert found.paths[0] == [(large, 0, 800)] and made.num_shared_items > 0


def test_explain_draws_a_dumped_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "dump", batch(), batch("2000(8x40)", 2))

    def explained(*arguments: str) -> Any:
        assert cli.main(["explain", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    own = explained("--paths", str(file), "--batch", "2")
    target = ["--target", "cpu", "--sms", "3", "--heads", "8/2", "--head-dim", "64"]
    asked = explained("--tree", "2000(8x40)", *target, "--max-queries", "64")
    for found in (own, asked):
        found.pop("tree", None)
    assert own == asked
    # Heads and head dim are the dump's where another machine is asked for.
    gpu = explained("--paths", str(file), "--target", "h200")
    same = explained("--tree", DEFAULT_TREE, "--heads", "8/2", "--head-dim", "64")
    assert gpu == same
    assert cli.main(["explain", "--paths", str(file), "--batch", "3"]) == 1
    assert "--batch is 3" in capsys.readouterr().err
    assert cli.main(["explain", "--batch", "1"]) == 1
    assert "--batch goes with a dump only" in capsys.readouterr().err
    assert cli.main(["explain", "--paths", str(file)]) == 0
    assert "cpu with 3 SMs or threads, as the server" in capsys.readouterr().out


def test_explain_says_whose_target_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = asdict(TARGET) | {"colour": "red"}
    file = written(tmp_path / "dump", batch(), target=other)
    assert cli.main(["explain", "--paths", str(file)]) == 1
    said = capsys.readouterr().err
    assert "another version of sglang_pat (colour): name one with --target" in said


def test_a_verify_step_is_explained_with_its_draft_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = asdict(TARGET) | {"draft_tokens": 4}
    file = written(tmp_path / "dump", batch(), target=target)
    assert cli.main(["explain", "--paths", str(file)]) == 0
    four = capsys.readouterr().out
    options = ["--target", "cpu", "--sms", "3", "--max-queries", "64", "--part", "structs"]
    assert cli.main(["explain", "--paths", str(file), *options]) == 0
    as_asked = capsys.readouterr().out
    assert cli.main(["explain", "--paths", str(file), "--part", "structs"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == as_asked.splitlines()[1:]
    assert cli.main(["explain", "--paths", str(file), "--draft-tokens", "1"]) == 0
    assert capsys.readouterr().out != four
