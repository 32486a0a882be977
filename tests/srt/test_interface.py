# SPDX-License-Identifier: Apache-2.0
"""What SGLang must have for the plugin to work is checked by name. No server, no GPU."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_pat.config import SUPPORTED_SGLANG, TESTED_SGLANG
from sglang_pat.srt import hook, interface, launch

ROOT = Path(__file__).parents[2]
INFO = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.TreePathNodeInfo"


def test_the_interface_is_the_one_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hook in its place, put there by SGLang itself."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    # So that it is taken away again.
    monkeypatch.setattr(ForwardBatch, "init_new", ForwardBatch.__dict__["init_new"])
    HookRegistry.register(hook.INIT_NEW, hook.after_init_new, HookType.AFTER)
    HookRegistry.apply_hooks()
    assert launch.foreign_reasons() == []


def test_the_versions_said_to_be_tested_are_those_that_make_tests() -> None:
    (pinned,) = re.findall(r'sglang = \["sglang==(.+)"\]', (ROOT / "pyproject.toml").read_text())
    (older,) = re.findall(r"^OLDER_SGLANG := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned == SUPPORTED_SGLANG
    assert (*older.split(), pinned) == TESTED_SGLANG


def test_a_hook_that_is_not_there_is_named() -> None:
    (found,) = launch.foreign_reasons()
    assert re.search(
        f"the hook after {hook.INIT_NEW} is not installed: .*'Failed to apply hooks'.*"
        "list pat in SGLANG_PLUGINS",
        found,
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(
            ((f"sglang.srt.{path}", lambda *renamed: None),
             rf"{'.'.join(path.split('.')[-2:])} takes \('renamed',\), not \(.*'{names[-1]}'\)")
            for path, names in interface.SIGNATURES.items()
        ),
        ((INFO, SimpleNamespace(__struct_fields__=("parent_id", "node_id", "path_start"))),
         r"TreePathNodeInfo begins with \('parent_id', 'node_id'.*, not \('node_id'.*\)"),
    ],
)  # fmt: skip
def test_what_changed_is_named_with_the_versions(
    change: tuple[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another SGLang, in which the hook still works."""
    monkeypatch.setattr(hook, "is_installed", lambda *_: True)
    monkeypatch.setattr("sglang.version.__version__", "0.6.0")
    assert launch.foreign_reasons() == []
    monkeypatch.setattr(*change)
    (found,) = launch.foreign_reasons()
    made_for = f"sglang_pat is made for SGLang {' and '.join(TESTED_SGLANG)} as released, this is "
    assert re.fullmatch(f"{named}: {made_for}0.6.0", found)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {
        "managers.schedule_batch.Req": ("rid", "renamed", "gone"),
        "session.streaming_session.Renamed": ("slots",),
        "no_such_module.Req": ("rid",),
    }
    monkeypatch.setattr(interface, "ATTRIBUTES", gone)
    there_is_no = [f"there is no sglang.srt.{path}" for path in list(gone)[1:]]
    assert interface.interface_mismatches() == ["Req has no gone, renamed", *there_is_no]


SOURCE = """
from sglang.above import Above

class Cls(Above, Foreign):
    annotated: int
    async def waited(self, other):
        self.set, other.not_ours = 1, self.read.below

def make(fb):
    return SimpleNamespace(rows=fb.rows, lens=dict(no=1))
"""


def test_names_come_from_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "above.py").write_text("class Above:\n    inherited = 1\n")
    (tmp_path / "below.py").write_text(SOURCE)
    monkeypatch.setattr("sglang.__path__", [str(tmp_path)])
    names = {"inherited", "annotated", "waited", "set", "read.below"}
    assert interface.names_of("sglang.below.Cls") == names
    assert interface.names_of("sglang.below.make") == {"rows", "lens"}
