# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat explain``: plans a batch without a GPU and without SGLang, prints and draws it."""
