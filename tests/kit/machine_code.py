# SPDX-License-Identifier: Apache-2.0
"""What the compiled extension holds for GPUs."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

from sglang_pat import _C


def cuobjdump(*options: str) -> str:
    """What Triton's copy of the tool prints of the extension."""
    tool = Path(str(find_spec("triton").origin)).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.check_output([tool, *options, _C.__file__], text=True)
