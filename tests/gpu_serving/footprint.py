# SPDX-License-Identifier: Apache-2.0
"""What a server holds: host bytes of its schedulers, device bytes of the machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SCHEDULER = b"sglang::scheduler"  # the title of the process that pat runs in
PAGE = os.sysconf("SC_PAGESIZE")


def scheduler_bytes(server_pid: int) -> int:
    """Resident bytes of the schedulers in a server's process group.

    Raises ProcessLookupError if there is none.
    """
    held = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended meanwhile
            if not folder.name.isdigit() or os.getpgid(int(folder.name)) != server_pid:
                continue
            if (folder / "cmdline").read_bytes().startswith(SCHEDULER):
                held += int((folder / "statm").read_text().split()[1]) * PAGE
    if not held:
        raise ProcessLookupError(f"no {SCHEDULER.decode()} in the process group {server_pid}")
    return held


def device_bytes() -> int:
    """Bytes in use on the first GPU, of all processes."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return total - free
