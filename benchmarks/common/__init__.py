# SPDX-License-Identifier: Apache-2.0
"""What benchmarks and tests share: batches, attention by its definition, documents of rows."""
