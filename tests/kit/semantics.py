# SPDX-License-Identifier: Apache-2.0
"""What decode attention in SGLang's backends depends on, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from sglang_pat.srt.interface import parsed

HOME = "sglang.srt.layers.attention"
BACKENDS = {
    "flashattention_backend": "FlashAttentionBackend",
    "flashinfer_backend": "FlashInferAttnBackend",
    "triton_backend": "TritonAttnBackend",
    "trtllm_mha_backend": "TRTLLMHAAttnBackend",
}
# The constructor and what a decode step calls.
ENTRY_POINTS = (
    *("__init__", "init_cuda_graph_state", "init_forward_metadata", "forward_decode"),
    *("init_forward_metadata_out_graph", "init_forward_metadata_in_graph"),
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


def dependencies(modules: Iterable[str] = tuple(BACKENDS)) -> set[str]:
    """Every attribute of the model, the runner, the configuration, a layer or a batch on which the
    decode of these backends depends, as ``layer.scaling`` or ``exec.graph.max_bs``."""
    found: set[str] = set()
    for module in modules:
        for function in _reachable(f"{HOME}.{module}", BACKENDS[module]):
            found |= set(attributes(function))
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


def _reachable(module: str, cls: str) -> Iterator[ast.stmt]:
    """The functions that the entry points of a backend's class reach: its own methods, and the
    functions and classes of SGLang's attention package that they name."""
    backend = parsed(module)[0][cls]
    assert isinstance(backend, ast.ClassDef)
    methods = {node.name: node for node in backend.body if isinstance(node, ast.FunctionDef)}
    todo: list[tuple[str, ast.stmt]] = [
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
            match node:
                case ast.Name(name) if name != cls:
                    todo += _named(home, name)
                case ast.Attribute(ast.Name("self" | "attn_backend"), name) if (
                    home == module and name in methods
                ):
                    todo.append((home, methods[name]))


def _named(module: str, name: str) -> list[tuple[str, ast.stmt]]:
    """The module-level function or class of that name: of this module, or imported into it from
    the attention package, but for the other backends."""
    definitions, imports = parsed(module)
    if name in definitions:
        return [(module, definitions[name])]
    source = imports.get(name, "")
    if not source.startswith(f"{HOME}.") or source.rpartition(".")[2] in BACKENDS:
        return []
    return [(source, found)] if (found := parsed(source)[0].get(name)) else []
