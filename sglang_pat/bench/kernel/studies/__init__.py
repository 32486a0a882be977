# SPDX-License-Identifier: Apache-2.0
"""Rules of other papers on our kernels, a study each: ``python -m sglang_pat.bench.kernel --study
NAME``."""
