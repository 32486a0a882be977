# SPDX-License-Identifier: Apache-2.0
"""Start some servers once, so that what SGLang and FlashInfer compile is in their caches when the
tests start all of them: ``python -m gpu_serving.warm [NAME...]`` in tests/.

It takes minutes of the CPUs and little of the GPU, so it goes well beside tests/gpu.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from serving.workloads import random_prompt

from .fleet import Fleet

# Between them all that is compiled: FlashInfer's attention, and SGLang's kernels by head dim.
NAMES = ("ratio4-flashinfer", "ratio7-fa3")


def _exit(signum: int, _frame: object) -> NoReturn:
    sys.exit(128 + signum)


def main(names: list[str]) -> int:
    signal.signal(signal.SIGTERM, _exit)  # unwinds, so that the servers are stopped
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pat_warm_") as folder:
        fleet = Fleet(names or NAMES, Path(folder))
        try:
            fleet.start()
            for name in names or NAMES:
                fleet(name).generate([random_prompt(seed=1, length=300)], 4)
                print(f"{name} answered after {time.monotonic() - began:.0f} s", flush=True)
        finally:
            fleet.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
