# SPDX-License-Identifier: Apache-2.0
"""The extension's Python-facing helpers: reader of handles and stub file."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_pat import _C

PATHS = ("lock.node", "kv.length", "kv.row")


def request(node=1, length=2, row=3) -> SimpleNamespace:
    return SimpleNamespace(
        lock=SimpleNamespace(node=node), kv=SimpleNamespace(length=length, row=row)
    )


def read(requests, rows, paths=PATHS) -> list[list[int]]:
    given = np.array(rows, dtype=np.int64)
    out = _C.HandleReader(paths, 4, 64).read(requests, given.ctypes.data, 0, 0, 0, False)
    return np.frombuffer(out, dtype=np.int64).reshape(-1, 3).tolist()


def test_reads_handles_of_all_kinds_of_objects() -> None:
    """A request that does not own its row has none; tests/srt/test_handle_memory.py has more."""
    assert read([request(node=2**40), request(row=9)], [3, 4]) == [[2**40, 2, 3], [-1, 0, 4]]
    assert read([request(row=None)], [3]) == [[-1, 0, 3]]
    taken = request()
    vars(taken).update(vars(request(node=8)))  # its dict was taken out of the object
    slots = type("Slots", (), {"__slots__": ("node",)})()
    slots.node = 5
    large = SimpleNamespace(**{f"name{i}": i for i in range(100)}, lock=slots, kv=request().kv)
    assert read([large, taken], [3, 3]) == [[5, 2, 3], [8, 2, 3]]


def test_names_what_is_no_integer_or_missing() -> None:
    with pytest.raises(TypeError, match=r"kv\.length is not an integer"):
        read([request(length=1.5)], [3])
    with pytest.raises(AttributeError, match="nowhere"):
        read([request()], [3], ("lock.node", "kv.length", "nowhere"))


def test_the_stub_names_what_the_extension_has() -> None:
    spec = importlib.util.find_spec("sglang_pat")
    assert spec is not None and spec.origin is not None
    stub = ast.parse(Path(spec.origin).with_name("_C.pyi").read_text())
    of_cuda = ("CudaBuffers", "PlanStaging")
    public = {name for name in dir(_C) if not name.startswith("_")}
    named = {name: node for node in stub.body if (name := _name(node))}
    if not hasattr(_C, "decode_cuda"):  # built without CUDA
        named = {n: node for n, node in named.items() if "_cuda" not in n and n not in of_cuda}
        named = {n: node for n, node in named.items() if not n.startswith("cuda_")}
    assert set(named) == public
    for name, node in named.items():
        if isinstance(node, ast.FunctionDef):
            _same_arguments(node, getattr(_C, name).__doc__)
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            native = getattr(getattr(_C, name), _name(member))
            if isinstance(member, ast.FunctionDef) and member.name != "__init__":
                _same_arguments(member, native.__doc__)


def _name(node: ast.stmt) -> str:
    """Of a function, a class or an annotated value."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return getattr(node, "name", "")


def _signature(doc: str) -> dict[str, bool]:
    """Arguments by name and whether they may be left out: pybind11's docstring starts with them."""
    found = re.findall(r"(\w+): [^=,)]*(?:\[[^\]]*\])?[^=,)]*( = )?", doc.split("\n", 1)[0])
    return {name: bool(default) for name, default in found if name != "self"}


def _same_arguments(node: ast.FunctionDef, doc: str) -> None:
    """The stub's arguments are the extension's, in order, unless it leaves them to these."""
    names = [a.arg for a in node.args.args + node.args.kwonlyargs if a.arg != "self"]
    if node.args.kwarg is None:
        assert [*_signature(doc)] == names, f"{node.name}: {names} against {doc}"
