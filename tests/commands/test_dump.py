# SPDX-License-Identifier: Apache-2.0
"""The file of a dump, without a server: how it is read, and by whom."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sglang_pat import Target, cli, plan
from sglang_pat.dump import read_dump
from sglang_pat.explain.tree import DEFAULT_TREE, parse_tree

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
    ("line", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must be an object"),
        ('{"paths": [[]]}', "must have a path and a length"),
        ('{"paths": [[]], "seq_lens": [3, 4]}', "must have"),
        ('{"paths": [], "seq_lens": []}', "must have"),
        ('{"paths": [[[1, 0]]], "seq_lens": [3]}', "must have"),
        ('{"paths": [[[1, 0, -1]]], "seq_lens": [3]}', "must have"),
    ],
)
def test_a_broken_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    file = written(tmp_path / "dump", batch())
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], line, *lines[2:]]))
    with pytest.raises(ValueError, match=f"line 3 {said}"):
        read_dump(file)


def test_another_file_is_refused(tmp_path: Path) -> None:
    for first in ("", json.dumps({"sglang_pat_dump": 2})):
        (tmp_path / "dump").write_text(first)
        with pytest.raises(ValueError, match="is no dump of version 1"):
            read_dump(tmp_path / "dump")


def test_ids_of_the_compiled_tree_core_have_64_bits(tmp_path: Path) -> None:
    large = 2**62 + 1
    paths = {"paths": [[[large, 0, 800]]] * 2, "seq_lens": [801] * 2}
    file = written(tmp_path / "dump", batch(), paths)
    dump = read_dump(file)
    assert len(dump.batches) == 2
    found = dump.batches[1]
    assert found.paths[0] == [(large, 0, 800)]
    assert plan(found.paths, found.seq_lens, TARGET).num_shared_items > 0


def test_explain_draws_a_dumped_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path / "dump", batch(), batch("2000(8x40)"))

    def explained(*arguments: str) -> str:
        assert cli.main(["explain", *arguments]) == 0
        return capsys.readouterr().out

    own = explained("--paths", str(file), "--batch", "2")
    assert "cpu with 3 SMs or threads, as the server" in own
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
