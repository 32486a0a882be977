# SPDX-License-Identifier: Apache-2.0
"""Hours of traffic in minutes: ``python -m gpu_serving.soak --device cuda`` in tests/.

Two servers at the same time, with and without the radix cache, both with ``SGLANG_PAT_CHECK=1`` and
a pool too small for their traffic: requests join, share, branch, are aborted and retracted. Fails,
with a JSON summary of what was found, unless everything sent was answered right, the counters add
up and no memory grew after the warm-up.

``--real``: SmolLM2 in chats of real text, in periods of a minute. Meanwhile servers are paused,
flushed and given their weights anew, and after each period probes are asked one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from kit.chats import Library, Reader
from serving.server import Config, ServingServer
from serving.workloads import VOCAB, Prompt, random_prompt, text_of

from benchmarks.common.document import conditions, device_name, write
from sglang_pat.demo.model import make_model
from sglang_pat.demo.smollm2 import model_folder

from .agreement import alike

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")
SCHEDULER = b"sglang::scheduler"  # the title of the process that pat runs in
# Free greedy answers to equal prompts agree but for near-ties; a wrong slot leaves nothing alike.
# Drafts bring more near-ties, as batches differ more: 0.67 on an H200, with no radix cache 0.80.
MIN_REPEATED_EQUAL = {"cpu": 0.999, "cuda": 0.7}
# Of --real: pages and their characters, and tokens of a pool that they nearly fill.
PAGES = {"cpu": (2, 900), "cuda": (6, 2000)}
POOL = {"cpu": 1000, "cuda": 7000}
CHATS, PROBES, PROBE_TOKENS = 600, 8, 48
PERIOD_S = 60.0  # between two times that all is idle
# What happens to a paused server, one after another; SGLang's modes of a pause.
MOMENTS = (("in_place", ""), ("retract", "flush"), ("retract", "weights"))
MOMENT_S = 5.0
BATCH = 64  # the most requests that a server runs at once


@dataclass(frozen=True)
class Scale:
    """How much: per server ``clients``; in all at least ``steps`` decode steps and ``requests``."""

    seconds: float
    warm_up: float  # seconds of these, in which whatever runs for the first time may take memory
    clients: int
    pool: int  # tokens of a server's K/V cache
    longest: int  # tokens of the longest system prompt
    new_tokens: int
    steps: int
    requests: int
    growth: int  # bytes that may be held more than after the warm-up


SCALES = {
    "cpu": Scale(18, 4, 8, 1200, 500, 90, steps=120, requests=24, growth=32 * MIB),
    "cuda": Scale(300, 30, 24, 5000, 1500, 120, steps=20_000, requests=5_000, growth=16 * MIB),
}
# Of servers that speculate: draft tokens of a request, and the top k of the draft model. With trees
# the servers prefill with FlashInfer, which may compile for minutes before they are ready.
DRAFTS = {"": (1, 1), "chains": (4, 1), "trees": (8, 4)}
MODELS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32"},
    "cuda": {"dtype": "bfloat16", "hidden": 512, "layers": 2, "head_dim": 128},
}


@dataclass(frozen=True)
class Request:
    prompt: Prompt
    new_tokens: int
    samples: int = 1
    abort_after_s: float | None = None


Draw = Callable[[Random], Prompt]


def random_prompts(scale: Scale) -> Draw:
    """System prompts of all lengths, users of their own and repeated ones, strangers."""
    common = Random(0)  # the clients of a server share system prompts
    lengths = (20, 60, 150, 400, scale.longest // 2, scale.longest)
    systems = [text_of(common, length) for length in lengths]
    repeated = [systems[i % len(systems)] + text_of(common, 5 + 7 * i) for i in range(24)]

    def draw(rng: Random) -> Prompt:
        kind = rng.random()
        if kind < 0.3:
            return rng.choice(repeated)
        if kind < 0.8:
            return rng.choice(systems) + text_of(rng, rng.randint(1, 60))
        return text_of(rng, rng.choice((1, 3, 17, 90, 300)))

    return draw


def real_prompts(model: Path, device: str) -> list[Prompt]:
    reader = Reader(model)
    return [reader.tokens(chat) for chat in Library(*PAGES[device]).mixed(CHATS)]


def requests(seed: int, scale: Scale, draw: Draw) -> Iterator[Request]:
    """Without end: short and long answers; one in ten with samples, one in ten aborted."""
    rng = Random(seed)
    while True:
        prompt = draw(rng)
        new_tokens = rng.randint(1, scale.new_tokens)
        if rng.random() < 0.1:
            yield Request(prompt, new_tokens, abort_after_s=rng.uniform(0, 0.3))
        else:
            yield Request(prompt, new_tokens, samples=3 if rng.random() < 0.1 else 1)


class Traffic:
    """What all clients of a server sent and got. ``tokens_a_step``: of a request, at most. Of an
    aborted request SGLang keeps all tokens of its last step, also those beyond what was asked for
    (``Req.update_finish_state``). ``probes``: of a real model; without them nothing is paused."""

    def __init__(
        self, server: ServingServer, model: Path, tokens_a_step: int, probes: list[Prompt]
    ) -> None:
        self.server, self.model, self.tokens_a_step = server, model, tokens_a_step
        self._probes, self._probed = probes, []
        self._eos = json.loads((model / "config.json").read_text())["eos_token_id"]
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._longest: dict[Prompt, Prompt] = {}  # answer by prompt

    def send_all(self, sent: Iterator[Request], stopping: threading.Event) -> None:
        """A client: one request after another, until told to stop."""
        for request in sent:
            if stopping.is_set():
                return
            answers = self._send(request)
            with self._lock:
                self.counts["requests"] += 1
                if len(answers) != request.samples:
                    self.wrong.append(f"{len(answers)} answers for {request.samples} samples")
                for answer in answers:
                    self._enter(request, answer)

    def disturb(self, stopping: threading.Event) -> None:
        """Pause the server now and then, until told to stop."""
        for mode, what in cycle(MOMENTS):
            if not self._probes or stopping.wait(MOMENT_S):
                return
            self.server.post("/pause_generation", {"mode": mode})
            if what == "flush":
                self.server.post("/flush_cache")
            elif what == "weights":
                self.server.update_weights(self.model)
            self.server.post("/continue_generation")
            self.counts[f"pauses: {mode}, {what}"] += 1

    def probe(self) -> None:
        """Ask the idle server, one by one: no other request rounds these answers."""
        found = [self.server.generate([one], PROBE_TOKENS)[0].tokens for one in self._probes]
        self._probed = self._probed or found
        self.counts["probed"] += len(found)
        self.counts["probed equal"] += sum(
            one == other for one, other in zip(found, self._probed, strict=True)
        )

    def _send(self, request: Request) -> list[dict[str, Any]]:
        rid = uuid.uuid4().hex
        # Without ignore_eos: only then the scheduler overcommits its memory, and retracts.
        sampling = {"temperature": 0, "max_new_tokens": request.new_tokens, "n": request.samples}
        body: dict[str, Any] = {"input_ids": request.prompt, "sampling_params": sampling}
        if request.abort_after_s is None:
            answer = self.server.post("/generate", body)
            return answer if isinstance(answer, list) else [answer]
        abort = ["/abort_request", {"rid": rid}]
        timer = threading.Timer(request.abort_after_s, self.server.post, abort)
        timer.start()
        answer = self.server.post("/generate", body | {"rid": rid})
        timer.cancel()
        timer.join()
        return [answer]

    def _enter(self, request: Request, answer: dict[str, Any]) -> None:
        tokens, wanted = tuple(answer["output_ids"]), request.new_tokens
        reason = answer["meta_info"]["finish_reason"]["type"]
        self.counts[f"finished by {reason}"] += 1
        # Decoding reads at least all tokens before each but the first.
        self.counts["kv_tokens"] += sum(len(request.prompt) + i for i in range(1, len(tokens)))
        aborted = request.abort_after_s is not None
        right = {
            "length": len(tokens) == wanted,
            "stop": len(tokens) <= wanted and self._eos in tokens[-1:],
            "abort": aborted and len(tokens) < wanted + self.tokens_a_step,
        }
        if not right.get(reason, False):
            self.wrong.append(f"{len(tokens)} of {wanted} tokens, ended by {reason}, {aborted=}")
        seen = self._longest.get(request.prompt, ())
        self.counts["repeated"] += min(len(tokens), len(seen))
        self.counts["repeated equal"] += alike(tokens, seen)
        self._longest[request.prompt] = max(tokens, seen, key=len)

    def row(self, radix: bool, device: str) -> dict[str, Any]:
        """The server's, and under ``wrong`` what is wrong with it."""
        self.server.check_alive()
        log = self.server.text()
        row = {"probed": 0, "probed equal": 0, **self.counts, **vars(self.server.counters())}
        row["retractions"] = len(re.findall(r"#retracted|[Rr]etract requests", log))
        row["tracebacks"] = log.count("Traceback (most recent call last)")
        drafts, real = self.tokens_a_step > 1, bool(self._probes)
        steps, packed = row["decode_steps"], row["packed_steps"]
        read, unpacked = row["kv_tokens_read"], row["kv_tokens_unpacked"]
        equal = self.counts["repeated equal"] / max(self.counts["repeated"], 1)
        # Of a request that decodes alone, as the last of a period does, pat counts no tokens.
        longest = max(len(prompt) + len(tokens) for prompt, tokens in self._longest.items())
        alone = longest * row["base_forwards"].get("small_batch", 0)
        right = {
            "some are aborted": self.counts["finished by abort"] > 0,
            "some are retracted": row["retractions"] > 0,
            "no traceback in the log": row["tracebacks"] == 0,
            "equal prompts, equal tokens": equal
            >= MIN_REPEATED_EQUAL[device] - 0.1 * (drafts or real),
            "equal probes, equal tokens": row["probed equal"] == row["probed"],
            "paused in all ways": sum(name.startswith("pauses") for name in row)
            == len(MOMENTS) * real,
            "a plan in each step": row["plans_made"] + row["plans_reused"] == steps,
            "steps verify drafts": row["verify_steps"] == steps * drafts,
            # A retracted request's tokens are prefilled again, so a few were not decoded.
            "K/V of all answers": unpacked + alone
            >= 0.9 * self.counts["kv_tokens"] / self.tokens_a_step,
            "packed if there is a radix cache": (0 < packed <= steps and read < unpacked)
            if radix
            else (packed == 0 and read == unpacked),
            "no fallback": not row["fallbacks"],
        }
        row["wrong"] = self.wrong + [name for name, holds in right.items() if not holds]
        return row


def soak(
    device: str, scale: Scale, folder: Path, *, drafts: str = "", real: bool = False
) -> dict[str, Any]:
    """Run the traffic; the summary, with what was wrong under ``failures``. ``drafts``: a key of
    ``DRAFTS``; the servers speculate with such drafts, which are mostly right."""
    if real:
        model, chats = model_folder(), real_prompts(model_folder(), device)
    else:
        model, chats = make_model(folder / "model", vocab=VOCAB, **MODELS[device]), []
    draw: Draw = (lambda rng: rng.choice(chats)) if real else random_prompts(scale)
    args = ("--max-total-tokens", str(scale.pool), "--schedule-conservativeness", "0.05")
    tokens_a_step, top_k = DRAFTS[drafts]  # of a request, at most; of the drafts
    if drafts:
        args += (
            *("--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "3"),
            *("--speculative-draft-model-path", str(model)),
            *("--speculative-eagle-topk", str(top_k)),
            *("--speculative-num-draft-tokens", str(tokens_a_step)),
            *("--decode-log-interval", "4"),  # steps; see _launch_all_moves
        )
    kinds = {"radix": args, "no-radix": (*args, "--disable-radix-cache")}
    with ExitStack() as stack:
        all_of = {}
        for name, of_kind in kinds.items():
            server = ServingServer(model, Config(name, args=of_kind, device=device), folder / name)
            stack.callback(server.stop)
            server.start()
            all_of[name] = Traffic(server, model, tokens_a_step, chats[:PROBES])
        for traffic in all_of.values():
            traffic.server.wait_until_ready()
            if top_k > 1:
                _launch_all_moves(traffic.server)
        held = _periods(all_of, device, scale, draw, PERIOD_S if real else scale.seconds)
        rows = {name: traffic.row(name == "radix", device) for name, traffic in all_of.items()}
    wrong = [f"{name}: {each}" for name, row in rows.items() for each in row["wrong"]]
    before, after = held[0], held[-1]
    for name, bytes_before in before.items():
        if after[name] - bytes_before > scale.growth:
            wrong.append(f"{name} grew from {bytes_before} to {after[name]} bytes")
    for name, least in (
        ("decode_steps", scale.steps // tokens_a_step),
        ("requests", scale.requests),
    ):
        if (found := sum(row[name] for row in rows.values())) < least:
            wrong.append(f"{found} {name}, want {least}")
    return {"servers": rows, "held": held, "failures": wrong}


def _launch_all_moves(server: ServingServer) -> None:
    """Have a server that drafts trees move the K/V of a full batch's accepted drafts.

    SGLang's kernel for that (``copy_all_layer_kv_cache_tiled``) is compiled for powers of two of
    requests x tokens. From its first launch on the one for 256 holds 10,448 bytes of local memory
    for each thread, 2,430 MiB of an H200, and more than 32 requests at once come sooner or later.
    """
    prompts = [random_prompt(seed=seed, length=16) for seed in range(BATCH)]
    server.generate(prompts, 48)  # a dozen steps or more, so that some are logged
    running = [int(count) for count in re.findall(r"#running-req: (\d+)", server.text())]
    assert max(running, default=0) > 32, f"at most {max(running, default=0)} requests ran at once"


def _clients(scale: Scale, draw: Draw, period: int) -> list[Iterator[Request]]:
    """Of one server; other ones in each period."""
    first = period * scale.clients
    return [requests(seed, scale, draw) for seed in range(first, first + scale.clients)]


def _periods(
    all_of: dict[str, Traffic], device: str, scale: Scale, draw: Draw, period_s: float
) -> list[dict[str, int]]:
    """Bytes held after the warm-up and after each of the periods until the time is up. A period
    ends when the answers under way have come, and this time counts. It prints what is held and
    what was wrong, so that also a run that is cut off has said what it saw."""
    held: list[dict[str, int]] = []
    began = time.monotonic()
    while (left := began + scale.seconds - time.monotonic()) > 0 or len(held) < 2:
        seconds = min(period_s if held else scale.warm_up, max(left, 1.0))
        clients = partial(_clients, scale, draw, len(held))
        held.append(_held_after(seconds, all_of, device, clients))
        wrong = {name: one.wrong for name, one in all_of.items()}
        print(f"{time.monotonic() - began:.0f} s: {held[-1]}, wrong: {wrong}", flush=True)
    return held


def _held_after(
    seconds: float,
    all_of: dict[str, Traffic],
    device: str,
    clients_of: Callable[[], list[Iterator[Request]]],
) -> dict[str, int]:
    """Bytes held after so much more traffic, by what holds them.

    Servers are idle and flushed then: what torch's allocator keeps for the next large prefill says
    nothing, and a flush gives it back.
    """
    stopping = threading.Event()
    with ThreadPoolExecutor(128) as pool:
        sending = [
            pool.submit(traffic.send_all, sent, stopping)
            for traffic in all_of.values()
            for sent in clients_of()
        ]
        sending += [pool.submit(traffic.disturb, stopping) for traffic in all_of.values()]
        wait(sending, timeout=seconds, return_when=FIRST_EXCEPTION)
        stopping.set()
    for each in sending:
        each.result()  # raises what it failed with
    for traffic in all_of.values():
        traffic.server.post("/flush_cache?timeout=30")
        traffic.probe()
        traffic.server.post("/flush_cache?timeout=30")
    pids = {name: one.server.pid for name, one in all_of.items()}
    held = {f"scheduler {name}": scheduler_bytes(pid) for name, pid in pids.items()}
    if device == "cuda":
        held |= {f"device {name}": device_bytes(pid) for name, pid in pids.items()}
    return held


def scheduler_bytes(server_pid: int) -> int:
    """Resident bytes of the schedulers in a server's process group."""
    held = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended meanwhile
            if not folder.name.isdigit() or os.getpgid(int(folder.name)) != server_pid:
                continue
            if (folder / "cmdline").read_bytes().startswith(SCHEDULER):
                held += int((folder / "statm").read_text().split()[1]) * PAGE
    assert held, f"no {SCHEDULER.decode()} in the process group {server_pid}"
    return held


def device_bytes(server_pid: int) -> int:
    """Bytes that the processes of a server's process group hold on the GPUs."""
    asked = "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"
    lines = subprocess.run(["nvidia-smi", *asked], capture_output=True, check=True, text=True)
    held = 0
    for line in lines.stdout.splitlines():
        pid, mib = map(int, line.split(","))
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            held += mib * MIB if os.getpgid(pid) == server_pid else 0
    assert held, f"nvidia-smi names no process of the group {server_pid}:\n{lines.stdout}"
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=sorted(SCALES), required=True)
    parser.add_argument("--seconds", type=float, help="of traffic, twice the warm-up or more")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--drafts", nargs="?", const="trees", default="", choices=sorted(DRAFTS))
    what.add_argument("--real", action="store_true", help="a real model and real text")
    parser.add_argument("--json", type=Path, help="where to write the summary, too")
    parser.add_argument("--logs", type=Path, help="folder for the model and the servers' logs")
    options = parser.parse_args()
    scale = SCALES[options.device]
    scale = replace(scale, seconds=options.seconds or scale.seconds)
    if options.real:  # more layers, more kinds of prefill, and weights that are loaded anew
        least = {"steps": scale.steps // 10, "requests": scale.requests // 10}
        scale = replace(scale, growth=4 * scale.growth, pool=POOL[options.device], **least)
    if scale.seconds < 2 * scale.warm_up:
        parser.error(f"--seconds is {scale.seconds:g}, must be {2 * scale.warm_up:g} or more")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        summary = soak(options.device, scale, folder, drafts=options.drafts, real=options.real)
    document = conditions("soak", "gpu_serving.soak", device_name(options.device), {})
    write(document | summary, options.json)
    print(json.dumps(summary))
    return 1 if summary["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
