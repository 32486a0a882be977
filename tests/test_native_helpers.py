# SPDX-License-Identifier: Apache-2.0
"""The extension's Python-facing helpers: attribute reader and stub file."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_pat import _C


def read(objects, paths) -> list[list[int]]:
    out = np.full((len(objects), len(paths)), -99, dtype=np.int64)
    _C.read_attrs(objects, paths, out.ctypes.data)
    return out.tolist()


def test_reads_dotted_integers() -> None:
    one = SimpleNamespace(row=3, lock=SimpleNamespace(node=2**40), kv=SimpleNamespace(length=7))
    two = SimpleNamespace(row=4, lock=None, kv=SimpleNamespace(length=None))
    paths = ["row", "lock.node", "kv.length"]
    assert read([one, two], paths) == [[3, 2**40, 7], [4, -1, -1]]
    assert read([], paths) == []


@pytest.mark.parametrize("value", [1.5, "x", object(), [1]])
def test_refuses_what_is_not_an_integer(value) -> None:
    with pytest.raises(TypeError, match=r"a\.b is not an integer"):
        read([SimpleNamespace(a=SimpleNamespace(b=value))], ["a.b"])


def test_names_a_missing_attribute() -> None:
    with pytest.raises(AttributeError, match="nowhere"):
        read([SimpleNamespace(a=1)], ["nowhere"])


def test_the_stub_names_what_the_extension_has() -> None:
    spec = importlib.util.find_spec("sglang_pat")
    assert spec is not None and spec.origin is not None
    stub = ast.parse(Path(spec.origin).with_name("_C.pyi").read_text())
    in_stub = {n.name: n for n in stub.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    public = {name for name in dir(_C) if not name.startswith("_")}
    if not hasattr(_C, "decode_cuda"):  # built without CUDA
        for name in [name for name in in_stub if "cuda" in name] + ["PlanStaging"]:
            del in_stub[name]
    assert set(in_stub) == public
    for name, node in in_stub.items():
        native = getattr(_C, name)
        if isinstance(node, ast.FunctionDef):
            _same_arguments(node, native.__doc__)
            continue
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                assert hasattr(native, member.name), f"{name}.{member.name}"
                is_property = any(
                    isinstance(d, ast.Name) and d.id == "property" for d in member.decorator_list
                )
                if not is_property and member.name != "__init__":
                    _same_arguments(member, getattr(native, member.name).__doc__)
            else:
                target = member.target if isinstance(member, ast.AnnAssign) else member.targets[0]
                assert hasattr(native, target.id), f"{name}.{target.id}"


def _same_arguments(node: ast.FunctionDef, doc: str) -> None:
    """pybind11's docstring starts with the signature: the stub's arguments, in order."""
    names = [a.arg for a in node.args.args + node.args.kwonlyargs if a.arg != "self"]
    signature = doc.split("\n", 1)[0]
    at = [signature.find(f"{name}: ") for name in names]
    assert -1 not in at and at == sorted(at), f"{node.name}: {names} against {signature}"
    assert signature.count(": ") - signature.count("self: ") == len(names), signature
