# SPDX-License-Identifier: Apache-2.0
"""Servers beside each other, driven by SGLang's own client: see ``__main__``."""
