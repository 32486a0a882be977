# SPDX-License-Identifier: Apache-2.0
"""The names of ``sglang_pat.bench.common.server`` that the command and the examples use."""

from sglang_pat.bench.common.server import ServerError, default_device

__all__ = ["ServerError", "default_device"]
