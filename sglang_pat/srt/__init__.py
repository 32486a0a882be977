# SPDX-License-Identifier: Apache-2.0
"""What knows SGLang: an upgrade of SGLang changes this package alone."""
