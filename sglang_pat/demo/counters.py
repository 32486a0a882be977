# SPDX-License-Identifier: Apache-2.0
"""The names of ``sglang_pat.bench.common.counters`` that the examples use."""

from sglang_pat.bench.common.counters import Counters, read_counters

__all__ = ["Counters", "read_counters"]
