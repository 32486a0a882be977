# SPDX-License-Identifier: Apache-2.0
"""Host time of decode steps on live caches (``step``) and of our patch to SGLang (``upstream``)."""
