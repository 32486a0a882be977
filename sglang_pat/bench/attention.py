# SPDX-License-Identifier: Apache-2.0
"""``python -m sglang_pat.bench.attention``: ``sglang_pat.bench.kernel.attention``."""

from sglang_pat.bench.kernel.attention import main

if __name__ == "__main__":
    main()
