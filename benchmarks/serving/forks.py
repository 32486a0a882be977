# SPDX-License-Identifier: Apache-2.0
"""SGLang's client with conversations that fork: ``python -m benchmarks.serving.forks``, with the
arguments of ``sglang.benchmark.steady_state_serving``.

A turn of SGLang's ``agentic-trace`` is one request. Here a turn whose messages have ``tokens``, a
length for the answer, is one request a message, all sent at once, each with the conversation so far
before it. Their answers, in the order of the messages, are the conversation's next message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

from benchmarks.serving.loads import PROGRAM


def forking(request_func: Any, backend: str) -> Any:
    """In place of the client's ``wrap_multi_turn_request_func``."""

    async def converse(request_func_input: Any, pbar: Any = None) -> list[Any]:
        history: list[dict[str, str]] = []
        outputs: list[Any] = []
        # Only so does the client learn how many tokens it got: an event may have several.
        body = request_func_input.extra_request_body | {"stream_options": {"include_usage": True}}

        async def ask(text: str, tokens: int) -> str:
            messages = [*history, {"role": "user", "content": text}]
            asked = {"prompt": messages, "output_len": tokens, "extra_request_body": body}
            output = await request_func(replace(request_func_input, **asked))
            outputs.append(output)
            return str(output.generated_text)

        for turn in request_func_input.prompt:
            forks = [ask(each["content"], each["tokens"]) for each in turn if "tokens" in each]
            text = " ".join(await asyncio.gather(*forks) or [each["content"] for each in turn])
            answer = await ask(text, request_func_input.output_len)
            history += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return outputs

    return converse


def cli_main(arguments: Sequence[str] | None = None) -> None:
    """The client's, of the same name."""
    serving = import_module("sglang.benchmark.serving")
    with mock.patch.object(serving, "wrap_multi_turn_request_func", forking):
        import_module(PROGRAM[0]).cli_main(arguments)


if __name__ == "__main__":
    cli_main()
