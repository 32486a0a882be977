# SPDX-License-Identifier: Apache-2.0
"""What knows SGLang: an upgrade of SGLang touches the modules in here."""
