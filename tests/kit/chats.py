# SPDX-License-Identifier: Apache-2.0
"""Conversations of real text, as an OpenAI client sends them: this repository's pages, questions
about their sentences, tools, turns, and answers asked for again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FILES = ("LICENSE", "README.md", *(f"docs/{name}.md" for name in (
    *("design", "deploy", "kernels", "operating", "speculation", "support", "walkthrough"),
    *("lessons", "hybrids", "fp8"),
)))  # fmt: skip
Messages = list[dict[str, str]]
Chats = Iterator[Messages]

ASKS = (
    'What does this sentence mean, in plain words: "{}"',
    'Write one question that this sentence answers: "{}"',
    'Give an example of what this is about: "{}"',
    'Is this good news for the person who pays for the servers? "{}"',
    'Say the same in fewer words: "{}"',
)
PLACES = ("ticket", "order", "customer", "document", "machine", "invoice")
ACTIONS = ("find", "open", "close", "move", "describe")


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def sentences(text: str) -> list[str]:
    """Those of a page's prose, without its tables and code."""
    prose = re.sub(r"```.*?```|^\|.*?$|^#.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"(?<=\s)[A-Z][^.:;|`()\[]{40,170}\.(?=\s)", re.sub(r"\s+", " ", prose))


def tool(action: str, place: str) -> dict[str, Any]:
    """A function's schema, as OpenAI's API takes it."""
    fields = {
        f"{place}_id": {"type": "string", "description": f"The number of the {place}."},
        "reason": {"type": "string", "description": f"Why to {action} it, in one sentence."},
        "urgent": {"type": "boolean"},
    }
    return {
        "type": "function",
        "function": {
            "name": f"{action}_{place}",
            "description": f"{action.capitalize()} a {place} of the company.",
            "parameters": {"type": "object", "properties": fields, "required": [f"{place}_id"]},
        },
    }


class Library:
    """Pages of ``chars`` characters at most, and all kinds of conversations about them, each
    without end and the same every time: whoever takes more gets the same ones first."""

    def __init__(self, pages: int, chars: int) -> None:
        texts = [(ROOT / name).read_text() for name in FILES]
        self._pages = [text[:chars] for text in texts[:pages]]
        told = [sentence for text in texts for sentence in sentences(text)]
        self._asked = [ask.format(sentence) for ask, sentence in product(ASKS, told)]
        self._chars = chars

    def _questions(self, first: int) -> Iterator[str]:
        return islice(cycle(self._asked), first, None)

    def documents(self, first: int = 0) -> Chats:
        """Users with a question of their own under one page as system prompt."""
        for page, question in zip(cycle(self._pages), self._questions(first), strict=False):
            system = f"Answer from this page of a manual, in two sentences.\n\n{page}"
            yield [say("system", system), say("user", question)]

    def tools(self) -> Chats:
        """Schemas that all share, a team's own after them, and a user's wish."""
        schemas = [json.dumps(tool(*pair)) for pair in product(ACTIONS, PLACES)]
        common = "You call functions. Answer with one JSON object: name, arguments.\n"
        common += "\n".join(schemas)[: self._chars * 2 // 3]
        for team, wish in zip(cycle(PLACES[:3]), self._questions(250), strict=False):
            own = "\n".join(schema for schema in schemas if f"_{team}" in schema)
            system = f"{common}\nOf your team:\n{own[: self._chars // 3]}"
            yield [say("system", system), say("user", wish)]

    def turns(self) -> Chats:
        """Conversations of two to four turns. Nine users have the same turns behind them, as far
        as they have come."""
        for number, question in enumerate(self._questions(500)):
            visit, page = divmod(number, len(self._pages))
            text = self._pages[page][: self._chars // 2]
            chat = [say("user", f"Read this and say that you have.\n\n{text}")]
            chat.append(say("assistant", "I have read it. What do you want to know?"))
            for earlier in self._asked[visit // 9 :][: visit % 3]:
                chat += [say("user", earlier), say("assistant", f"In short: {earlier[30:110]}")]
            yield [*chat, say("user", question)]

    def strangers(self) -> Chats:
        """Nothing in common but what the chat template says first."""
        for question in self._questions(750):
            yield [say("user", question)]

    def again(self) -> Chats:
        """Each four times, as users regenerate an answer."""
        for chat in self.documents(first=1000):
            yield from [chat] * 4

    def kinds(self) -> dict[str, Callable[[], Chats]]:
        each = (self.documents, self.tools, self.turns, self.strangers, self.again)
        return {kind.__name__: kind for kind in each}

    def mixed(self, count: int) -> list[Messages]:
        """As many of each kind, in turns."""
        kinds = [make() for make in self.kinds().values()]
        return list(islice((next(kind) for kind in cycle(kinds)), count))


class Reader:
    """Chats as the token ids of a model's chat template.

    ``folder``: of the model, with its tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def tokens(self, chat: Messages) -> tuple[int, ...]:
        text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, tokens: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(tokens))
