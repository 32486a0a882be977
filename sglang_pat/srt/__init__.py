# SPDX-License-Identifier: Apache-2.0
"""All that knows SGLang: an upgrade of SGLang touches the modules in here."""

BACKEND = "pat"  # the name of the attention backend
