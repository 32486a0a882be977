# SPDX-License-Identifier: Apache-2.0
"""Servers on a GPU: pat beside fa3 and flashinfer, fallbacks, and a soak (``soak.py``)."""

import sys
from pathlib import Path

# For `benchmarks`; last, so that the installed sglang_pat comes before the checkout's.
sys.path.append(str(Path(__file__).resolve().parents[2]))
