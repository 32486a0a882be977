# SPDX-License-Identifier: Apache-2.0
"""What SGLang's client is asked to send, as arguments of ``sglang.benchmark.serving``.

A load is written in one of three ways:

- ``[GROUPS*]PREFIX[+PRIVATE]xREQUESTS``, as ``8192x128``, ``8*2048x16``, ``1024+512x256``: requests
  sent at once, GROUPS groups (default 1) of REQUESTS each on a prefix of PREFIX tokens of their own
  (``0x64``: 64 that share nothing), with PRIVATE and 128 tokens behind it.
- ``SYSTEM+ROLES*ROLExAGENTS``, as ``3000+4*1200x64``: AGENTS conversations at a time, each behind a
  system prompt of SYSTEM tokens and one of ROLES prompts of ROLE tokens. A turn adds 20 to 300
  tokens and is sent when the last one is answered; the next conversation begins when one ends.
- the arguments themselves, as ``"--dataset-name mooncake --dataset-path FILE --num-prompts 500"``.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_LOADS = ("8192x128", "4096x64", "8*2048x16", "0x64", "0x256")
QUESTION = 128  # tokens of a request of a batch, beyond what is shared or private
NEW_TOKENS = (20, 300)  # of an agent's turn
# Of an agent's answer. The client takes one length for all: answers of one length end at different
# steps because the conversations begin at different times, START_RATE a second.
ANSWER_TOKENS = 90
START_RATE = 32
CONVERSATIONS = 3  # of one agent, one behind the other

_BATCH = re.compile(r"(?:(\d+)\*)?(\d+)(?:\+(\d+))?x(\d+)")
_TEAM = re.compile(r"(\d+)\+(\d+)\*(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Load:
    """``arguments`` of the client; ``output``: tokens of each answer, None if not known. Of agents:
    ``team``, as in the notation, and the file ``trace`` that ``write_trace`` has to write."""

    name: str
    arguments: tuple[str, ...]
    output: int | None = None
    team: tuple[int, int, int, int] | None = None
    trace: Path = Path()


def parse(text: str, *, output: int, folder: Path) -> Load:
    """``output``: tokens of each answer of a batch. ``folder``: of traces.

    Raises:
        ValueError: ``text`` is no load, or one without requests; with examples of loads.
    """
    if text.startswith("--"):
        return Load(text, tuple(shlex.split(text)))
    if found := _TEAM.fullmatch(text):
        system, roles, role, agents = map(int, found.groups())
        if roles and agents:
            trace = folder / f"agents-{'-'.join(found.groups())}.json"
            arguments = (
                *("--backend", "sglang-oai-chat", "--dataset-name", "agentic-trace"),
                *("--dataset-path", str(trace), "--sharegpt-output-len", str(ANSWER_TOKENS)),
                *("--num-prompts", str(agents * CONVERSATIONS)),
                *("--max-concurrency", str(agents), "--request-rate", str(START_RATE)),
            )
            return Load(text, arguments, ANSWER_TOKENS, (system, roles, role, agents), trace)
    elif found := _BATCH.fullmatch(text):
        groups, prefix, private, each = (int(number or 0) for number in found.groups())
        groups = groups if found[1] else 1
        if groups and each:
            return Load(text, _batch(groups, each, prefix, private + QUESTION, output), output)
    raise ValueError(
        f"{text!r} is not a load, or has no requests: write [GROUPS*]PREFIX[+PRIVATE]xREQUESTS as "
        "8192x128 or 8*2048x16, SYSTEM+ROLES*ROLExAGENTS as 3000+4*1200x64, or arguments of "
        "sglang.benchmark.serving as one word that begins with --"
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


def write_trace(load: Load, tokenizer: Any, context: int) -> None:
    """Write the conversations of a team, as SGLang's ``agentic-trace`` reads them.

    ``tokenizer``: of transformers; texts are random tokens, so their lengths are exact if the
    tokenizer makes the same tokens of a text that it made of them. Equal arguments give equal
    files.

    Raises:
        ValueError: ``context``, tokens with which a conversation ends, has no room for one turn.
    """
    assert load.team
    system_tokens, num_roles, role_tokens, agents = load.team
    shared = system_tokens + role_tokens
    least = shared + NEW_TOKENS[1] + ANSWER_TOKENS
    if least > context:
        raise ValueError(f"{load.name}: --agent-context must be {least} or more, not {context}")
    rng = random.Random(load.name)
    ids = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))

    def text(tokens: int) -> str:
        return str(tokenizer.decode(rng.choices(ids, k=tokens)))

    system = text(system_tokens)
    roles = [f"{system} {text(role_tokens)}" for _ in range(num_roles)]
    conversations = []
    for _ in range(agents * CONVERSATIONS):
        turns: list[dict[str, Any]] = []
        messages = [{"role": "system", "content": rng.choice(roles)}]
        length, new = shared, rng.randint(*NEW_TOKENS)
        while length + new + ANSWER_TOKENS <= context:
            length += new
            messages.append({"role": "user", "content": text(new)})
            turns.append({"messages": messages, "prompt_tokens": length})
            length += ANSWER_TOKENS
            messages, new = [], rng.randint(*NEW_TOKENS)
        conversations.append(turns)
    load.trace.write_text(json.dumps({"conversations": conversations}))
