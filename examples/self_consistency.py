# SPDX-License-Identifier: Apache-2.0
"""Self-consistency: many samples of each question, and a vote on their answers.

    python examples/self_consistency.py --samples 16

All samples of all questions share the worked examples, and the samples of one question share that
question. What a sample reads alone, at each decode step, is only what it has written itself.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter

from openai import AsyncOpenAI
from saved import arguments, savings

SYSTEM = """\
You solve word problems. Reason in short sentences, one quantity at a time, each with its unit.
Check the result against the question before you give it. End with one line of the form "The answer
is N.", where N is a number without a unit. Here are four problems, solved the way that is wanted.

Problem: A baker fills 14 trays with 12 rolls each. 23 rolls burn, and the rest goes into bags of 5.
How many full bags are there?
14 trays of 12 rolls are 168 rolls. 23 burn, so 145 are left. 145 rolls in bags of 5 are 29 bags,
and none is left over. The answer is 29.

Problem: A train leaves at 9:40 and arrives at 13:05. It stops for 10 minutes at each of 4 stations.
For how many minutes does it move?
From 9:40 to 13:05 are 3 hours and 25 minutes, so 205 minutes. 4 stops of 10 minutes are 40 minutes.
205 minutes less 40 are 165. The answer is 165.

Problem: Of 360 seeds, two thirds come up. A quarter of the seedlings is eaten by snails, and the
rest is planted in rows of 15. How many rows are there?
Two thirds of 360 seeds are 240 seedlings. A quarter of 240 is 60, so 180 are left. 180 seedlings in
rows of 15 are 12 rows. The answer is 12.

Problem: Lena saves 35 coins a week and Omar 20. Omar has 180 coins more than Lena now. After how
many weeks do they have the same?
Each week Lena catches up by 35 coins less 20, so by 15. 180 coins at 15 a week take 12 weeks. The
answer is 12."""

QUESTIONS = {  # and the right answer
    "A server answers 48 requests a second for 5 minutes, then 30 a second for 10 minutes. "
    "How many requests are that?": "32400",
    "A tank for 900 litres is half full. A pump brings 25 litres a minute, and a leak loses 7. "
    "In how many minutes is the tank full?": "25",
    "Three friends share 91 marbles. The second has twice as many as the first, and the third "
    "twice as many as the second. How many has the third?": "52",
    "Noor reads 18 pages on each weekday and 33 on each day of a weekend. She begins a book of 312 "
    "pages on a Monday. On which day, counted from 1, does she finish it?": "14",
}


def final_answer(text: str) -> str | None:
    """The number that a sample gives as its answer, else the last one in it, else None."""
    number = r"-?\d[\d,]*(?:\.\d+)?"
    found = re.findall(rf"answer is\W{{0,3}}({number})", text) or re.findall(number, text)
    return found[-1].replace(",", "") if found else None


async def sample(
    client: AsyncOpenAI, model: str, question: str, samples: int, max_tokens: int
) -> list[str | None]:
    """The answers of ``samples`` samples."""
    response = await client.chat.completions.create(
        model=model,
        # What all share comes first, word for word, and what differs last. A date or a sample's
        # number at the beginning would leave the radix cache nothing to share.
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Problem: {question}"},
        ],
        n=samples,
        temperature=0.8,  # samples that are all alike have nothing to vote on
        max_tokens=max_tokens,
    )
    return [final_answer(choice.message.content or "") for choice in response.choices]


def verdict(answers: list[str | None]) -> tuple[str | None, int]:
    """The answer with the most votes, and how many. A sample without an answer has no vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    return votes.most_common(1)[0] if votes else (None, 0)


async def main() -> None:
    parser = arguments(__doc__, max_tokens=160)
    parser.add_argument("--samples", type=int, default=8, help="of each question (default: 8)")
    options = parser.parse_args()
    with savings(options.url):
        async with AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none") as client:
            polls = await asyncio.gather(
                *(
                    sample(client, options.model, question, options.samples, options.max_tokens)
                    for question in QUESTIONS
                )
            )
        for (question, right), answers in zip(QUESTIONS.items(), polls, strict=True):
            answer, votes = verdict(answers)
            print(f"{question}\n  answers: {', '.join(str(answer) for answer in answers)}")
            print(f"  verdict: {answer}, {votes} of {len(answers)} votes; right: {right}")


if __name__ == "__main__":
    asyncio.run(main())
