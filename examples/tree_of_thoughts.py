# SPDX-License-Identifier: Apache-2.0
"""Tree of thoughts: steps of reasoning that branch, are scored and are pruned to the best few.

    python examples/tree_of_thoughts.py --beams 3 --branches 4 --depth 3

Every round continues each chain of thoughts that is kept with several next steps, all at once. A
chain's score is the mean log-probability of its tokens, the model's own opinion of it. All chains
share the problem, the branches of a chain share the whole chain: a prefix tree that grows and is
pruned while it is read.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from dataclasses import dataclass

from openai import AsyncOpenAI
from saved import arguments, first_line, savings

SYSTEM = """\
You plan moves of running services between machines. You think in steps: each of your messages is
one step, a sentence or two, and adds one move and the reason for it, or corrects an earlier step.

The rules of the house hold for every plan:
- No machine holds more than its memory, not even while a service moves: during its move a service
  takes memory on both machines.
- At most one service moves at a time. A move takes one minute for each 4 GB.
- The two copies of a replicated service are never on the same machine, also not during a move.
- A machine may be switched off only when it is empty. Moves that do not help to empty it are waste.
- The database moves last, because its clients must reconnect, and only once.
- A plan is better if it takes less time, and among plans that take the same time, if more memory
  is left on the machine that has the least."""

PROBLEM = """\
Machine A has 64 GB, B has 48 GB, C has 64 GB, D has 32 GB. On A run the database (24 GB), the first
copy of the search (16 GB) and the mailer (4 GB). On B run the second copy of the search (16 GB) and
the web front (12 GB). On C run the batch jobs (32 GB) and the second copy of the login (8 GB). On D
run the first copy of the login (8 GB) and the metrics (8 GB).

Machine A must be switched off for repair. Which services move, where to, and in which order? Give
the first step."""

NEXT = "Go on with the next step."
FINISH = "Now give the whole plan: one line for each move, then the minutes that all of it takes."


@dataclass(frozen=True)
class Chain:
    """Steps of reasoning, and what the model thought of its own words."""

    steps: tuple[str, ...] = ()
    logprob: float = 0.0  # the sum over all tokens of the steps
    tokens: int = 0

    @property
    def score(self) -> float:
        """Mean log-probability of a token: a chain does not lose for being long."""
        return self.logprob / max(self.tokens, 1)

    def messages(self, *, ask: str = NEXT) -> list[dict[str, str]]:
        """The conversation so far, which ends with a user's message."""
        # Messages are only ever appended, so that branches have all of their chain in common, token
        # by token. A score, or "branch 3 of 4", in front would part them where they begin.
        talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROBLEM}]
        for step in self.steps:
            talk += [{"role": "assistant", "content": step}, {"role": "user", "content": NEXT}]
        return talk if ask == NEXT else [*talk[:-1], {"role": "user", "content": ask}]


async def branch(client: AsyncOpenAI, options: Namespace, chain: Chain) -> list[Chain]:
    """The chain with one more step, in as many ways as the model found; an empty step is none."""
    response = await client.chat.completions.create(
        model=options.model,
        messages=chain.messages(),  # type: ignore[arg-type]
        n=options.branches,
        temperature=1.0,
        max_tokens=options.max_tokens,
        logprobs=True,
    )
    grown = {}
    for choice in response.choices:
        step = (choice.message.content or "").strip()
        tokens = (choice.logprobs and choice.logprobs.content) or []
        if step and tokens:  # twice the same step is one branch
            logprob = chain.logprob + sum(token.logprob for token in tokens)
            grown[step] = Chain((*chain.steps, step), logprob, chain.tokens + len(tokens))
    return list(grown.values())


def prune(chains: list[Chain], beams: int) -> list[Chain]:
    """The chains with the best scores, best first."""
    return sorted(chains, key=lambda chain: chain.score, reverse=True)[:beams]


async def search(client: AsyncOpenAI, options: Namespace) -> Chain:
    """The best chain of the last round; prints each round's branches."""
    kept = [Chain()]
    for depth in range(1, options.depth + 1):
        families = await asyncio.gather(*(branch(client, options, chain) for chain in kept))
        grown = [chain for family in families for chain in family]
        if not grown:
            break  # the model has nothing to add
        kept = prune(grown, options.beams)
        print(f"step {depth}: {len(grown)} chains, {len(kept)} kept")
        for chain in prune(grown, len(grown)):
            mark = "+" if chain in kept else "-"
            print(f"  {mark} {chain.score:7.3f}  {first_line(chain.steps[-1])}")
    return kept[0]


async def main() -> None:
    parser = arguments(__doc__, max_tokens=64)
    parser.add_argument("--beams", type=int, default=3, help="chains kept (default: 3)")
    parser.add_argument("--branches", type=int, default=4, help="next steps of each (default: 4)")
    parser.add_argument("--depth", type=int, default=3, help="steps of a chain (default: 3)")
    options = parser.parse_args()
    with savings(options.url):
        async with AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none") as client:
            best = await search(client, options)
            response = await client.chat.completions.create(
                model=options.model,
                messages=best.messages(ask=FINISH),  # type: ignore[arg-type]
                temperature=0,
                max_tokens=4 * options.max_tokens,
            )
        print(f"\nplan, from the best chain:\n{response.choices[0].message.content}")


if __name__ == "__main__":
    asyncio.run(main())
