# SPDX-License-Identifier: Apache-2.0
"""Host time of decode steps on SGLang's prefix caches."""
