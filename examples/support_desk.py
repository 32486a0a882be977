# SPDX-License-Identifier: Apache-2.0
"""A support desk on the OpenAI SDK: streamed answers, parallel tool calls, several drafts.

    python examples/support_desk.py --customers 16

Each customer has a conversation of two requests. The first one's answer is streamed and calls
several tools at once; their results go back as as many messages, and the second one asks for
several drafts of a reply (n). All conversations share the tools and the rules. With
--timestamp-first the time stands before the rules instead of behind them, and they no longer do.
--save FILE keeps the requests for `sglang-pat estimate --prompts FILE --tokenizer MODEL`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from saved import arguments, first_line, savings

Message = dict[str, Any]

RULES = """\
You answer the customers of a shop for lamps and furniture. These rules hold in every conversation:
- Look up the order, the stock and the policy before you say anything about them. Ask for everything
  that you need in one turn, because the tools answer side by side and the customer is waiting.
- Never promise a date or a refund that no tool has told you. If a tool fails, say what you do not
  know, and offer that a colleague calls back within one working day.
- An order that is on its way cannot be changed. An order that is being packed can, for one hour.
- Returns are free within 30 days if the parcel is complete. Lamps must be unused, furniture must be
  in its box. Damaged goods are replaced at once; ask for a photograph, not for an explanation.
- Be brief and polite. Use the customer's words for the article, and give a sum with its currency.
- Do not speak about other customers, about suppliers, or about how you work.
- Answer in the customer's language. Close with one question if something is open."""
QUESTIONS = (
    "Where is my order? It should have come on Friday.",
    "The shade of the lamp is cracked. What do I do now?",
    "Can I still change the colour of the chair?",
    "I want to send the table back. Who pays for that?",
    "Do you have a second lamp like the one I bought?",
    "Why was I charged twice for one order?",
)
DATA = {"order": "on its way since Thursday", "stock": "4 in the warehouse", "policy": "30 days"}


def schema(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A tool whose parameters are texts with a description each."""
    properties = {
        key: {"type": "string", "description": value} for key, value in parameters.items()
    }
    function = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": [*parameters]},
    }
    return {"type": "function", "function": function}


TOOLS = [
    schema("order", "The state of an order and of its parcel.", number="as 2026-1017"),
    schema("stock", "How many of an article are in the warehouse.", article="its name"),
    schema("policy", "What the shop's terms say about a subject.", subject="as returns"),
]


async def run_tool(call: Message) -> Message:
    """The message that answers one call. A model's mistake goes back to the model."""
    function = call["function"]
    found = DATA.get(function["name"], f"error: there is no tool {function['name']}")
    return {"role": "tool", "tool_call_id": call["id"], "content": found}


def planned(number: int) -> list[Message]:
    """The calls that a conversation needs, for a model that made none: SmolLM2, or one whose
    server runs without --tool-call-parser. So its conversations have the same form."""
    given = {
        "order": {"number": f"2026-{1000 + number}"},
        "stock": {"article": "lamp"},
        "policy": {"subject": "returns"},
    }
    return [
        {
            "id": f"call_{number}_{name}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for name, arguments in given.items()
    ]


def joined(deltas: Sequence[Any]) -> tuple[str, list[Message]]:
    """Text and tool calls of a streamed answer. A call comes in pieces: its id and name first, then
    its arguments; pieces of parallel calls are told apart by their index. A call that max_tokens
    cut off is none."""
    text = ""
    calls: dict[int, Message] = {}
    for delta in deltas:
        text += delta.content or ""
        for piece in delta.tool_calls or []:
            call = calls.setdefault(
                piece.index,
                {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["id"] += piece.id or ""
            call["function"]["name"] += piece.function.name or ""
            call["function"]["arguments"] += piece.function.arguments or ""
    return text, [calls[index] for index in sorted(calls) if is_whole(calls[index])]


def is_whole(call: Message) -> bool:
    """Whether the arguments of a call are a JSON object."""
    try:
        return isinstance(json.loads(call["function"]["arguments"]), dict)
    except ValueError:
        return False


@dataclass
class Desk:
    """What all conversations have in common. ``asked``: the requests, in the order in which they
    were sent; ``called``: of how many conversations the model called tools itself."""

    client: AsyncOpenAI
    model: str
    max_tokens: int
    drafts: int
    timestamp_first: bool
    asked: list[dict[str, Any]] = field(default_factory=list)
    called: int = 0

    def begin(self, question: str) -> list[Message]:
        """The messages of a new conversation."""
        now = f"Current time: {datetime.now().isoformat()}"
        # The rules are the same for all, the time never is. What stands behind the first difference
        # is shared by nobody, so the time belongs to the question.
        rules = f"{now}\n{RULES}" if self.timestamp_first else RULES
        text = question if self.timestamp_first else f"{now}\n{question}"
        return [{"role": "system", "content": rules}, {"role": "user", "content": text}]

    async def ask(self, messages: list[Message], **options: Any) -> Any:
        # The tools go with every request: most templates put them before all messages, and SGLang
        # leaves them out for tool_choice="none", so that such a request would begin differently.
        request = {"messages": messages, "tools": TOOLS, "max_tokens": self.max_tokens, **options}
        self.asked.append({**request, "output_tokens": self.max_tokens})
        return await self.client.chat.completions.create(model=self.model, **request)

    async def serve(self, number: int) -> str:
        """One customer's conversation; the shortest of the drafts that say something."""
        messages = self.begin(QUESTIONS[number % len(QUESTIONS)])
        stream = await self.ask(messages, stream=True, temperature=0)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        text, calls = joined(deltas)
        self.called += bool(calls)
        calls = calls or planned(number)
        # One answer with all calls, then one message for each result: as the SDK's users do it.
        messages = [*messages, {"role": "assistant", "content": text or None, "tool_calls": calls}]
        messages += await asyncio.gather(*map(run_tool, calls))
        answer = await self.ask(messages, n=self.drafts, temperature=0.8)
        texts = [choice.message.content or "" for choice in answer.choices]
        return min((text for text in texts if text.strip()), key=len, default="(no draft)")


async def main() -> None:
    parser = arguments(__doc__, max_tokens=32)
    parser.add_argument("--customers", type=int, default=12, help="at a time (default: 12)")
    parser.add_argument("--drafts", type=int, default=3, help="of each reply (default: 3)")
    parser.add_argument(
        "--timestamp-first", action="store_true", help="put the time before the rules (default: no)"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the requests to FILE (default: no)"
    )
    options = parser.parse_args()
    with savings(options.url):
        async with AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none") as client:
            desk = Desk(
                client, options.model, options.max_tokens, options.drafts, options.timestamp_first
            )
            replies = await asyncio.gather(*map(desk.serve, range(options.customers)))
        for number, reply in enumerate(replies):
            print(f"customer {number:>2}  {first_line(reply)}")
        print(f"{desk.called} of {len(replies)} conversations had tool calls of the model's own")
    if options.save is not None:
        lines = [json.dumps(request) + "\n" for request in desk.asked]
        options.save.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main())
