# SPDX-License-Identifier: Apache-2.0
"""The extension: what it says of its limits is what it does; its reader of handles; and that the
stub and the calls fit its arguments."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.cases import case, execute
from kit.machine_code import cuobjdump
from kit.pieces import Piece

from sglang_pat import _C
from sglang_pat.target import Target

HEADS: dict[str, Any] = {"num_q_heads": 8, "num_kv_heads": 2, "max_queries": 4}
needs_cuda = pytest.mark.skipif(not hasattr(_C, "decode_cuda"), reason="built with PAT_CUDA=OFF")


@needs_cuda
def test_head_dims_and_groups_of_the_cuda_kernels() -> None:
    served = []
    for head_dim in range(0, 2 * max(_C.CUDA_HEAD_DIMS) + 1, 4):
        with suppress(ValueError):
            # One half, two stages and one Q buffer: 4096 bytes and three tiles of 64 tokens.
            assert _C.cuda_min_shared_bytes(head_dim) == 4096 + 3 * 64 * 2 * head_dim
            served.append(head_dim)
    assert tuple(served) == _C.CUDA_HEAD_DIMS
    given: dict[str, Any] = {"head_dim": 64, "scale": 1.0, "logit_cap": 0.0}
    given |= {"k_stride_slot": 64, "v_stride_slot": 64, "num_kv_heads": 1}
    _C.check_decode_cuda(num_q_heads=_C.CUDA_MAX_GROUP, **given)
    with pytest.raises(ValueError, match=f"from 1 to {_C.CUDA_MAX_GROUP}"):
        _C.check_decode_cuda(num_q_heads=_C.CUDA_MAX_GROUP + 1, **given)


@needs_cuda
def test_the_extension_holds_the_code_that_it_names() -> None:
    """Every kernel file has all code, but for MLA's, of sm_90a alone, and head dim 256 on sm_120,
    where it is refused: its files, one for each type of K and V, lack that cubin."""
    named = Counter(
        f"{kind}_{name}"
        for flag, kind in (("-lelf", "sm"), ("-lptx", "compute"))
        for name in re.findall(r"\.sm_(\w+)\.", cuobjdump(flag))
    )
    assert tuple(sorted(named, key=list(_C.CUDA_CODE).index)) == _C.CUDA_CODE
    named["sm_90a"] -= "sm_90a" in named  # MLA's
    assert len({count for code, count in named.items() if code != "sm_120"}) == 1
    if "sm_120" in named:
        assert named["sm_120"] == named["sm_100"] - 2
    dims = {
        code: set(re.findall(r"forward_kernel\w*Li(\d+)E", cuobjdump("-res-usage", "-arch", code)))
        for code in named
        if code.startswith("sm_")
    }
    most = {"64", "128", "256"}
    assert dims == {code: most - ({"256"} if code == "sm_120" else set()) for code in dims}


def test_head_dims_of_the_cpu_executor() -> None:
    step, most = _C.CPU_HEAD_DIM_STEP, _C.CPU_MAX_HEAD_DIM
    for head_dim in (step, most):
        execute(case([Piece((0,), 0, 3)], (2, 1), head_dim))
        Target.cpu(threads=1, head_dim=head_dim, **HEADS)
        tiles = (64,) if head_dim == most else (16, 64, 128)
        assert Target.h200(head_dim=head_dim, **HEADS).row_tiles == tiles
    assert Target.h200(head_dim=256, **HEADS).row_tiles == (16, 64)
    for head_dim in (step + 1, step // 2, most + step):
        with pytest.raises(ValueError, match=f"head_dim is {head_dim}"):
            execute(case([Piece((0,), 0, 3)], (2, 1), head_dim))
        with pytest.raises(ValueError, match=f"multiples of {step} up to {most}"):
            Target.cpu(threads=1, head_dim=head_dim, **HEADS)


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
