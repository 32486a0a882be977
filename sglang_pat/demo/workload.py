# SPDX-License-Identifier: Apache-2.0
"""An agent workload over the OpenAI-compatible API.

Six agents of one team work on four tasks each, or on several parts of each task, all at once. Every
request begins with the same tool schema and system prompt, then comes the agent's own prompt, then
the task: a prefix tree of three levels with 24 leaves or more. Each conversation takes two turns;
the second one appends the first answer and a tool's result. The texts are in ``agents.json``.
"""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI

    from sglang_pat.demo.server import Server


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer. ``logprobs`` and ``margins`` have one natural-log value for each output token,
    NaN where they were not asked for."""

    name: str  # agent, task and turn
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]  # of the tokens chosen
    margins: list[float]  # by how much the token chosen leads the next best
    text: str
    tpot_s: float  # seconds per output token after the first

    def __post_init__(self) -> None:
        if not len(self.output_ids) == len(self.logprobs) == len(self.margins):
            raise ValueError(
                f"{self.name}: the server sent {len(self.output_ids)} tokens but "
                f"{len(self.logprobs)} log-probabilities"
            )


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """What to ask; two workloads that are equal ask the same."""

    tools: list[dict[str, Any]]
    system: str
    agents: list[dict[str, Any]]  # name, prompt, tasks
    follow_up: str
    turns: int = 2
    max_tokens: int = 32  # of every answer; no answer is shorter
    logprobs: bool = True  # whether to ask for log-probabilities

    @classmethod
    def load(
        cls, *, parts: int = 1, handbook: bool = False, max_tokens: int = 32, logprobs: bool = True
    ) -> AgentWorkload:
        """The texts of ``agents.json``: ``parts`` conversations for each task, with ``handbook``
        the text of ``corpus.txt`` at the end of the common system prompt."""
        texts = files("sglang_pat.demo")
        given = json.loads((texts / "agents.json").read_text(encoding="utf-8"))
        if handbook:
            given["system"] += "\n\n" + (texts / "corpus.txt").read_text(encoding="utf-8")
        for agent in given["agents"] if parts > 1 else ():
            agent["tasks"] = [
                f"{task} Do it for part {part} of {parts}."
                for task in agent["tasks"]
                for part in range(1, parts + 1)
            ]
        return cls(**given, max_tokens=max_tokens, logprobs=logprobs)

    @property
    def num_conversations(self) -> int:
        return sum(len(agent["tasks"]) for agent in self.agents)

    @property
    def num_requests(self) -> int:
        return self.num_conversations * self.turns


def run_workload(
    server: Server, workload: AgentWorkload, *, label: str
) -> tuple[list[Generation], float]:
    """Ask the server, which must have ``LOG_REQUESTS``. Returns the answers ordered by agent, task
    and turn, whenever they came, and the seconds from the arrival of a turn's requests to the last
    of its answers, over all turns.

    The server is paused until all requests of a turn have come: they decode together, however slow
    the machine is. Shows a progress bar, named ``label``, on standard error.

    Raises:
        openai.OpenAIError: the server refused a request or went away.
        TimeoutError: not all requests of a turn came in time.
    """
    from openai import OpenAI
    from tqdm import tqdm  # type: ignore[import-untyped]

    system = {"role": "system", "content": workload.system}
    talks = [
        (
            f"{agent['name']}/{task}",
            [
                system,
                {"role": "system", "content": agent["prompt"]},
                {"role": "user", "content": text},
            ],
        )
        for agent in workload.agents
        for task, text in enumerate(agent["tasks"])
    ]
    turns, seconds = [], 0.0
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(len(talks)) as pool,
        tqdm(
            total=workload.num_requests * workload.max_tokens,
            desc=label,
            unit=" tokens",
            dynamic_ncols=True,
        ) as progress,
    ):
        # As on a server that has been up for a while: the common prompt is in the cache.
        _ask(client, workload, "warm-up", [system], max_tokens=1)
        for turn in range(workload.turns):
            with server.paused_until_arrived(len(talks)):
                asked = [
                    pool.submit(
                        _ask, client, workload, f"{name}/{turn}", messages, workload.max_tokens
                    )
                    for name, messages in talks
                ]
            began = time.perf_counter()
            answers = []
            for each, (_, messages) in zip(asked, talks, strict=True):
                answers.append(answer := each.result())
                progress.update(len(answer.output_ids))
                messages.append({"role": "assistant", "content": answer.text})
                messages.append({"role": "user", "content": workload.follow_up})
            seconds += time.perf_counter() - began
            turns.append(answers)
    return [answer for talk in zip(*turns, strict=True) for answer in talk], seconds


def _ask(
    client: OpenAI,
    workload: AgentWorkload,
    name: str,
    messages: list[dict[str, str]],
    max_tokens: int,
) -> Generation:
    # Not streamed: SGLang's stream leaves out the log-probabilities of a token that is only a part
    # of a character. The server's own clock gives the time between tokens.
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if workload.logprobs else {}
    response = client.chat.completions.create(
        model="default",
        messages=messages,  # type: ignore[arg-type]
        tools=workload.tools,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=max_tokens,
        **asked,
        extra_body={"ignore_eos": True, "return_token_ids": True, "return_meta_info": True},
    )
    choice = response.choices[0]
    extra = choice.model_extra or {}  # what SGLang adds to the OpenAI fields
    output_ids = extra["response_token_ids"]
    tokens = (choice.logprobs and choice.logprobs.content) or []
    logprobs = [token.logprob for token in tokens]
    margins = [token.top_logprobs[0].logprob - token.top_logprobs[1].logprob for token in tokens]
    if not workload.logprobs:
        logprobs = margins = [math.nan] * len(output_ids)
    meta = extra["meta_info"]
    decode_s = meta["e2e_latency"] - meta["first_token_latency"]
    return Generation(
        name=name,
        prompt_ids=extra["prompt_token_ids"],
        output_ids=output_ids,
        logprobs=logprobs,
        margins=margins,
        text=choice.message.content or "",
        tpot_s=decode_s / max(len(output_ids) - 1, 1),
    )
