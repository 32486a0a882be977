# SPDX-License-Identifier: Apache-2.0
"""Servers on a GPU: pat beside fa3 and flashinfer, fallbacks, and a soak (``soak.py``)."""
