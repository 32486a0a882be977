# SPDX-License-Identifier: Apache-2.0
"""What SGLang's client is asked to send, as arguments of ``sglang.benchmark.serving``.

A load is written in one of these ways:

- ``[GROUPS*]PREFIX[+PRIVATE]xREQUESTS``, as ``8192x128``, ``8*2048x16``, ``1024+512x256``: requests
  sent at once, GROUPS groups (default 1) of REQUESTS each on a prefix of PREFIX tokens of their own
  (``0x64``: 64 that share nothing), with PRIVATE and 128 tokens behind it.
- ``SYSTEM+ROLES*ROLExAGENTS``, as ``3000+4*1200x64``: AGENTS conversations at a time, each behind a
  system prompt of SYSTEM tokens and one of ROLES prompts of ROLE tokens. A turn adds 20 to 300
  tokens and is sent when the last one is answered; the next conversation begins when one ends.
- ``rollouts:PROMPTSxSAMPLES[xANSWER]``, as ``rollouts:10x16``: what reinforcement learning samples
  in a step, all sent at once: SAMPLES answers to each of PROMPTS prompts of 128 to 1024 tokens. The
  answers have ANSWER / 8 to ANSWER tokens (default 2048), so they end at different steps.
- ``forks:PARENTSxCHILDREN[xCONTEXT]``, as ``forks:8x6``: PARENTS orchestrators at a time, each a
  conversation behind a context of its own of CONTEXT tokens (default 8192). Twice it forks CHILDREN
  sub-agents, each with a task behind all that it has; their answers become its next message.
- the arguments themselves, as ``"--dataset-name mooncake --dataset-path FILE --num-prompts 500"``.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_LOADS = ("8192x128", "4096x64", "8*2048x16", "0x64", "0x256")
QUESTION = 128  # tokens of a request of a batch, beyond what is shared or private
NEW_TOKENS = (20, 300)  # of an agent's turn
TALK_TOKENS = 920  # of an agent's conversation behind its prompts, at most
# Of an agent's answer. The client takes one length for all: answers of one length end at different
# steps because the conversations begin at different times, START_RATE a second.
ANSWER_TOKENS = 90
START_RATE = 32
CONVERSATIONS = 3  # of one agent or orchestrator, one behind the other
ROLLOUT_PROMPT, ROLLOUT_ANSWER = 1024, 2048  # tokens, the most of each
LEAST = 0.125  # of the most: tokens are drawn from there to the most
FORKS, FORK_CONTEXT = 2, 8192
CHILD_TOKENS = (60, 480)  # of a sub-agent's answer
# The client's tokens/s are those of the longest time in which so much of the most requests that
# were active at the same time were: without the beginning and the end of a batch, or of all.
PROGRAM = ("sglang.benchmark.steady_state_serving", "--steady-state-concurrency-ratio", "0.8")
WHOLE_RUN = (*PROGRAM[:2], "0.001")
FORKING = ("benchmarks.serving.forks", *WHOLE_RUN[1:])

Text = Callable[[int], str]
_BATCH = re.compile(r"(?:([1-9]\d*)\*)?(\d+)(?:\+(\d+))?x([1-9]\d*)")
_TEAM = re.compile(r"(\d+)\+([1-9]\d*)\*(\d+)x([1-9]\d*)")
_COUNTS = r":([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?"
_ROLLOUTS, _FORKS = re.compile(f"rollouts{_COUNTS}"), re.compile(f"forks{_COUNTS}")


@dataclass(frozen=True, slots=True)
class Load:
    """``arguments`` of ``program``, a module with a ``cli_main`` and its first arguments;
    ``output``: least and most tokens of an answer, if known; ``sizes``: the numbers of a load whose
    ``trace`` is still to be written."""

    name: str
    arguments: tuple[str, ...]
    output: tuple[int, int] | None = None
    sizes: tuple[int, ...] = ()
    trace: Path = Path()
    program: tuple[str, ...] = PROGRAM


def parse(text: str, *, output: int, folder: Path) -> Load:
    """``output``: tokens of each answer of a batch. ``folder``: of traces.

    Raises:
        ValueError: ``text`` is no load, or one without requests; with examples of loads.
    """
    if text.startswith("--"):  # a trace, say: requests that arrive over time have no steady state
        return Load(text, tuple(shlex.split(text)), program=WHOLE_RUN)
    if found := _TEAM.fullmatch(text):
        sizes = tuple(map(int, found.groups()))
        return _talks(text, folder / "agents", sizes, output=(ANSWER_TOKENS, ANSWER_TOKENS))
    if found := _BATCH.fullmatch(text):
        groups, prefix, private, each = (int(number or 0) for number in found.groups())
        arguments = _batch(groups or 1, each, prefix, private + QUESTION, output)
        return Load(text, arguments, (output, output))
    if found := _ROLLOUTS.fullmatch(text):
        prompts, each, most = int(found[1]), int(found[2]), int(found[3] or ROLLOUT_ANSWER)
        arguments = _batch(prompts, each, ROLLOUT_PROMPT, 0, most)
        arguments += ("--gsp-range-ratio", str(LEAST), "--temperature", "1")
        return Load(text, arguments, (int(most * LEAST), most), program=WHOLE_RUN)
    if found := _FORKS.fullmatch(text):
        sizes = (int(found[3] or FORK_CONTEXT), int(found[2]), int(found[1]))
        cold = ("--warmup-requests", "0")  # it would leave a whole conversation in the cache
        return _talks(text, folder / "forks", sizes, *cold, output=CHILD_TOKENS, program=FORKING)
    raise ValueError(
        f"{text!r} is not a load, or has no requests: write it as 8192x128, 8*2048x16, "
        "3000+4*1200x64, rollouts:10x16, forks:8x6, or arguments of the client as one word"
    )


def _batch(groups: int, each: int, prefix: int, question: int, output: int) -> tuple[str, ...]:
    if not prefix:
        return (
            *("--dataset-name", "random-ids", "--num-prompts", str(groups * each)),
            *("--random-input-len", str(question), "--random-output-len", str(output)),
            *("--random-range-ratio", "1", "--tokenize-prompt"),
        )
    return (
        *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(groups)),
        *("--gsp-prompts-per-group", str(each), "--gsp-system-prompt-len", str(prefix)),
        *("--gsp-question-len", str(question), "--gsp-output-len", str(output)),
        "--tokenize-prompt",
    )


def _talks(text: str, trace: Path, sizes: tuple[int, ...], *extra: str, **more: Any) -> Load:
    trace = trace.with_name(f"{trace.name}-{'-'.join(map(str, sizes))}.json")
    arguments = (
        *("--backend", "sglang-oai-chat", "--dataset-name", "agentic-trace"),
        *("--dataset-path", str(trace), "--sharegpt-output-len", str(ANSWER_TOKENS)),
        *("--num-prompts", str(sizes[-1] * CONVERSATIONS)),
        *("--max-concurrency", str(sizes[-1]), "--request-rate", str(START_RATE), *extra),
    )
    return Load(text, arguments, sizes=sizes, trace=trace, **more)


def write_trace(load: Load, tokenizer: Any) -> None:
    """Write the conversations of a load, as SGLang's ``agentic-trace`` reads them.

    ``tokenizer``: of transformers; texts are random tokens, so their lengths are exact if the
    tokenizer makes the same tokens of a text that it made of them. Equal loads give equal files.
    """
    rng = random.Random(load.name)
    ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))

    def text(tokens: int) -> str:
        return str(tokenizer.decode(rng.choices(ids, k=tokens)))

    num_talks = load.sizes[-1] * CONVERSATIONS
    if load.program == FORKING:
        talks = [_orchestrator(rng, text, *load.sizes[:2]) for _ in range(num_talks)]
    else:
        system_tokens, num_roles, role_tokens, _ = load.sizes
        shared = system_tokens + role_tokens
        system = text(system_tokens)
        roles = [f"{system} {text(role_tokens)}" for _ in range(num_roles)]
        talks = [_agent(rng, text, rng.choice(roles), shared) for _ in range(num_talks)]
    load.trace.write_text(json.dumps({"conversations": talks}))


def _agent(rng: random.Random, text: Text, system: str, length: int) -> list[Any]:
    turns, new, most = [], rng.randint(*NEW_TOKENS), length + TALK_TOKENS
    messages = [{"role": "system", "content": system}]
    while length + new + ANSWER_TOKENS <= most:
        length += new
        messages.append({"role": "user", "content": text(new)})
        turns.append({"messages": messages, "prompt_tokens": length})
        length += ANSWER_TOKENS
        messages, new = [], rng.randint(*NEW_TOKENS)
    return turns


def _orchestrator(rng: random.Random, text: Text, context: int, children: int) -> list[Any]:
    def said(least: int, most: int, **more: int) -> dict[str, Any]:
        return {"role": "user", "content": text(rng.randint(least, most)), **more}

    turns = [[said(context, context)]]
    for _ in range(FORKS):
        lengths = [rng.randint(*CHILD_TOKENS) for _ in range(children)]
        turns.append([said(*NEW_TOKENS, tokens=length) for length in lengths])
    return [{"messages": turn} for turn in turns]
