# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat estimate --break-even``: from how many shared tokens on pat pays.

``surface`` models the time per token over requests and shared tokens, with the same plans and the
same cost model as the rest of ``estimate``, ``compared`` says where that was ever measured,
``report`` writes, ``contours`` draws, ``command`` has the options (docs/is-it-for-me.md).
"""
