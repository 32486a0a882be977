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
    assert [each.number for each in dump.batches] == [1, 2] and dump.batches[1].paths == paths
    assert plan(paths, [801] * 2, dump.target).num_shared_items > 0


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
