# SPDX-License-Identifier: Apache-2.0
"""The 20 synthetic decode batches of PAT's section 8.2, and random batches whose requests differ:
prefix forests, long beside short, samples of one prompt, questions on documents, conversations of
many turns, and few long requests.

A random batch is named FAMILY-SEED; ``GENERATOR``, the family and the seed decide all of it. The
numbers below were fixed before the seeds were drawn; whoever changes one gives ``GENERATOR``
another name, so that results of two generators are never taken for each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, pairwise

from sglang_pat.dump import PathNodes

GENERATOR = "ragged-2"
SEEDS = range(5)


@dataclass
class Forest:
    """A decode batch by its radix paths. ``name`` is FAMILY-SEED."""

    name: str
    paths: list[PathNodes]
    seq_lens: list[int]

    @property
    def num_queries(self) -> int:
        return len(self.seq_lens)

    @property
    def unique_tokens(self) -> int:
        """K/V tokens that the batch holds, each counted once, of nodes that some share in part the
        whole."""
        nodes: dict[int, int] = {}
        for path in self.paths:
            nodes |= {node: max(end - start, nodes.get(node, 0)) for node, start, end in path}
        return sum(nodes.values()) + sum(self.tails)

    @property
    def tails(self) -> list[int]:
        """Tokens of each query that no other reads."""
        ends = (path[-1][2] if path else 0 for path in self.paths)
        return [length - end for length, end in zip(self.seq_lens, ends, strict=True)]

    @property
    def family(self) -> str:
        return family_of(self.name)

    def __str__(self) -> str:
        return self.name


class Tree(Forest):
    """A batch by levels: ``nodes[i]`` radix nodes of ``tokens[i]`` tokens; the last level is one
    private tail per query. Its name is that of PAT's paper: nodes per level, ``_``, tokens per
    node."""

    def __init__(self, nodes: tuple[int, ...], tokens: tuple[int, ...]) -> None:
        ends, queries = [0, *accumulate(tokens)], nodes[-1]
        name = "_".join(",".join(map(str, numbers)) for numbers in (nodes, tokens))
        paths = [
            [
                (level * 1_000_000 + query * count // queries, ends[level], ends[level + 1])
                for level, count in enumerate(nodes[:-1])
            ]
            for query in range(queries)
        ]
        super().__init__(name, paths, [ends[-1]] * queries)
        self.nodes, self.tokens = nodes, tokens

    @classmethod
    def parse(cls, spec: str) -> Tree:
        """The tree of a name. Raises ValueError for what is none."""
        try:
            nodes, tokens = (tuple(map(int, half.split(","))) for half in spec.split("_"))
        except ValueError:
            nodes, tokens = (), (0,)
        fits = len(nodes) == len(tokens) and min(nodes + tokens) > 0
        if not fits or any(b % a for a, b in pairwise(nodes)):
            raise ValueError(
                f"tree {spec!r} is not NODES_TOKENS, as in 1,8,512_32,512,256: counts of 1 or "
                "more, as many before as behind the _, and nodes divide those of the next level"
            )
        return cls(nodes, tokens)


def family_of(name: str) -> str:
    """Of a tree whether it shares; of another batch the first part of its name."""
    if "_" in name:
        return "shared" if "," in name.partition("_")[0] else "private"
    return name.partition("-")[0]


PAPER_TREES = (
    Tree((1, 10), (4096, 416)),
    Tree((1, 256), (256, 32)),
    Tree((1, 1024), (2048, 32)),
    Tree((1, 2, 64), (1024, 256, 256)),
    Tree((1, 4, 256), (32, 256, 32)),
    Tree((1, 8, 512), (32, 512, 256)),
    Tree((1, 8, 512), (32, 2048, 256)),
    Tree((1, 8, 512), (512, 512, 256)),
    Tree((1, 4, 8, 256), (32, 256, 256, 32)),
    Tree((1, 4, 16, 512), (1024, 256, 128, 32)),
    Tree((1, 4, 16, 64, 256, 1024), (256, 32, 256, 64, 32, 256)),
    Tree((1, 16, 32, 64, 128, 1024), (256, 128, 64, 32, 32, 32)),
    Tree((1, 16, 32, 64, 256, 1024), (256, 128, 64, 32, 32, 32)),
    Tree((1, 8, 16, 32, 64, 128, 1024), (256, 128, 64, 32, 32, 32, 32)),
    Tree((1, 8, 16, 32, 64, 256, 1024), (256, 128, 64, 32, 32, 32, 32)),
    Tree((2, 8, 16, 256), (256, 256, 32, 32)),
    Tree((4, 16, 256, 512), (512, 32, 128, 32)),
    Tree((8, 16, 32, 256), (512, 512, 256, 32)),
    Tree((256,), (1024,)),
    Tree((256,), (4096,)),
)


def uniform(rng: random.Random, scale: int) -> int:
    return rng.randint(1, 2 * scale)


def bimodal(rng: random.Random, scale: int) -> int:
    """Four of five short, the fifth twenty times as long."""
    if rng.random() < 0.8:
        return rng.randint(scale // 8, scale // 4)
    return rng.randint(3 * scale, 4 * scale)


def zipf(rng: random.Random, scale: int) -> int:
    """Up to four times ``scale``; a length twice as long is half as frequent."""
    (rank,) = rng.choices(range(1, 65), [1 / rank for rank in range(1, 65)])
    return max(1, scale * rank // 16)


LENGTHS: dict[str, Callable[[random.Random, int], int]] = {
    each.__name__: each for each in (uniform, bimodal, zipf)
}


class _Growing:
    """A forest that grows, node by node and query by query, by the random numbers of its name."""

    def __init__(self, family: str, seed: int) -> None:
        self.name = f"{family}-{seed}"
        self.rng = random.Random(f"{GENERATOR} {self.name}")
        self.queries: list[tuple[PathNodes, int]] = []
        self._nodes = count()

    def below(self, path: PathNodes, tokens: int) -> PathNodes:
        """``path`` with a new node of ``tokens`` more."""
        start = path[-1][2] if path else 0
        return [*path, (next(self._nodes), start, start + tokens)]

    def query(self, path: PathNodes, tail: int) -> None:
        self.queries.append((path, (path[-1][2] if path else 0) + tail))

    def parts(self, whole: int, pieces: int) -> Iterator[int]:
        """``whole`` in at most ``pieces`` random parts, each at least 1."""
        cuts = sorted(self.rng.randint(0, whole) for _ in range(pieces - 1))
        for start, end in pairwise([0, *cuts, whole]):
            if end > start:
                yield end - start

    def shuffled(self) -> Forest:
        """Requests stand in the order in which they came, not in that of the tree."""
        self.rng.shuffle(self.queries)
        paths, seq_lens = zip(*self.queries, strict=True)
        return Forest(self.name, [*paths], [*seq_lens])


def forest(kind: str, seed: int) -> Forest:
    """A random forest with lengths of ``kind``."""
    grown, length = _Growing(kind, seed), LENGTHS[kind]
    rng = grown.rng
    queries = round(24 * (480 / 24) ** rng.random())
    depth = rng.randint(3, 6)  # levels of shared nodes
    node_scale, tail_scale = rng.choice((64, 256, 1024)), rng.choice((32, 128, 512))

    def grow(path: PathNodes, queries: int, level: int) -> None:
        # One node of ten has tails only, above the deepest level.
        if level == depth or queries == 1 or (level > 1 and rng.random() < 0.1):
            for _ in range(queries):
                grown.query(path, length(rng, tail_scale))
            return
        for part in grown.parts(queries, rng.randint(1, 4)):
            grow(grown.below(path, length(rng, node_scale)), part, level + 1)

    for part in grown.parts(queries, rng.randint(1, 2)):
        grow(grown.below([], length(rng, node_scale)), part, 1)
    return grown.shuffled()


def skew(grown: _Growing) -> None:
    """One long request beside many short ones on a prefix."""
    shared = grown.below([], grown.rng.randint(200, 2000))
    for _ in range(grown.rng.randint(20, 200)):
        grown.query(shared, grown.rng.randint(4, 200))
    grown.query([], grown.rng.randint(16_384, 65_536))


def samples(grown: _Growing) -> None:
    """Samples of several prompts, which may share a system prompt; every sample has come to an end
    of its own."""
    rng = grown.rng
    system = rng.choice((0, 500))
    root = grown.below([], system) if system else []
    each = rng.choice((4, 8, 16))
    for _ in range(rng.randint(4, 24)):
        prompt = grown.below(root, rng.randint(256, 6000))
        for _ in range(each):
            grown.query(prompt, rng.randint(1, 1000))


def documents(grown: _Growing) -> None:
    """Questions on documents behind a system prompt; a few of these are asked about often."""
    rng = grown.rng
    system = grown.below([], rng.randint(100, 1000))
    texts = [grown.below(system, rng.randint(1000, 8000)) for _ in range(rng.randint(4, 40))]
    popular = [1 / rank for rank in range(1, len(texts) + 1)]
    for text in rng.choices(texts, popular, k=rng.randint(16, 256)):
        grown.query(text, rng.randint(20, 800))


def turns(grown: _Growing) -> None:
    """Conversations on a system prompt, each turn a node; one of four goes on in four ways."""
    rng = grown.rng
    system = grown.below([], rng.randint(500, 4000))
    for _ in range(rng.randint(8, 64)):
        path = system
        for _ in range(rng.randint(1, 30)):
            path = grown.below(path, rng.randint(20, 400))
        for _ in range(rng.choice((1, 1, 1, 4))):
            grown.query(path, rng.randint(1, 200))


def few() -> list[Forest]:
    """One and two requests: ``single``, ``pair`` (nothing shared) and ``fork`` (two that share
    half), by thousands of tokens each."""
    found = []
    for kilo in (1, 2, 4, 8, 16, 32, 64, 128):
        tokens = 1024 * kilo
        half = [(0, 0, tokens // 2)]
        found += [
            Forest(f"single-{kilo}k", [[]], [tokens]),
            Forest(f"pair-{kilo}k", [[], []], [tokens] * 2),
            Forest(f"fork-{kilo}k", [half, half], [tokens] * 2),
        ]
    return found


def drawn(draw: Callable[[_Growing], None], seed: int) -> Forest:
    """What ``draw`` grows; its name is the family's."""
    grown = _Growing(draw.__name__, seed)
    draw(grown)
    return grown.shuffled()


def all_forests() -> list[Forest]:
    """Every batch, family by family."""
    found = [forest(kind, seed) for kind in LENGTHS for seed in SEEDS]
    families = (skew, samples, documents, turns)
    return found + [drawn(draw, seed) for draw in families for seed in SEEDS] + few()
