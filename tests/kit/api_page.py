# SPDX-License-Identifier: Apache-2.0
"""``docs/api.md``, from the signatures and docstrings of the public names (``make api``)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import sglang_pat

HEAD = """\
# Python API

`make api` writes this page from the docstrings. All names are importable from `sglang_pat`;
importing it touches neither CUDA nor SGLang. Sizes: B queries of a batch, R rows of `req_to_token`,
Hq query heads, Hkv KV heads, D and Dv the head dims of K and V. The
[README](../README.md#how-it-works) has a call that runs on any machine,
[walkthrough.md](walkthrough.md) follows one step through the code, and
[operating.md](operating.md) has the options of the SGLang backend.
"""
# In the order in which a caller meets them.
NAMES = ("plan", "Node", "Target", "Plan", "decode", "Workspace", "check_slots", "SlotMismatch")


def page() -> str:
    """The whole page, which ends with a newline."""
    assert set(NAMES) | {"__version__"} == set(sglang_pat.__all__)
    sections = [HEAD, *("\n".join(_section(name)) for name in NAMES)]
    return "\n".join(sections)


def _section(name: str) -> Iterator[str]:
    value = getattr(sglang_pat, name)
    yield f"## `{name}`\n"
    if not inspect.isclass(value):
        yield from _described(f"{name}{inspect.signature(value)}", value)
        return
    constructor = "" if name in ("Plan", "SlotMismatch") else _signature(value)
    yield from _described(f"class {name}{constructor}", value)
    for member, own in vars(value).items():
        described = inspect.getattr_static(value, member)
        if member.startswith("_") or not (getattr(own, "__doc__", None) or "").strip():
            continue
        if isinstance(described, (property, cached_property)):
            yield f"- `{member}`: {' '.join((described.__doc__ or '').split())}"
        elif callable(own) or isinstance(own, classmethod):
            yield ""
            yield from _described(f"{name}.{member}{_signature(getattr(value, member))}", own)


def _signature(value: Any) -> str:
    """As in the source; of a function of the extension as pybind11 writes it, in Python's words."""
    try:
        text = str(inspect.signature(value))
    except ValueError:
        first = (value.__doc__ or "").splitlines()[0]
        text = first[first.index("(") :].replace("self: sglang_pat._C.Plan, ", "")
    text = text.replace("typing.SupportsInt | typing.SupportsIndex", "int")
    text = re.sub(r"ForwardRef\('(\w+)'\)", r"\1", text)
    return re.sub(r"<class '([\w.]+)'>", r"\1", text)


def _described(signature: str, value: Any) -> Iterator[str]:
    text = inspect.cleandoc(value.__doc__ or "")
    if "(self: sglang_pat._C." in text:  # pybind11 repeats the signature
        text = text.split("\n", 1)[1].strip()
    yield f"```text\n{signature.replace(chr(39), '')}\n\n{text}\n```\n"


if __name__ == "__main__":
    print(page(), end="")
