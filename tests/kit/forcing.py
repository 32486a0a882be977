# SPDX-License-Identifier: Apache-2.0
"""Teacher forcing through decode: what does a backend think of tokens that another one chose?

In half precision two correct backends round differently, a near-tie flips, and from there on two
texts have nothing in common; comparing them says nothing. So the other backend's tokens are forced:
each decode step adds a constant to the logit of the token to come, so that greedy sampling takes
it, and the constant is taken out of the reported log-probability again. A prompt with the same
tokens as input would not do, as the prefill would compute it, and ``pat`` serves decode.

Torch_native on a CPU against itself in another batching: 1e-4 at most.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import TYPE_CHECKING, Any

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

# Added to the forced token's logit, in natural-log units. A token that loses by more is not taken,
# which no rounding explains. More would cost precision when it is taken out again: at a probability
# of one half fp32 then keeps the log-probability to 1e-5 with 5, but only to 1e-3 with 8.
BIAS = 5.0


class ForceTokens(CustomLogitProcessor):  # type: ignore[misc]  # SGLang has no type hints to use
    """Adds BIAS to the next token of ``custom_params["forced"]``, a list of token ids."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        """``logits`` [requests, vocab] fp32, changed in place; one dict for each request.

        The step is counted in the dict, which lives as long as its request: with overlap
        scheduling the request's own list of tokens is one step behind.
        """
        for row, params in enumerate(custom_param_list or ()):
            step = params.setdefault("step", 0)
            if step < len(params["forced"]):
                logits[row, params["forced"][step]] += BIAS
            params["step"] = step + 1
        return logits


def unbias(logprob: float) -> float:
    """The log-probability of a token before BIAS was added to its logit.

    With p' = p e^B / (1 - p + p e^B), p = p' / (p' + (1 - p') e^B).
    """
    return -math.log1p(-math.expm1(logprob) / math.exp(logprob) * math.exp(BIAS))


def force_all(
    ask: Callable[[dict[str, Any]], dict[str, Any]],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    more: Sequence[dict[str, Any]] = (),
) -> list[list[float]]:
    """Log-probabilities of the tokens of ``texts``, one text to each prompt, all decoded at once.

    NaN for a token that was not taken: it lost by more than BIAS, and so do the ones after it,
    whose context is another one. ``ask`` posts a body to ``/generate``, from several threads;
    ``more``: further fields of the body of each prompt, or nothing.
    """

    def force(prompt: Sequence[int], text: Sequence[int], fields: dict[str, Any]) -> list[float]:
        sampling = {"temperature": 0, "max_new_tokens": len(text), "ignore_eos": True}
        body = {
            "input_ids": list(prompt),
            "sampling_params": sampling | {"custom_params": {"forced": list(text)}},
            "return_logprob": True,
            "custom_logit_processor": ForceTokens.to_str(),
        }
        taken = ask(body | fields)["meta_info"]["output_token_logprobs"]
        logprobs: list[float] = []
        for (logprob, token, _), wanted in zip(taken, text, strict=True):
            if token != wanted or logprob is None:
                break
            logprobs.append(unbias(logprob))
        return logprobs + [math.nan] * (len(text) - len(logprobs))

    if not len(prompts) == len(texts) == len(more or texts):
        raise ValueError(
            f"{len(prompts)} prompts, {len(texts)} texts and further fields of {len(more)}; there "
            "must be equally many"
        )
    with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
        return list(pool.map(force, prompts, texts, more or repeat({})))
