# SPDX-License-Identifier: Apache-2.0
"""Many questions over shared documents, as retrieval-augmented generation asks them.

    python examples/shared_documents.py report.txt contract.txt

Each document is asked all questions at once; without documents, some of this repository are. A
prefix tree of three levels: the instructions for all, a document for its questions, a question.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path

from openai import AsyncOpenAI
from saved import arguments, first_line, savings

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / name for name in ("README.md", "LICENSE", "csrc/pack/packs.h", "sglang_pat/srt/radix.py")
]
SYSTEM = """\
You answer questions about one document, for readers who do not have it at hand. Use only what the
document says. Quote the words that your answer rests on. If the document does not answer the
question, say "not in the document" and name what is missing. Answer in two sentences at most."""
QUESTIONS = [
    "What is this document for?",
    "For whom is it written, and what must they know already?",
    "Which term in it needs an explanation most, and what does it mean?",
    "Which numbers does it give, and of what are they?",
    "Under which conditions does what it says not hold?",
    "What must a reader not do, or not change?",
    "What could be out of date first?",
    "Which question does it leave open?",
]


async def ask(
    client: AsyncOpenAI, options: Namespace, document: str, question: str, max_tokens: int
) -> str:
    response = await client.chat.completions.create(
        model=options.model,
        # The document comes before the question, or the questions would not share it. Of several
        # documents in one prompt, the one that most prompts have comes first, not the best match.
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{document}\n\nQuestion: {question}"},
        ],
        temperature=0,
        max_tokens=max_tokens,
    )
    return response.choices[0].message.content or ""


async def interview(client: AsyncOpenAI, options: Namespace, document: str) -> list[str]:
    """The answers to all questions about one document."""
    # One token brings the document into the radix cache. Questions that arrive before it is there
    # are computed in one batch, each with the document for itself; shared is only what they leave.
    await ask(client, options, document, QUESTIONS[0], max_tokens=1)
    asked = (ask(client, options, document, one, options.max_tokens) for one in QUESTIONS)
    return await asyncio.gather(*asked)


async def main() -> None:
    parser = arguments(__doc__, max_tokens=96)
    parser.add_argument("documents", nargs="*", type=Path, default=DOCUMENTS, help="text files")
    parser.add_argument("--chars", type=int, default=4000, help="read of each (default: 4000)")
    options = parser.parse_args()
    if missing := [str(path) for path in options.documents if not path.is_file()]:
        parser.error(f"there is no file {', '.join(missing)}: name text files")
    documents = [path.read_text(errors="replace")[: options.chars] for path in options.documents]
    with savings(options.url):
        async with AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none") as client:
            interviews = await asyncio.gather(
                *(interview(client, options, document) for document in documents)
            )
        for path, answers in zip(options.documents, interviews, strict=True):
            print(path.name)
            for question, answer in zip(QUESTIONS, answers, strict=True):
                print(f"  {question}\n    {first_line(answer, 90)}")


if __name__ == "__main__":
    asyncio.run(main())
