# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate``: K/V reads that pat would save on given prompts (docs/estimate.md)."""
