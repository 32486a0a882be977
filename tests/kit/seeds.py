# SPDX-License-Identifier: Apache-2.0
"""Sampling that two servers do alike: SGLang 0.5.23 heeds the seeds of requests only where it runs
deterministically, which neither pat nor a CPU has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence

TEMPERATURE = 0.8


class SeededNoise(CustomLogitProcessor):  # type: ignore[misc]  # SGLang has no type hints to use
    """Adds Gumbel noise of ``custom_params["seed"]`` and the step to logits over TEMPERATURE: the
    greatest is then a sample."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """``logits`` [requests, vocab] fp32, changed in place; one dict for each request, which
        lives as long as it (see ``kit.forcing``)."""
        for row, params in enumerate(custom_param_list or ()):
            step = params["step"] = params.get("step", 0) + 1
            generator = torch.Generator().manual_seed(1000 * params["seed"] + step)
            drawn = torch.rand(logits.shape[1], generator=generator)
            logits[row] = logits[row] / TEMPERATURE - torch.log(-torch.log(drawn))
        return logits


def fields(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """What the body of a request has for each of some seeds."""
    processor = SeededNoise.to_str()
    return [
        {"custom_logit_processor": processor, "custom_params": {"seed": seed}} for seed in seeds
    ]
