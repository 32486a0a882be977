# SPDX-License-Identifier: Apache-2.0
"""What benchmarks, demo and tests share: servers and their counters, trees, documents, figures."""
