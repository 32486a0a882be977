# SPDX-License-Identifier: Apache-2.0
"""Host time of planning: ``schedule`` of a plan alone, ``step`` of a decode step on live caches."""
