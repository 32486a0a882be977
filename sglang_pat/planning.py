# SPDX-License-Identifier: Apache-2.0
"""The former name of ``planner``, for importers that still use it."""

from sglang_pat.planner import BRANCH, Node, Plan, Planner, plan

__all__ = ["BRANCH", "Node", "Plan", "Planner", "plan"]
