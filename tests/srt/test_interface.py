# SPDX-License-Identifier: Apache-2.0
"""What SGLang must have for the plugin to work is checked by name. No server, no GPU."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_pat.config import SUPPORTED_SGLANG, TESTED_SGLANG
from sglang_pat.srt import hook, interface, launch

ROOT = Path(__file__).parents[2]
INFO = "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.TreePathNodeInfo"


def _mismatches() -> list[str]:
    return launch.foreign_reasons()


def test_the_interface_is_the_one_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hook in its place, put there by SGLang itself."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    # So that it is taken away again.
    monkeypatch.setattr(ForwardBatch, "init_new", ForwardBatch.__dict__["init_new"])
    HookRegistry.register(hook.INIT_NEW, hook.after_init_new, HookType.AFTER)
    HookRegistry.apply_hooks()
    assert _mismatches() == []


def test_the_versions_said_to_be_tested_are_those_that_make_tests() -> None:
    (pinned,) = re.findall(r'sglang = \["sglang==(.+)"\]', (ROOT / "pyproject.toml").read_text())
    (older,) = re.findall(r"^OLDER_SGLANG := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned == SUPPORTED_SGLANG
    assert (*older.split(), pinned) == TESTED_SGLANG


def test_a_hook_that_is_not_there_is_named() -> None:
    (found,) = _mismatches()
    assert re.search(
        f"the hook after {hook.INIT_NEW} is not installed: .*'Failed to apply hooks'.*"
        "list pat in SGLANG_PLUGINS",
        found,
    )


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another SGLang, in which the hook still works."""
    monkeypatch.setattr(hook, "is_installed", lambda *_: True)
    monkeypatch.setattr("sglang.version.__version__", "0.6.0")
    tested = " and ".join(TESTED_SGLANG)
    return f"sglang_pat is made for SGLang {tested} as released, this is 0.6.0"


@pytest.mark.parametrize(
    ("cls", "name", "last"),
    [
        (ForwardBatch, "init_new", "'model_runner')"),
        (TorchNativeAttnBackend, "forward_decode", "'save_kv_cache')"),
        (TorchNativeAttnBackend, "init_forward_metadata", "'forward_batch')"),
        (AttentionBackend, "init_forward_metadata_out_graph", "'in_capture')"),
        (AttentionBackend, "init_forward_metadata_in_graph", "'forward_batch')"),
        (KVWriteLoc, "for_layer", "'layer')"),
    ],
)
def test_a_changed_signature_is_named(
    newer: str, cls: type, name: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, name, lambda *renamed: None)
    (found,) = _mismatches()
    assert found.startswith(f"{cls.__name__}.{name} takes ('renamed',), not ('")
    assert found.endswith(f"{last}: {newer}")


def test_a_parameter_after_those_we_pass_is_no_change(
    newer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = classmethod(lambda cls, forward_batch, layer, more=None: None)
    monkeypatch.setattr(KVWriteLoc, "for_layer", longer)
    assert _mismatches() == []


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path, names in interface.ATTRIBUTES.items() for name in names],
)
def test_each_missing_attribute_is_named(
    newer: str, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = interface.names_of

    def without(of: str) -> frozenset[str]:
        return original(of) - ({name} if of == f"sglang.srt.{path}" else frozenset())

    monkeypatch.setattr(interface, "names_of", without)
    assert _mismatches() == [f"{path.rpartition('.')[2]} has no {name}: {newer}"]


@pytest.mark.parametrize("gone", ["session.streaming_session.Renamed", "no_such_module.Req"])
def test_a_class_that_is_not_there_is_named(
    newer: str, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(interface.ATTRIBUTES, gone, ("slots",))
    assert _mismatches() == [f"there is no sglang.srt.{gone}: {newer}"]


def test_path_elements_of_another_form_are_named(
    newer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = ("parent_id", "node_id", "path_start", "path_end")
    monkeypatch.setattr(INFO, SimpleNamespace(__struct_fields__=moved))
    (found,) = _mismatches()
    assert found.startswith("TreePathNodeInfo begins with ('parent_id', 'node_id'")
    assert found.endswith(newer)


SOURCE = """
from types import SimpleNamespace
from {package}.above import Above
from elsewhere import Foreign

class Base(Above, Foreign):
    annotated: int
    assigned = 1

    def method(self): ...

class Cls(Base):
    def __init__(self, other):
        self.set, other.not_ours = 1, 2
        self.typed: int = 3
        self.read.below

    @property
    def asked(self): ...

    async def waited(self): ...

def make(fb):
    return SimpleNamespace(rows=fb.rows, lens=dict(no=1))
"""


def test_names_come_from_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sglang" / "made_up"
    package.mkdir(parents=True)
    (package / "above.py").write_text("class Above:\n    inherited: int\n")
    (package / "below.py").write_text(SOURCE.format(package="sglang.made_up"))
    monkeypatch.setattr("sglang.__path__", [str(package.parent)])
    below = "sglang.made_up.below"
    base = {"annotated", "assigned", "method", "inherited"}
    assert interface.names_of(f"{below}.Base") == base
    own = {"__init__", "set", "typed", "read.below", "asked", "waited"}
    assert interface.names_of(f"{below}.Cls") == base | own
    assert interface.names_of(f"{below}.make") == {"rows", "lens"}
    assert interface.names_of(f"{below}.Other") == frozenset()
