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

from sglang_pat.srt import backend, factory, layers, plugin, support

ADVICE = "read what the backends do with it in decode, then enter it in tests/kit/dependencies.py"


def test_our_table_has_what_decode_attention_depends_on_and_nothing_else() -> None:
    found = kit_semantics.dependencies()
    assert "layer.use_irope" in found  # in a helper of another module
    assert "runner.prefill_aware_swa" in found  # by getattr
    assert "model_config.is_local_attention_model" in found  # of the runner's
    new, stale = sorted(found - set(SEMANTICS)), sorted(set(SEMANTICS) - found)
    assert not new, f"SGLang's decode attention also depends on {', '.join(new)}: {ADVICE}"
    assert not stale, f"SGLang's decode attention no longer reads {', '.join(stale)}: remove it"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
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
    ours = "".join(map(inspect.getsource, (backend, factory, layers, plugin, support)))
    for name, (verdict, why) in SEMANTICS.items():
        if name.startswith(("layer.", "runner.")) and verdict != "irrelevant":
            looked_at = (name.split(".")[-1], *re.findall(r"\w+_\w+", why))
            assert any(re.search(rf"\b{word}\b", ours) for word in looked_at), (name, verdict)
