# SPDX-License-Identifier: Apache-2.0
"""Data flows one way: no circle among imports, those in functions and for types included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("cli", "doctor", "demo", "estimate", "explain", "srt.verdict")


def modules() -> dict[str, Path]:
    paths = (ROOT / "sglang_pat").rglob("*.py")
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def imported(path: Path) -> set[str]:
    """What a file imports, each name of ``from a import b`` as a.b too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def edges() -> dict[str, set[str]]:
    known = modules()
    graph = {}
    for name, path in known.items():
        # Of `from a.b import c` it is module a.b.c, or else c out of a.b; _C is no Python.
        used = {
            n if n in known else n.rpartition(".")[0] for n in imported(path) - {"sglang_pat._C"}
        }
        graph[name] = {each for each in used if each in known and each != name}
    return graph


def test_there_is_no_circle() -> None:
    TopologicalSorter(edges()).prepare()  # raises CycleError, which names one


def test_the_package_imports_no_benchmark_and_no_test() -> None:
    outside = {"benchmarks", "tests", "kit", "examples"}
    for name, path in modules().items():
        assert not outside & {each.partition(".")[0] for each in imported(path)}, name


def test_a_server_loads_no_command() -> None:
    graph, found = edges(), set[str]()
    waiting = ["sglang_pat.srt.plugin", "sglang_pat.srt.platform"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    commands = tuple(f"sglang_pat.{command}" for command in COMMANDS)
    assert not [name for name in found if name.startswith(commands)]
