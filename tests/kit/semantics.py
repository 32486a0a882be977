# SPDX-License-Identifier: Apache-2.0
"""What decode attention in SGLang's backends depends on, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sglang

# All of these modules is read, prefills and draft workers included.
HOME = Path(sglang.__path__[0], "srt", "layers", "attention")
BACKENDS = (
    *("flashattention_backend", "flashinfer_backend", "triton_backend", "trtllm_mha_backend"),
    "local_attention",  # helpers of the first
)
# The objects whose attributes count, by the names that SGLang's source has for them.
ROOTS = {
    **{name: name for name in ("runner", "model_config", "hf_config", "hf_text_config")},
    **{name: name for name in ("server_args", "layer", "envs")},
    "model_runner": "runner",
    "forward_batch": "batch",
}
# Namespaces of the published configuration, of which the leaf counts: get_exec().graph.leaf.
NAMESPACES = {"exec", "spec", "parallel", "memory", "schedule", "disagg", "model", "platform"}
# Objects that are followed: of runner.model_config.x it is model_config.x that counts.
FOLLOWED = {"model_config", "hf_config", "hf_text_config", "server_args"}


def dependencies() -> set[str]:
    """Every attribute of the model, the runner, the configuration, a layer or a batch on which the
    backends depend, as ``layer.scaling`` or ``exec.graph.max_bs``."""
    found: set[str] = set()
    for module in BACKENDS:
        found |= set(attributes(ast.parse((HOME / f"{module}.py").read_text())))
    # Of exec.graph.max_bs, exec.graph is a part, not another attribute.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def attributes(tree: ast.AST) -> Iterator[str]:
    """The attributes that code reads, ``getattr`` and ``hasattr`` with a literal name included."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Attribute():
                names = _names(node)
            case ast.Call(ast.Name("getattr" | "hasattr"), [owner, ast.Constant(name), *_]):
                names = [*_names(owner), str(name)]
        if name := _canonical(names):
            yield name


def _names(node: ast.AST) -> list[str]:
    """["a", "b", "c"] of ``a.b.c``, ["get_exec()", "b"] of ``get_exec().b``; [] of others."""
    match node:
        case ast.Name(name):
            return [name]
        case ast.Attribute(owner, name):
            before = _names(owner)
            return [*before, name] if before else []
        case ast.Call(ast.Name(name), []):
            return [f"{name}()"]
    return []


def _canonical(names: list[str]) -> str:
    """ "layer.scaling" of ["layer", "scaling", "item"]; "" of what does not count."""
    while len(names) > 1 and (names[1] in FOLLOWED or names[0] == "self"):
        names = names[1:]  # self.model_config.x, runner.model_config.x
    if len(names) < 2:
        return ""
    first = names[0]
    if first in ROOTS:
        return f"{ROOTS[first]}.{names[1]}"
    namespace = first.removeprefix("get_").removesuffix("()")
    if first == f"get_{namespace}()" and namespace in NAMESPACES:
        return ".".join((namespace, *names[1:]))
    return ""
