# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: ``python -m sglang_pat.bench.<name>``. They print figures; they are not tests."""
