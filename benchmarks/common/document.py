# SPDX-License-Identifier: Apache-2.0
"""A document of rows, and of how and where a benchmark measured them."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Document = dict[str, Any]
PACKAGES = ("sglang-pat", "sglang", "torch", "sglang-kernel", "flashinfer-python")


def conditions(kind: str, module: str, device: str, settings: Mapping[str, Any]) -> Document:
    """A document of ``kind`` without rows, of ``python -m module`` as it was called."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "kind": kind,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "device": device,
        "versions": versions,
        "settings": dict(settings),
    }


def device_name(device: str) -> str:
    """The GPU for "cuda", else how many threads of the CPU torch takes."""
    on_gpu = device == "cuda"
    return torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"


def heading(document: Document) -> list[str]:
    """Where and how a document was measured, as two lines."""
    settings = ", ".join(f"{name} {value}" for name, value in document["settings"].items())
    found = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    return [f"{document['date']}  {document['device']}  {settings}", found]


def read(path: Path, kinds: Collection[str]) -> Document:
    """A document of one of ``kinds`` that ``--json`` wrote. Raises OSError or ValueError."""
    with suppress(ValueError):
        document = json.loads(path.read_text())
        if isinstance(document, dict) and document.get("kind") in kinds:
            return document
    raise ValueError(f"{path} is no document of {' or '.join(kinds)} that --json wrote")


def add_row(found: Document, row: dict[str, Any], path: Path | None) -> None:
    """One more row, printed as a line of JSON; ``path``: where the document is written anew."""
    print(json.dumps(row), flush=True)
    found["rows"].append(row)
    write(found, path)


def write(found: Document, path: Path | None) -> None:
    """Replace the file at once, so that whoever ends this process leaves a whole one."""
    if path:
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(part, path)
