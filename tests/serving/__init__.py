# SPDX-License-Identifier: Apache-2.0
"""Tests on a real SGLang server: a process of its own, a real radix cache, nothing mocked."""
