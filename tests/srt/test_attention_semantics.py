# SPDX-License-Identifier: Apache-2.0
"""Everything that decode attention in SGLang depends on is in our table, and nothing else is.

What does not stand where we look (``use_irope``, ``prefill_aware_swa``) is how a model could be
served silently wrong. No server, no GPU; SGLang's source is read, not imported.
"""

from __future__ import annotations

import ast
import inspect
import re

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit import semantics as kit_semantics
from kit.dependencies import SEMANTICS

from sglang_pat.srt import backend, factory, layers, support

ADVICE = "read what the backends do with it in decode, then enter it in tests/kit/dependencies.py"


def test_every_dependency_is_in_our_table() -> None:
    new = sorted(kit_semantics.dependencies() - set(SEMANTICS))
    assert not new, f"SGLang's decode attention also depends on {', '.join(new)}: {ADVICE}"


def test_every_entry_of_ours_is_a_dependency() -> None:
    stale = sorted(set(SEMANTICS) - kit_semantics.dependencies())
    assert not stale, f"SGLang's decode attention no longer reads {', '.join(stale)}: remove it"


@pytest.mark.parametrize("module", kit_semantics.BACKENDS)
def test_each_backend_was_read(module: str) -> None:
    found = kit_semantics.dependencies([module])
    assert {"layer.scaling", "layer.layer_id", "batch.seq_lens", "runner.page_size"} <= found


def test_what_is_known_to_be_easily_missed_is_found() -> None:
    found = kit_semantics.dependencies(["flashattention_backend"])
    assert "layer.use_irope" in found  # in a helper of another module
    assert "runner.prefill_aware_swa" in found  # by getattr
    assert "model_config.is_local_attention_model" in found  # of the runner's


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("layer.sink_size", {"layer.sink_size"}),
        ("getattr(layer, 'sink_size', 0)", {"layer.sink_size"}),
        ("hasattr(self.model_runner, 'alibi')", {"runner.alibi"}),
        ("model_runner.model_config.hf_config.alibi.item()", {"hf_config.alibi"}),
        ("get_exec().kernel.alibi", {"exec.kernel", "exec.kernel.alibi"}),
        ("forward_batch.sinks[0]", {"batch.sinks"}),
        ("metadata.page_table", set()),
    ],
)
def test_a_new_attribute_would_be_found(source: str, expected: set[str]) -> None:
    assert set(kit_semantics.attributes(ast.parse(source))) == expected


def test_what_we_say_of_layers_and_the_runner_is_in_our_code() -> None:
    """The attribute, or the one that the entry names instead, is in the code that acts on it."""
    modules = (backend, factory, layers, support)
    ours = "".join(map(inspect.getsource, modules))
    for name, entry in SEMANTICS.items():
        root, attribute = name.split(".")[0], name.split(".")[-1]
        if root not in ("layer", "runner") or entry.verdict == "irrelevant":
            continue
        looked_at = (attribute, *re.findall(r"\w+_\w+", entry.why))
        assert any(re.search(rf"\b{word}\b", ours) for word in looked_at), (
            f"{name} is {entry.verdict}: where?"
        )
