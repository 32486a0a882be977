# SPDX-License-Identifier: Apache-2.0
"""How far pat is from another backend with a real model, beside a third one, in real conversations:
``python -m gpu_serving.real --device cuda --json FILE`` in tests/.

SmolLM2-135M-Instruct answers the same chats (``kit.chats``), greedily, on all servers of all
settings, which run at the same time. A setting passes if pat is no farther from its ``reference``
than its ``peer`` is, but for three standard errors, in three distances of each answer: whether it
is another one, after how many tokens it differs, and the log-probabilities up to there. Fails, with
a JSON summary, if one does not pass, if one of its servers does not start, or if pat did not pack.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from kit.chats import Library, Reader
from serving.server import Answer
from serving.workloads import Prompt

from benchmarks.common.document import conditions, device_name, write
from sglang_pat.demo.counters import Counters
from sglang_pat.demo.server import ServerError

from .agreement import NEW_TOKENS, accepted, alike
from .fleet import Fleet

MODEL = "smollm2"
PAGES = {"cuda": (11, 5000), "cpu": (3, 900)}  # how many, and characters of each
ROUND = {"cuda": 500, "cpu": 20}  # chats sent at once
SAMPLED, SAMPLES = 21, 4  # one chat in so many is asked for again, with samples; all kinds come
LAST_ROUND_S = 60.0
# Natural log, in the mean: fp32 on a CPU differs by less, bf16 by 20 times as much.
LOGPROB_MORE = 1e-3


@dataclass(frozen=True)
class Setting:
    """Backends and options, as servers are named (``fleet.py``) behind the model's name."""

    ours: str
    reference: str
    peer: str

    @property
    def servers(self) -> tuple[str, str, str]:
        return (f"{MODEL}-{self.ours}", f"{MODEL}-{self.reference}", f"{MODEL}-{self.peer}")


SETTINGS = {
    "cuda": {
        # All prefill on fa3, as pat does: only decoding differs.
        "bf16": Setting("pat", "fa3", "flashinfer-fa3_prefill"),
        "pages": Setting("pat-pages", "fa3-pages", "flashinfer-pages_fa3_prefill"),
        "ngram": Setting("pat-ngram", "fa3-ngram", "flashinfer-ngram"),
        # Our kit has no kernels of fa3 for fp8. Both prefill on FlashInfer.
        "fp8": Setting("pat-fp8_flashinfer", "triton-fp8_e4m3", "flashinfer-fp8_e4m3"),
    },
    # To try this file: both stock servers are the same backend.
    "cpu": {"fp32": Setting("pat", "torch_native", "torch_native-pages")},
}


@dataclass(frozen=True)
class Served:
    """What a server answered, and what pat counted meanwhile."""

    answers: list[Answer]
    counted: Counters
    seconds: float


def rounds(chats: Sequence[Prompt], size: int) -> list[tuple[Sequence[Prompt], int]]:
    """Prompts to send at once, and samples of each: parts of the chats, and of each part some."""
    parts = [chats[at : at + size] for at in range(0, len(chats), size)]
    both = [((part, 1), (part[::SAMPLED], SAMPLES)) for part in parts]
    return [one for pair in both for one in pair]


def serve(
    fleet: Fleet, work: list[tuple[Sequence[Prompt], int]], until: float, name: str
) -> Served:
    """A server's answers to as many rounds as it begins before ``until``; at least one round."""
    server, answers = fleet(name), []
    ready = time.monotonic()
    server.generate(work[0][0][:2], 4)  # NGRAM and prefill compile something at their first request
    before = server.counters()
    for prompts, samples in work:
        if answers and time.monotonic() > until:
            break
        answers += server.generate(prompts, NEW_TOKENS, samples=samples, ignore_eos=False)
    return Served(answers, server.counters() - before, time.monotonic() - ready)


def distances(some: Sequence[Answer], others: Sequence[Answer]) -> dict[str, list[float]]:
    """Of each answer from the other server's: 0 or 1, tokens that are not in common, and the mean
    difference of the log-probabilities of those in common."""
    found: dict[str, list[float]] = {"another answer": [], "tokens lost": [], "logprobs apart": []}
    for one, other in zip(some, others, strict=True):
        count = alike(one.tokens, other.tokens)
        pairs = zip(one.logprobs[:count], other.logprobs[:count], strict=True)
        found["another answer"].append(float(one.tokens != other.tokens))
        found["tokens lost"].append(max(len(one.tokens), len(other.tokens)) - count)
        found["logprobs apart"].append(fmean([abs(a - b) for a, b in pairs] or [0.0]))
    return found


def compared(some: Sequence[Answer], others: Sequence[Answer]) -> dict[str, Any]:
    """For people: what two servers' answers have in common."""
    found = distances(some, others)
    texts = [(a.tokens, b.tokens) for a, b in zip(some, others, strict=True)]
    return {
        "equal answers": 1 - fmean(found["another answer"]),
        "median first token that differs": median([alike(a, b) for a, b in texts if a != b] or [0]),
        "mean logprobs apart": fmean(found["logprobs apart"]),
    }


def farther(ours: Sequence[float], peers: Sequence[float], more: float) -> dict[str, Any]:
    """By how much ours are larger than the peer's to the same prompts, and whether that is more
    than chance, three standard errors, and ``more`` explain. NaN does not hold."""
    gaps = np.array(ours) - np.array(peers)
    mean, error = float(gaps.mean()), float(gaps.std(ddof=1)) / sqrt(len(gaps))
    return {"by": mean, "error": error, "holds": mean <= 3 * error + more}


def judge(setting: Setting, of: dict[str, Served]) -> dict[str, Any]:
    """What is reported of a setting; under ``failures`` what does not hold."""
    ours, reference, peer = (of[name] for name in setting.servers)
    count = min(len(each.answers) for each in (ours, reference, peer))
    texts, wanted, others = (each.answers[:count] for each in (ours, reference, peer))
    of_ours, of_peer = distances(texts, wanted), distances(others, wanted)
    more = {"logprobs apart": LOGPROB_MORE}
    bars = {name: farther(of_ours[name], of_peer[name], more.get(name, 0.0)) for name in of_ours}
    failures = [f"farther in: {name}" for name, bar in bars.items() if not bar["holds"]]
    counted, drafts = ours.counted, "ngram" in setting.ours
    steps = counted.decode_steps
    if not (0 < steps / 2 < counted.packed_steps and not counted.fallbacks):
        failures.append(f"{counted.packed_steps} of {steps} steps packed, {counted.fallbacks}")
    if drafts != (counted.verify_steps > 0):
        failures.append(f"{counted.verify_steps} verify steps")
    return {
        **asdict(setting),
        "answers": count,
        "tokens": sum(len(text.tokens) for text in texts),
        "pat to reference": compared(texts, wanted),
        "peer to reference": compared(others, wanted),
        "farther than the peer": bars,
        "seconds": [each.seconds for each in (ours, reference, peer)],
        "accepted": [accepted(each) for each in (texts, wanted, others)] if drafts else None,
        "counted": vars(counted),
        "failures": failures,
    }


def beside_alone(setting: Setting, of: dict[str, Served | str]) -> dict[str, Any]:
    """For people: what is known of a setting of which a server was lost. Of SGLang's own servers
    that decode on FlashInfer, three died of an illegal memory access under this load and one hung
    (2026-11-29)."""
    ours, reference = of[setting.servers[0]], of[setting.servers[1]]
    if isinstance(ours, str) or isinstance(reference, str):
        return {}
    count = min(len(ours.answers), len(reference.answers))
    texts, wanted = ours.answers[:count], reference.answers[:count]
    return {"answers": count, "pat to reference": compared(texts, wanted)}


def measure(
    device: str, names: Sequence[str], chats: int, seconds: float, folder: Path
) -> dict[str, dict[str, Any]]:
    """What is found of each of the settings, by name."""
    began = time.monotonic()
    settings = {name: SETTINGS[device][name] for name in names}
    servers = list(dict.fromkeys(name for each in settings.values() for name in each.servers))
    # A check of a plan waits for the GPU, and so, where a dozen servers share one, for all others.
    fleet = Fleet(servers, folder, device=device, check=False)

    def attempt(name: str) -> Served | str:
        try:
            return serve(fleet, work, began + seconds, name)
        except (ServerError, OSError) as error:
            return f"{name}: {error}"

    try:
        fleet.start()
        library, reader = Library(*PAGES[device]), Reader(fleet.model(MODEL))
        work = rounds([reader.tokens(chat) for chat in library.mixed(chats)], ROUND[device])
        with ThreadPoolExecutor(len(servers)) as pool:
            done = {name: pool.submit(attempt, name) for name in servers}
            wait(done.values(), timeout=seconds + LAST_ROUND_S)
            late = f"not done {seconds + LAST_ROUND_S:.0f} s after the start"
            of = {
                name: one.result() if one.done() else f"{name}: {late}"
                for name, one in done.items()
            }
            fleet.stop()  # before the pool waits for those that are late
    finally:
        fleet.stop()
    found: dict[str, dict[str, Any]] = {}
    for name, setting in settings.items():
        lost = [each for server in setting.servers if isinstance(each := of[server], str)]
        found[name] = {"failures": lost} | beside_alone(setting, of) if lost else judge(setting, of)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(SETTINGS), required=True)
    parser.add_argument("--settings", nargs="+", help="by name (default: all of the device)")
    parser.add_argument("--chats", type=int, default=2500, help="four in five are different ones")
    parser.add_argument("--seconds", type=float, default=420, help="after which no round begins")
    parser.add_argument("--json", type=Path, help="where to write the summary, too")
    parser.add_argument("--logs", type=Path, help="folder for the model and the servers' logs")
    options = parser.parse_args()
    known = SETTINGS[options.device]
    names = options.settings or list(known)
    if not set(names) <= known.keys() or options.chats < 2:
        parser.error(f"--settings are {', '.join(known)}, and --chats is 2 or more")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        found = measure(options.device, names, options.chats, options.seconds, folder)
    document = conditions("real", "gpu_serving.real", device_name(options.device), {})
    write(document | {"found": found}, options.json)
    print(json.dumps(found, indent=1))
    return 1 if any(each["failures"] for each in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
