# SPDX-License-Identifier: Apache-2.0
"""The command ``sglang-pat dump``, beside a thread that answers as a server does."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from sglang_pat import cli
from sglang_pat.dump import command
from sglang_pat.dump.records import read_dump
from sglang_pat.dump.request import DumpRequest, Mail
from sglang_pat.dump.watch import Watch
from sglang_pat.explain.requests import DEFAULT_TREE, parse_tree

REQUESTS = parse_tree(DEFAULT_TREE)


@pytest.fixture
def mail(tmp_path: Path) -> Mail:
    return Mail(tmp_path)


@pytest.fixture
def server(mail: Mail) -> Watch:
    """A watch whose looks the test makes."""
    return Watch(mail.folder, {"device": "cpu"})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TAKEN_S", 0.3)
    monkeypatch.setattr(command, "ENDED_S", 0.3)
    monkeypatch.setattr(command, "LOOK_S", 0.01)


def serve(server: Watch, steps: int, ended: threading.Event) -> threading.Thread:
    """A server that decodes ``steps`` times, and answers until ``ended``."""

    def run() -> None:
        left = steps
        while not ended.wait(0.005):
            server.look()
            collection = server.open
            if left and collection is not None and collection.wants(made=True):
                collection.add(REQUESTS.paths, REQUESTS.seq_lens, made=True, plan={})
                left -= 1

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("steps", "seconds"), [(5, "60"), (2, "0.5")])
def test_the_command_collects(
    steps: int, seconds: str, mail: Mail, server: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    thread = serve(server, steps, ended)
    out = mail.folder / "found.jsonl"
    arguments = ["dump", str(mail.folder), "--out", str(out), "--batches", "5"]
    try:
        assert cli.main([*arguments, "--seconds", seconds]) == 0
    finally:
        ended.set()
        thread.join()
    said = capsys.readouterr().out
    why = "complete" if steps == 5 else "the time is up"
    assert (
        f"{steps} batches with a new plan, 0 that kept theirs, of 3 to 3 requests ({why})" in said
    )
    assert len(read_dump(out).batches) == steps
    assert list(mail.folder.iterdir()) == [out], "nothing else is left"


@pytest.mark.usefixtures("quick")
def test_the_command_says_what_is_wrong(
    mail: Mail, server: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert cli.main(["dump", *arguments]) == 1
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("sglang-pat dump: ")
        return said.err

    folder, out = str(mail.folder), ("--out", str(mail.folder / "out"))
    assert "no server took the request within 0.3 s" in refused(folder, *out)
    assert list(mail.folder.iterdir()) == []
    assert "is no folder: name the server's" in refused(f"{folder}/none", *out)
    assert "is a folder, or in none" in refused(folder, "--out", folder)
    assert "is a folder, or in none" in refused(folder, "--out", f"{folder}/none/out")
    assert "batches is 0, must be a whole number" in refused(folder, *out, "--batches", "0")
    request = DumpRequest.new(3, 0, 60.0)
    mail.ask(request)
    assert "another dump is under way" in refused(folder, *out)
    assert mail.asked() == request, "of which the request stays"
    mail.request.unlink()

    def break_it() -> None:
        while (asked := mail.asked()) is None:
            time.sleep(0.01)
        mail.error(asked.id).write_text("OSError(28)\n")

    thread = threading.Thread(target=break_it)
    thread.start()
    assert "the server could not write the dump: OSError(28)" in refused(folder, *out)
    thread.join()
    assert list(mail.folder.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_a_dump_without_a_batch_is_said_to_be_so(
    mail: Mail, server: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    thread = serve(server, 0, ended)
    out = mail.folder / "out"
    try:
        assert cli.main(["dump", str(mail.folder), "--out", str(out), "--seconds", "0.1"]) == 0
    finally:
        ended.set()
        thread.join()
    assert "no batch (the time is up): no decode step of several" in capsys.readouterr().out
