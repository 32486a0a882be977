# SPDX-License-Identifier: Apache-2.0
"""What knows SGLang's interfaces."""
