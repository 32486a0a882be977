# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat calibrate``: measures a GPU with plans of our own, fits the cost model's factors to
them and writes the GPU's profile. ``command`` is the way in; docs/calibrate.md says how to read it.
"""
