# SPDX-License-Identifier: Apache-2.0
"""What a server holds: host bytes by process, device bytes of the machine."""

from __future__ import annotations

import os
from pathlib import Path

SCHEDULER = "sglang::scheduler"  # the title of the process that pat runs in
PAGE = os.sysconf("SC_PAGESIZE")


def host_bytes(server_pid: int) -> dict[str, int]:
    """Resident bytes of every process in a server's process group, by title (the first word).

    Raises ProcessLookupError if its scheduler is not among them.
    """
    held: dict[str, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if os.getpgid(int(folder.name)) != server_pid:
                continue
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").split()
            pages = int((folder / "statm").read_text().split()[1])
        except (ProcessLookupError, FileNotFoundError):
            continue  # ended meanwhile
        name = os.fsdecode(title[0]) if title else ""
        held[name] = held.get(name, 0) + pages * PAGE
    if not any(name.startswith(SCHEDULER) for name in held):
        raise ProcessLookupError(f"no {SCHEDULER} in the process group {server_pid}: {held}")
    return held


def scheduler_bytes(server_pid: int) -> int:
    held = host_bytes(server_pid)
    return sum(size for name, size in held.items() if name.startswith(SCHEDULER))


def device_bytes() -> int:
    """Bytes in use on the first GPU, of all processes."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return total - free
