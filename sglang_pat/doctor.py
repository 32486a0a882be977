# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor``: what was found, and what would keep ``pat`` from packing.

Loads the plugins as a server does, in this environment, and looks at what is there afterwards.
With ``--model``, what ``pat`` would do on a server is said by ``sglang_pat.srt.verdict``.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Literal

import torch

import sglang_pat
from sglang_pat import _C
from sglang_pat.config import CPU_PLATFORM, PREFIX, SUPPORTED_SGLANG, TESTED_SGLANG, PatConfig
from sglang_pat.gpus import untried
from sglang_pat.srt.support import MACHINE, ON_CPU, REFUSED, reason_against_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ENTRY_POINTS = {"sglang.srt.plugins": "pat", "sglang.srt.platforms": CPU_PLATFORM}
_MARKS = {"ok": "ok  ", "note": "note", "block": "BLOCK"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``block``: pat cannot serve or pack until ``way_out`` is done."""

    topic: str
    found: str
    status: Literal["ok", "note", "block"] = "ok"
    way_out: str = ""


def run_doctor(question: Sequence[str] | None = None, gpu: str = "") -> int:
    """Print all findings; 1 if something blocks, else 0.

    ``question``: flags of a server, ``--model-path`` among them, to be judged too; then 1 also if
    ``pat`` would serve nothing. ``gpu``: the name of a GPU to judge them for.
    """
    from sglang_pat.srt.verdict import QuestionError, asked_gpu, judge

    verdict = None
    try:
        if question is not None:
            asked_gpu(question, gpu)  # before SGLang is imported
        findings = list(examine(any_gpu=bool(gpu)))
        blocked = sum(finding.status == "block" for finding in findings)
        if question is not None and not blocked:
            verdict = judge(question, gpu=gpu)
    except QuestionError as error:
        print(f"sglang-pat doctor: {error}", file=sys.stderr)
        return 2
    _print_lines([(_MARKS[f.status], f.topic, f.found, f.way_out) for f in findings])
    if blocked:
        print(f"\n{blocked} to repair.")
    elif verdict is None:
        print("\npat can serve here.")
    else:
        print()
        _print_lines([("", *line) for line in verdict.lines()])
        print(f"\n{verdict.status}.")
    return int(blocked > 0 or not (verdict is None or verdict.ok))


def _print_lines(lines: Sequence[tuple[str, str, str, str]]) -> None:
    """Mark, topic and what was found in columns, and the way out below."""
    width = max(len(topic) for _mark, topic, _found, _way_out in lines)
    for mark, topic, found, way_out in lines:
        print(f"{mark:<5}  {topic:<{width}}  {found}")
        if way_out:
            print(f"{'':5}  {'':{width}}  -> {way_out}")


def examine(*, any_gpu: bool = False) -> Iterator[Finding]:
    """Look at everything, in an order in which later checks may rely on earlier ones.
    ``any_gpu``: a GPU that pat does not serve does not block, as another is asked about.

    Where no GPU is found and ``SGLANG_PLATFORM`` is not set, it is set to ``pat_cpu`` in this
    process, as a server on this machine needs it.
    """
    yield Finding("sglang_pat", f"{sglang_pat.__version__}, {_C.__file__}")
    yield from _environment()
    yield from _entry_points()
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        way_out = f"pip install sglang=={SUPPORTED_SGLANG}, where sglang-pat is installed"
        yield Finding("SGLang", "not installed in this environment", "block", way_out)
        return
    if version in TESTED_SGLANG:
        yield Finding("SGLang", version)
    else:
        found = f"{version}; tested with {' and '.join(TESTED_SGLANG)}"
        yield Finding("SGLang", found, "note", "see 'interface' below")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(index) for index in range(count)]
    machine = ", ".join(gpus) or f"no GPU, {torch.get_num_threads()} threads"
    yield Finding("torch", f"{torch.__version__}, {machine}")
    platform = _platform(any_gpu=any_gpu)
    yield platform
    if platform.status == "block":
        return  # SGLang cannot be imported under a platform that is not there
    warnings.simplefilter("ignore")  # SGLang's imports warn of quantizations that a CPU lacks
    yield from _guarded("registration", _registration)
    yield from _guarded("interface", _interface)


def _guarded(topic: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of ``check``; what it raises on a foreign SGLang is a finding too."""
    try:
        yield from check()
    except Exception as error:  # whatever it is, it is shown
        way_out = f"use SGLang {SUPPORTED_SGLANG}, which this version was made for"
        yield Finding(topic, f"{type(error).__name__}: {error}", "block", way_out)


def _environment() -> Iterator[Finding]:
    set_here = sorted(name for name in os.environ if name.startswith(PREFIX))
    try:
        config = PatConfig.from_env()
        yield Finding("settings", f"{config} ({', '.join(set_here) or 'all defaults'})")
    except ValueError as error:
        yield Finding("settings", str(error), "block", "the server refuses to start with it")
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    names = {name.strip() for name in allowed.split(",") if name.strip()}
    if names and "pat" not in names:
        way_out = f"add pat to it: SGLANG_PLUGINS={allowed},pat"
        yield Finding("SGLANG_PLUGINS", allowed, "block", way_out)
    else:
        yield Finding("SGLANG_PLUGINS", allowed or "not set, all plugins are loaded")
    for name in (row.variable for row in (*MACHINE, *REFUSED) if row.variable):
        value = os.environ.get(name, "")
        if value.lower() in ("1", "true", "yes", "y", "on"):
            yield Finding(name, value, "block", f"unset it: pat does not serve under {name}")


def _entry_points() -> Iterator[Finding]:
    for group, name in _ENTRY_POINTS.items():
        topic = f"entry point {name}"
        found = [entry.value for entry in metadata.entry_points(group=group, name=name)]
        if not found:
            way_out = "pip install the checkout or its wheel where SGLang is installed"
            yield Finding(topic, f"not in the group {group}", "block", way_out)
        elif len(found) > 1:
            words = f"{len(found)} times in the group {group}: {', '.join(found)}"
            yield Finding(topic, words, "note", "one sglang-pat is enough; uninstall the other")
        else:
            yield Finding(topic, found[0])


def _platform(*, any_gpu: bool = False) -> Finding:
    chosen = os.environ.get("SGLANG_PLATFORM", "")
    # A way to serve on this machine is no answer to a question about another one.
    elsewhere, on_cpu = ("; --gpu asks about another machine", "") if any_gpu else ("", ON_CPU)
    if chosen == CPU_PLATFORM:
        found = f"SGLANG_PLATFORM={CPU_PLATFORM}: SGLang runs on the CPU{elsewhere}"
        return Finding("platform", found)
    if chosen:
        found = f"SGLANG_PLATFORM={chosen}: SGLang skips all plugins of packages with another one"
        way_out = f"unset SGLANG_PLATFORM, or set it to {CPU_PLATFORM} for a CPU"
        return Finding("platform", found, "block", way_out)
    if not torch.cuda.is_available():
        os.environ["SGLANG_PLATFORM"] = CPU_PLATFORM
        found = f"no GPU, SGLANG_PLATFORM is not set{elsewhere}"
        return Finding("platform", found, "note", on_cpu)
    if reason := reason_against_gpu():
        found = f"{reason}{elsewhere}"
        return Finding("platform", found, "note" if any_gpu else "block", on_cpu)
    if words := untried(torch.cuda.get_device_capability()):
        return Finding("platform", f"a GPU, SGLang's own choice; {words}", "note")
    return Finding("platform", "a GPU, SGLang's own choice")


def _registration() -> Iterator[Finding]:
    from sglang.srt.plugins import load_plugins

    load_plugins()  # first of all, as in a server: it only logs what fails
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    if "pat" in ATTENTION_BACKEND_CHOICES:
        yield Finding("registration", "--attention-backend pat is known to SGLang")
    else:
        yield Finding(
            "registration",
            "SGLang loaded its plugins, but --attention-backend pat is not among the choices",
            "block",
            "see 'Failed to ... plugin pat' in the messages above",
        )


def _interface() -> Iterator[Finding]:
    from sglang_pat.srt import hook, launch

    mismatches = launch.foreign_reasons()
    for mismatch in mismatches:
        yield Finding("interface", mismatch, "block", f"use SGLang {SUPPORTED_SGLANG}")
    if not mismatches:
        hooked = f"hooked after {hook.INIT_NEW.rsplit('.srt.', 1)[1]}"
        way = "batches carry their requests" if hook.carries_requests() else hooked
        yield Finding("interface", f"as expected; {way}")
