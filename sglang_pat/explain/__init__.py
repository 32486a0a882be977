# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat explain``: plans a batch without a GPU and without SGLang, and draws the plan.

``requests`` reads the batch, ``reading`` turns its plan into the named ``parts``, ``text`` and
``svg`` draw them, ``command`` is the subcommand.
"""
