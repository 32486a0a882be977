# SPDX-License-Identifier: Apache-2.0
"""A team of agents that reviews a folder: a lead, its specialists, and a helper for every file.

    python examples/agent_team.py --folder csrc/pack

An agent forks: sub-agents go on from its conversation, and it joins what they report. All agents
share the tools and the house rules, specialists the lead's plan too, helpers their specialist's
brief too. The tools only read. Real models call them if the server runs with --tool-call-parser.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from saved import arguments, first_line, savings

Messages = list[dict[str, Any]]  # a conversation; it is only ever appended to

SHOP = Path(__file__).resolve().parent / "shop"  # a small program that never changes
ROUNDS = 4  # answers that an agent may need for a task, because they call tools
SYSTEM = """\
You are one agent of a team that reviews source code. The team has a lead, who plans the review and
writes its result, specialists, who look for one kind of problem each, and helpers, who read one
file for one specialist. All of you have the same tools and these rules:
- Read before you judge. Name the file and quote the line of everything that you report.
- Report what is wrong, what it leads to, and the smallest change that mends it, in this order.
- Rank by harm: wrong results first, then crashes, then lost time, then what is hard to read.
- Taste is not a finding. Neither is what a comment in the code gives a reason for.
- If you are not sure, say so, and name the test that would tell. A finding that turns out wrong
  costs the team more than one that is missed.
- Do not repeat what another agent has reported. Agree in one line, or say why not.
- Answer in at most five sentences. Nothing to report is a good answer: say it in one."""
SPECIALISTS = {
    "correctness": "Look for wrong results: off by one, overflow, order, stale state.",
    "speed": "Look for lost time: copies, allocations, work in a loop that belongs before it.",
    "clarity": "Look for what misleads a reader: names, comments that are not true, dead code.",
}


def tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    """The schema of a tool with one parameter, a text."""
    properties = {parameter: {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": [parameter]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    tool("read_file", "Read a file of the folder: its first 6,000 characters.", "name"),
    tool("search", "Find a text in all files of the folder: the files and their lines.", "text"),
]


def call_tool(files: dict[str, str], name: str, arguments_json: str) -> str:
    """What a tool answers. A model's mistake goes back to the model, which may do better then."""
    try:
        given = json.loads(arguments_json)
        if name == "read_file":
            return files[given["name"]][:6000]
        if name == "search":
            lines = ((file, line) for file in files for line in files[file].splitlines())
            found = (f"{file}: {line}" for file, line in lines if given["text"] in line)
            return "\n".join(found)[:6000]
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"
    return f"error: there is no tool {name}"


@dataclass
class Team:
    """What all agents have in common."""

    client: AsyncOpenAI
    model: str
    max_tokens: int
    files: dict[str, str]

    async def work(self, messages: Messages, task: str) -> Messages:
        """The conversation, continued by ``task``, the tool calls it took, and the answer."""
        # A fork is a longer list: what its parent has said stays in front, word for word, so that
        # its K/V is shared. Most templates put the tools before all messages: an agent that was
        # offered others would share nothing.
        messages = [*messages, {"role": "user", "content": task}]
        for _ in range(ROUNDS):
            response = await self.client.chat.completions.create(
                model=self.model,
                messages=messages,  # type: ignore[arg-type]
                tools=TOOLS,  # type: ignore[arg-type]
                temperature=0,
                max_tokens=self.max_tokens,
            )
            said = response.choices[0].message
            answer = {"role": "assistant", "content": said.content or ""}
            if not said.tool_calls:
                return [*messages, answer]
            calls = [call.model_dump() for call in said.tool_calls]
            messages = [*messages, {**answer, "tool_calls": calls}]
            for call in calls:
                function = call["function"]
                result = call_tool(self.files, function["name"], function["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return [*messages, {"role": "assistant", "content": "I came to no result."}]

    async def join(self, messages: Messages, forks: Mapping[str, Awaitable[Messages]]) -> Messages:
        """The conversation, continued by what its forks, all run at once, have reported."""
        ended = await asyncio.gather(*forks.values())
        reports = {name: fork[-1]["content"] for name, fork in zip(forks, ended, strict=True)}
        for name, report in reports.items():
            print(f"  {name:<28} {first_line(report)}")
        listed = "\n".join(f"{name}: {report}" for name, report in reports.items())
        return await self.work(messages, f"These are the reports. Join them into one.\n{listed}")

    async def specialist(self, lead: Messages, name: str, brief: str) -> Messages:
        """A fork of the lead, which forks into a helper for every file."""
        me = await self.work(lead, f"You are the specialist for {name}. {brief} Say how.")
        helpers = {
            f"{name}, {file}": self.work(me, f"You are a helper of this specialist. Review {file}.")
            for file in self.files
        }
        return await self.join(me, helpers)

    async def review(self) -> str:
        """The lead's result."""
        lead = await self.work(
            [{"role": "system", "content": SYSTEM}],
            f"You are the lead. Plan the review of: {', '.join(self.files)}.",
        )
        specialists = {
            name: self.specialist(lead, name, brief) for name, brief in SPECIALISTS.items()
        }
        return str((await self.join(lead, specialists))[-1]["content"])


async def main() -> None:
    parser = arguments(__doc__, max_tokens=64)
    parser.add_argument("--folder", type=Path, default=SHOP, help="what to review (default: shop)")
    options = parser.parse_args()
    paths = sorted(path for path in options.folder.iterdir() if path.is_file())
    files = {path.name: path.read_text(errors="replace") for path in paths}
    with savings(options.url):
        async with AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none") as client:
            team = Team(client, options.model, options.max_tokens, files)
            result = await team.review()
        print(f"result of the review:\n{result}")


if __name__ == "__main__":
    asyncio.run(main())
