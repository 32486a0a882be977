# SPDX-License-Identifier: Apache-2.0
"""Who serves each layer of the model: pat, or the base."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_pat.srt import refusals
from sglang_pat.srt.support import CHOOSE_ANOTHER
from sglang_pat.srt.survey import Survey
from sglang_pat.target import Target

logger = logging.getLogger("sglang_pat")


class LayerRoutes:
    """The layers that have come by, or that a survey of the model has seen.

    ``survey``: layers that it lacks are decided when they come by. ``reporter``: is told when pat
    turns out to serve none.
    """

    def __init__(self, survey: Survey | None, target: Target, reporter: Any) -> None:
        self._target = target
        self._reporter = reporter
        # By layer id: why the layer is the base's, or "". Then the reasons of those that are.
        self._reasons = dict(survey.reasons) if survey else {}
        self._surveyed = bool(self._reasons)
        self.of_base = [reason for reason in self._reasons.values() if reason]

    @property
    def all_are_ours(self) -> bool:
        """False before a layer has come by."""
        return bool(self._reasons) and not self.of_base

    @property
    def none_is_ours(self) -> bool:
        """False before a layer has come by."""
        return bool(self._reasons) and len(self.of_base) == len(self._reasons)

    def reason_against(
        self, layer: Any, dtype: torch.dtype, pool: Any, arguments: dict[str, Any]
    ) -> str:
        """Why a layer is the base's, or "" if it is ours. Decided once and kept, but for arguments
        that come later. ``dtype``: of its queries; ``arguments``: what the model gives its
        attention beside what every model gives; one that is None is none."""
        given = sorted(name for name, value in arguments.items() if value is not None)
        reason = self._reasons.get(layer.layer_id)
        if reason is None or (given and not reason):
            reason = (
                f"arguments {', '.join(given)}"
                if given
                else refusals.reason_against_layer(layer, dtype, pool, self._target)
            )
            self._reasons[layer.layer_id] = reason
            self.of_base = [reason for reason in self._reasons.values() if reason]
            if self._surveyed and self.none_is_ours:
                self._reporter.set_serving(False)
                logger.warning(
                    "sglang_pat: serves nothing on this server: the last layer has %s; %s",
                    reason,
                    CHOOSE_ANOTHER,
                )
        return reason
