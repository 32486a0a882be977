# SPDX-License-Identifier: Apache-2.0
"""A prefill server and a decode server that gets its K/V over NIXL; no router between.

Both get every request, with a room where they meet. The prefill server samples the first token,
the decode server all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit import forcing

from sglang_pat.demo.server import reserve_port

from .server import Config, Prompt, ServingServer

_rooms = itertools.count(1)


class Pair:
    """``prefill`` and ``decode``: started servers; ``port``: where they find each other."""

    def __init__(self, prefill: ServingServer, decode: ServingServer, port: int) -> None:
        self.prefill, self.decode, self._port = prefill, decode, port

    def ask(
        self, body: dict[str, Any], decode_body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The decode server's answer to a request for ``/generate``; ``decode_body``: what it gets
        instead of ``body``."""
        meeting = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._port}
        meeting |= {"bootstrap_room": next(_rooms)}
        with ThreadPoolExecutor(max_workers=2) as pool:
            first = pool.submit(self.prefill.post, "/generate", body | meeting)
            rest = pool.submit(self.decode.post, "/generate", (decode_body or body) | meeting)
            first.result()
            answer: dict[str, Any] = rest.result()
        return answer

    def forced_logprobs(
        self, prompts: Sequence[Prompt], texts: Sequence[Sequence[int]]
    ) -> list[float]:
        """Log-probabilities of the tokens of ``texts``, one to each prompt, all decoded at once;
        NaN for a token that lost by so much that it could not be forced."""

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            # Each server counts for itself, and the first token is the prefill server's.
            parameters = body["sampling_params"]
            rest = parameters["custom_params"]["forced"][1:]
            parameters = parameters | {"custom_params": {"forced": rest}}
            return self.ask(body, body | {"sampling_params": parameters})

        # Cached prompts: a prefill in chunks would ask for a forced token at the end of each.
        self.generate(prompts, 1)
        found = forcing.force_all(ask, prompts, texts)
        return [value for values in found for value in values]

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> list[dict[str, Any]]:
        """Greedy answers to all prompts, sent at once, as ``/generate`` gives them."""
        parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": new_tokens}
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            return list(
                pool.map(
                    lambda prompt: self.ask(
                        {
                            "input_ids": list(prompt),
                            "sampling_params": parameters,
                            "return_logprob": True,
                        }
                    ),
                    prompts,
                )
            )


@contextmanager
def serve_pair(
    model: Path, folder: Path, config: Config, decode_args: tuple[str, ...]
) -> Iterator[Pair]:
    """A pair of servers of ``config``; ``decode_args``: more of the decode server's.

    Raises:
        ServerError: one did not start.
    """
    port = reserve_port()
    common = ("--disaggregation-transfer-backend", "nixl")
    common += ("--disaggregation-bootstrap-port", str(port))
    env = (*config.env, ("SGLANG_HOST_IP", "127.0.0.1"))  # else it looks for a network
    with ExitStack() as stack:
        servers = []
        for mode, more in (("prefill", ()), ("decode", decode_args)):
            args = (*config.args, *common, "--disaggregation-mode", mode, *more)
            server = ServingServer(model, replace(config, args=args, env=env), folder / mode)
            stack.callback(server.stop)
            server.start()
            servers.append(server)
        for server in servers:
            server.wait_until_ready()
        yield Pair(servers[0], servers[1], port)
