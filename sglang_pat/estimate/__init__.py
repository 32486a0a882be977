# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate``: what pat would gain on given prompts, on any machine, without SGLang.

``prompts`` and ``trace`` read the requests, ``radix`` finds what they share, ``batches`` which of
them decode together, ``planning`` plans those batches and sums up, ``step`` models the time of a
token, ``differences`` and ``kinds`` find prompts that a timestamp or an id keeps from sharing,
``server`` asks a running server instead, ``break_even`` needs no requests at all, ``picture`` and
``report`` write, ``command`` is the subcommand and ``options`` names GPU and model for it
(docs/estimate.md).
"""
