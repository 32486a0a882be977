# SPDX-License-Identifier: Apache-2.0
"""How all pictures of the benchmarks look. matplotlib is imported when one is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Colour of each contestant, the same in every picture.
COLOURS = {"pat": "#c03030", "fa3": "#8aa0b8", "flashinfer": "#5d7896", "levels": "#c9b27c"}


_ELSEWHERE = "keep --json FILE and draw it elsewhere with --from FILE --plot PNG"


def require(instead: str = _ELSEWHERE) -> Any:
    """``matplotlib.figure``. Raises SystemExit that says how to get it, and what to do ``instead``
    of drawing here."""
    try:
        return import_module("matplotlib.figure")
    except ImportError as error:
        raise SystemExit(
            f"--plot needs matplotlib ({error}): pip install matplotlib, or {instead}"
        ) from None


def head(axis: Any, title: str) -> None:
    """Title above a panel, no frame: how all our pictures look."""
    axis.set_title(title, loc="left", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def finish(axis: Any, title: str) -> None:
    """``head``, and a legend beside the title."""
    head(axis, title)
    axis.legend(frameon=False, fontsize=8, ncols=6, loc="lower right", bbox_to_anchor=(1, 1))
