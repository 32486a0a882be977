# SPDX-License-Identifier: Apache-2.0
"""What SGLang's source text defines, without importing its modules, some of which take seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def names_of(path: str) -> frozenset[str]:
    """Names of the attributes of a class's instances, by its dotted path, from the source text:
    what it and its bases define or assign to ``self``, and ``a.b`` where it uses ``self.a.b``. Of a
    function the keywords that it makes a SimpleNamespace of. Empty for what is not there.
    """
    module, _, name = path.rpartition(".")
    definitions, imports = _module(module)
    node = definitions.get(name)
    if node is None:
        return frozenset()
    if not isinstance(node, ast.ClassDef):
        return frozenset(_keywords(node))
    names = set(_own_names(node))
    for base in node.bases:
        if isinstance(base, ast.Name):
            source = module if base.id in definitions else imports.get(base.id, "")
            if source.startswith("sglang."):
                names |= names_of(f"{source}.{base.id}")
    return frozenset(names)


@cache
def _module(name: str) -> tuple[dict[str, ast.stmt], dict[str, str]]:
    """A module's classes and functions by name, and the module that each import comes from."""
    import sglang

    path = Path(sglang.__path__[0], *name.split(".")[1:])
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    body = ast.parse(files[0].read_text(encoding="utf-8")).body if files else []
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            definitions[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports.update({alias.asname or alias.name: node.module for alias in node.names})
    return definitions, imports


def _own_names(cls: ast.ClassDef) -> Iterator[str]:
    for statement in cls.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        elif isinstance(statement, ast.AnnAssign):
            yield from _targets(statement.target)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                yield from _targets(target)
    for node in ast.walk(cls):
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr
        elif isinstance(node.value, ast.Attribute) and _is_self(node.value.value):
            yield f"{node.value.attr}.{node.attr}"


def _targets(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _keywords(function: ast.stmt) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SimpleNamespace":
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
