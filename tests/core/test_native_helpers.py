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


def test_reads_handles() -> None:
    """A request that does not own its row has none."""
    released, taken = request(row=4), request()
    released.lock = None
    assert read([request(node=2**40, length=7), released], [3, 4]) == [[2**40, 7, 3], [-1, 2, 4]]
    assert read([request(), request(row=9)], [3, 4]) == [[1, 2, 3], [-1, 0, 4]]
    assert read([request(row=None)], [3]) == [[-1, 0, 3]]
    many = [request(node=i, length=2 * i, row=1000 + i) for i in range(100)]
    assert read(many, range(1000, 1100)) == [[i, 2 * i, 1000 + i] for i in range(100)]
    vars(taken).update(vars(request(node=8)))  # its dict was taken out of the object
    slots = type("Slots", (), {"__slots__": ("node",)})()
    slots.node = 5
    large = SimpleNamespace(**{f"name{i}": i for i in range(100)}, lock=slots, kv=request().kv)
    assert read([large, taken], [3, 3]) == [[5, 2, 3], [8, 2, 3]]


def test_what_is_no_handle_is_named() -> None:
    for value in (1.5, "x", object(), [1]):
        with pytest.raises(TypeError, match=r"kv\.length is not an integer"):
            read([request(length=value)], [3])
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


@pytest.mark.parametrize("module", ["ops", "workspace"])
def test_calls_of_the_extension_fit_its_arguments(module: str) -> None:
    """Also those that only a GPU runs. What ``**name`` adds is a dict literal of the module, or
    an argument of the name."""
    spec = importlib.util.find_spec(f"sglang_pat.{module}")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    added: dict[str, set[str]] = {"factors": set()}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            assert isinstance(node.target, ast.Name)
            added[node.target.id] = _keys(node.value)
    calls = 0
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Name("_C"), name), positional, keywords) if keywords:
                native = getattr(_C, name, None)
                if native is None:  # built without CUDA
                    continue
                doc = native.__init__.__doc__ if isinstance(native, type) else native.__doc__
                taken = _signature(doc)
                given = set([*taken][: len(positional)])
                for each in keywords:
                    more = each.value.id if isinstance(each.value, ast.Name) else ""
                    given |= {each.arg} if each.arg else added.get(more) or _keys(each.value)
                needed = {argument for argument, default in taken.items() if not default}
                assert needed <= given <= set(taken), name
                calls += 1
    assert calls >= (2 if _C.CUDA_CODE else module == "ops")


def _keys(value: ast.expr) -> set[str]:
    """Names in the dict literals of an expression, and those that a dict is made over."""
    found: list[ast.expr | None] = []
    for each in ast.walk(value):
        if isinstance(each, ast.Dict):
            found += each.keys
        elif isinstance(each, ast.DictComp) and isinstance(each.generators[0].iter, ast.Tuple):
            found += each.generators[0].iter.elts
    return {key.value for key in found if isinstance(key, ast.Constant)}
