# SPDX-License-Identifier: Apache-2.0
"""A demo without downloads: a model, a tokenizer, an agent workload, two servers."""
