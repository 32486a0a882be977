# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, run from a checkout. They print figures; they are not tests.

- ``kernel``: the attention of one decode step and layer, ``python -m benchmarks.kernel``, and the
  planner's costs, ``python -m benchmarks.kernel.fit``.
- ``serving``: servers beside each other, driven by SGLang's own client,
  ``python -m benchmarks.serving``.
- ``host``: the host time of decode steps on SGLang's caches, ``python -m benchmarks.host.step``.
- ``papers``: other papers' rules as plans beside ours, ``python -m benchmarks.papers``.
- ``tiles``: PAT's offline choice of tiles, ``python -m benchmarks.tiles``.
"""

import sys
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[1]
if not any((_CHECKOUT / "sglang_pat").glob("_C*.so")):
    # `python -m` looks into the checkout first, whose sglang_pat has no extension: the installed
    # one is meant.
    sys.path.sort(key=lambda folder: Path(folder).resolve() == _CHECKOUT)
