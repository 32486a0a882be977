# SPDX-License-Identifier: Apache-2.0
"""What decode attention in SGLang's backends depends on, read from their source."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

HOME = "sglang.srt.layers.attention"
BACKENDS = {
    "flashattention_backend": "FlashAttentionBackend",
    "flashinfer_backend": "FlashInferAttnBackend",
    "triton_backend": "TritonAttnBackend",
    "trtllm_mha_backend": "TRTLLMHAAttnBackend",
}
# The constructor and what a decode step calls.
ENTRY_POINTS = (
    "__init__",
    "init_cuda_graph_state",
    "init_forward_metadata",
    "init_forward_metadata_out_graph",
    "init_forward_metadata_in_graph",
    "forward_decode",
)
# The objects whose attributes count, by the names that SGLang's source has for them.
ROOTS = {
    "model_runner": "runner",
    "runner": "runner",
    "model_config": "model_config",
    "hf_config": "hf_config",
    "hf_text_config": "hf_text_config",
    "server_args": "server_args",
    "layer": "layer",
    "forward_batch": "batch",
    "envs": "envs",
}
# Namespaces of the published configuration, of which the leaf counts: get_exec().graph.leaf.
NAMESPACES = {"exec", "spec", "parallel", "memory", "schedule", "disagg", "model", "platform"}
# Objects that are followed: of runner.model_config.x it is model_config.x that counts.
FOLLOWED = {"model_config", "hf_config", "hf_text_config", "server_args"}

Function = ast.FunctionDef | ast.ClassDef


def dependencies(modules: Iterable[str] = tuple(BACKENDS)) -> set[str]:
    """Every attribute of the model, the runner, the configuration, a layer or a batch on which the
    decode of these backends depends, as ``layer.scaling`` or ``exec.graph.max_bs``."""
    found: set[str] = set()
    for module in modules:
        for function in _reachable(module, BACKENDS[module]):
            found |= set(attributes(function))
    # Of exec.graph.max_bs, exec.graph is a part, not another attribute.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def attributes(tree: ast.AST) -> Iterator[str]:
    """The attributes that code reads, ``getattr`` and ``hasattr`` with a literal name included."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = _names(node)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            names = [*_names(node.args[0]), str(node.args[1].value)]
        if name := _canonical(names):
            yield name


def _names(node: ast.AST) -> list[str]:
    """["a", "b", "c"] of ``a.b.c``, ["get_exec()", "b"] of ``get_exec().b``; [] of others."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = _names(node.value)
        return [*before, node.attr] if before else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        return [f"{node.func.id}()"]
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


def _reachable(module: str, cls: str) -> Iterator[Function]:
    """The functions that the entry points of a backend's class reach: its own methods, and the
    functions and classes of SGLang's attention package that they name."""
    defined = definitions(module)
    methods = {node.name: node for node in defined[cls].body if isinstance(node, ast.FunctionDef)}
    todo: list[tuple[str, Function]] = [
        (module, methods[name]) for name in ENTRY_POINTS if name in methods
    ]
    seen: set[int] = set()
    while todo:
        home, function = todo.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id != cls:
                todo += _named(home, node.id)
            elif (
                home == module
                and isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "attn_backend")
                and node.attr in methods
            ):
                todo.append((home, methods[node.attr]))


def _named(module: str, name: str) -> list[tuple[str, Function]]:
    """The module-level function or class of that name: of this module, or imported into it."""
    if name in definitions(module):
        return [(module, definitions(module)[name])]
    source = _imports(module).get(name)
    if source is None or name not in definitions(source):
        return []
    return [(source, definitions(source)[name])]


@cache
def _tree(module: str) -> ast.Module:
    # By its path: importing a backend would load kernels.
    root = importlib.util.find_spec("sglang")
    assert root is not None and root.submodule_search_locations
    path = Path(root.submodule_search_locations[0], *HOME.split(".")[1:], *module.split("."))
    return ast.parse(path.with_suffix(".py").read_text())


@cache
def definitions(module: str) -> dict[str, Function]:
    return {
        node.name: node
        for node in _tree(module).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


@cache
def _imports(module: str) -> dict[str, str]:
    """Modules of the attention package that names are imported from, by name."""
    return {
        alias.asname or alias.name: node.module.removeprefix(f"{HOME}.")
        for node in ast.walk(_tree(module))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.startswith(f"{HOME}.")
        and (node.module.removeprefix(f"{HOME}.") not in BACKENDS)
        for alias in node.names
    }
