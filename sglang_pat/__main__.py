# SPDX-License-Identifier: Apache-2.0
"""``python -m sglang_pat``: the command ``sglang-pat`` of this very Python."""

from __future__ import annotations

import sys

from sglang_pat.cli import main

sys.exit(main())
