# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor --model``: what ``pat`` would do on a server, told without its weights.

Server flags are parsed and resolved by SGLang itself, and config.json is read by its
``ModelConfig``. The reasons are the rows that the launcher and the backend ask (``support``).
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from sglang_pat.config import CPU_PLATFORM, PatConfig
from sglang_pat.gpus import SHARED_PER_BLOCK, Machine, machine_of, untried
from sglang_pat.srt import BACKEND, launch, layers, stock, support
from sglang_pat.srt.facts import NO_ATTENTION
from sglang_pat.srt.support import Reason

_BACKEND_FLAGS = ("--attention-backend", "--decode-attention-backend")

Status = Literal["served", "served in part", "nothing to gain", "refused"]


class QuestionError(ValueError):
    """The question makes no sense, and why."""


@dataclass(frozen=True)
class Verdict:
    """What ``pat`` would do."""

    device: str
    model: str
    kv_dtype: str = ""  # of K and V, where SGLang takes the flags
    refused: bool = False  # the server does not start, for these reasons, ...
    reasons: list[Reason] = field(default_factory=list)  # ... else there is nothing to gain
    # Ids by the reason why SGLang's own code runs them, "" for those of pat.
    layers: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> Status:
        if self.refused:
            return "refused"
        if self.reasons or not self.layers.get(""):
            return "nothing to gain"
        of_attention = set(self.layers) - {NO_ATTENTION}
        return "served" if of_attention == {""} else "served in part"

    @property
    def ok(self) -> bool:
        return self.status in ("served", "served in part")

    def lines(self) -> list[tuple[str, str, str]]:
        """Topic, what was found and the way out, for people."""
        stored = f", K/V in {self.kv_dtype}" if self.kv_dtype else ""
        found = [("server", f"{self.model} on {self.device}{stored}", "")]
        topic = "refused" if self.refused else "nothing to gain"
        found += [(topic, reason.words, reason.way_out) for reason in self.reasons]
        for why, ids in sorted(self.layers.items()):
            topic = "other layers" if why == NO_ATTENTION else "layers of SGLang"
            words = f"{len(ids)} ({layers.ranges(ids)})"
            found.append((topic, f"{words}: {why}", "") if why else ("layers of pat", words, ""))
        return found + [("note", note, "") for note in self.notes]


def judge(arguments: Sequence[str], *, gpu: str = "") -> Verdict:
    """The verdict on a server with these flags, ``--model-path`` among them, on this machine or the
    GPU of that name. Raises QuestionError, also for flags that SGLang does not know."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.server_args import prepare_server_args

    asked = asked_gpu(arguments, gpu)
    with _usage_left_out():
        server_args = prepare_server_args(_completed(arguments, asked))
    launch.mark_checked(server_args)  # the same reasons, not as an exception
    stock.let_sglang_choose(server_args)
    with nullcontext() if asked is None else _as_if_here(asked):
        try:
            server_args.resolve_once()
            model_config = model_config_of(server_args)
            _check_loadable(model_config)
            described = _describe(model_config)
        except Exception as error:  # SGLang's own refusal, whatever it is made of
            machine = "this machine" if asked is None else asked.name
            model, words = _model_of(arguments), " ".join(f"{error}".split())
            if isinstance(error, OSError) and not Path(model).is_dir():
                way_out = "give a folder that has it, or HF_TOKEN for a gated model"
                raise QuestionError(f"no config.json of {model}: {words}; {way_out}") from error
            said = _said(words or type(error).__name__)
            return Verdict(machine, model, refused=True, reasons=[said])
        return _weigh(server_args, model_config, described, asked)


def _said(words: str) -> Reason:
    """SGLang's own words, with the way out where it is known."""
    # Trees of draft tokens on larger pages (S arg_groups/speculative_hook.py:1279 and 1362).
    on_pages = "speculative_eagle_topk" in words and "page_size" in words
    way_out = "set --page-size 1" if on_pages else ""
    return Reason(f"SGLang itself refuses: {words}", way_out)


def _check_loadable(model_config: Any) -> None:
    """Raise what SGLang raises when it looks for the class of a model that it cannot load. It would
    import all models for that, so the sources are asked first."""
    from sglang.srt.model_loader.utils import get_model_architecture

    models = find_spec("sglang.srt.models")
    assert models is not None and models.submodule_search_locations is not None
    entry = re.compile(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)
    known = {
        name
        for folder in models.submodule_search_locations
        for source in Path(folder).glob("*.py")
        for found in entry.findall(source.read_text())
        for name in re.findall(r"\w+", found)
    }
    if known.isdisjoint(model_config.hf_config.architectures or ()):
        get_model_architecture(model_config)


def _weigh(server_args: Any, model_config: Any, described: str, asked: Machine | None) -> Verdict:
    """The verdict on resolved arguments. ``asked``: a GPU that SGLang takes to be here."""
    import torch

    server = support.by_arguments(server_args, model_config, asked)
    gpu: Any = asked if server.device == "cuda" else None
    if asked is None and server.device == "cuda" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(server.args.base_gpu_id)
    refusals = support.refusals(server)
    idle = support.idle_reasons(server, PatConfig.from_env().min_batch)
    found: dict[str, list[int]] = {}
    if not refusals and all(reason.serves for reason in idle):
        shared = None if asked is None else SHARED_PER_BLOCK[asked.major, asked.minor]
        found = _layers(server, shared)
    notes = []
    if gpu is not None and not refusals:
        notes = [untried((gpu.major, gpu.minor))]
        notes += map(str, support.reasons_of(support.KNOWN, server))
    return Verdict(
        device=server.device if gpu is None else gpu.name,
        model=described,
        kv_dtype=server.quantized or str(server.kv_dtype).removeprefix("torch."),
        refused=bool(refusals),
        reasons=refusals or idle,
        layers=found,
        notes=[note for note in notes if note],
    )


def _describe(model_config: Any) -> str:
    names = ", ".join(model_config.hf_config.architectures or ("an unnamed architecture",))
    heads = f"and {model_config.get_total_num_kv_heads()} KV heads of dim {model_config.head_dim}"
    if model_config.attention_arch.name == "MLA":
        heads = f"heads on latents of {model_config.kv_lora_rank} + {model_config.qk_rope_head_dim}"
    return (
        f"{names}, {model_config.num_hidden_layers} layers, {model_config.num_attention_heads} "
        f"query {heads}"
    )


def _layers(server: support.Server, shared: int | None) -> dict[str, list[int]]:
    """Layer ids by the reason why they are SGLang's; those that are ours under ""."""
    from sglang.srt.runtime_context import attn_tp_size_of

    groups: dict[str, list[int]] = {}
    ranks, drafts = attn_tp_size_of(server.args), support.draft_tokens_of(server.args)
    reasons = layers.reasons_by_layer(server.model, ranks, server.device, shared, drafts)
    for layer, reason in enumerate(reasons):
        groups.setdefault(reason, []).append(layer)
    return groups


def asked_gpu(arguments: Sequence[str], gpu: str) -> Machine | None:
    """The GPU that a question names, None for this machine's. Needs no SGLang, which takes seconds
    to import. Raises QuestionError for a GPU that is not known, and a model's path without model.
    """
    model = _model_of(arguments)
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists():
        raise QuestionError(
            f"--model {model}: there is no such folder; give one with a config.json, or a name on "
            "Hugging Face"
        )
    try:
        return machine_of(gpu) if gpu else None
    except ValueError as error:
        raise QuestionError(f"--gpu {error}") from None


@contextmanager
def _usage_left_out() -> Iterator[None]:
    """Makes a QuestionError of what argparse ends with: SGLang's usage has 400 lines before it."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            yield
    except SystemExit as end:
        _, found, message = said.getvalue().rpartition(": error: ")
        if not found:
            print(said.getvalue(), end="", file=sys.stderr)
            raise
        raise QuestionError(
            f"SGLang refuses the flags: {message.strip()}; python -m sglang.launch_server --help "
            "lists them"
        ) from end
    print(said.getvalue(), end="", file=sys.stderr)


def _completed(arguments: Sequence[str], gpu: Machine | None) -> list[str]:
    """The flags, with what the question leaves out."""
    completed = list(arguments)
    names = {argument.split("=")[0] for argument in arguments}
    if not names.intersection(_BACKEND_FLAGS):
        completed += ["--attention-backend", BACKEND]
    if "--log-level" not in names:
        completed += ["--log-level", "error"]
    if gpu is not None and "--device" in names:
        raise QuestionError("--gpu and --device ask about different machines: drop one")
    if gpu is not None:
        completed += ["--device", "cuda"]
    elif "--device" not in names and os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM:
        completed += ["--device", "cpu"]
    return completed


def _model_of(arguments: Sequence[str]) -> str:
    return next(
        (value for flag, value in pairwise(arguments) if flag == "--model-path"), "an unnamed model"
    )


@contextmanager
def _as_if_here(gpu: Machine) -> Iterator[None]:
    """Let SGLang resolve arguments as it would on a machine with that GPU: of that kind, compute
    capability and memory, with FlashInfer, which it denies without a GPU, and quantized weights."""
    import torch
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS, Mxfp4Config, marlin_utils
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import override_platform

    major, minor = gpu.major, gpu.minor
    facts = {
        "is_cuda": True,
        "is_sm90": major == 9,
        "is_hopper_with_cuda_12_3": major == 9,
        "is_sm100": major == 10,
        "is_sm100_or_sm110": major in (10, 11),
        "is_sm110": major == 11,
        "is_sm120": major == 12,
        "is_blackwell": major >= 10,
        "device_sm": 10 * major + minor,
        "device_capability": (major, minor),
        "has_flashinfer": find_spec("flashinfer") is not None,
    }
    with (
        override_platform(**facts),
        patch.object(memory_hook, "get_device_memory_capacity", lambda _=None: gpu.memory_mib),
        patch.object(current_platform, "is_out_of_tree", lambda: False),
        patch.object(torch.cuda, "get_device_capability", lambda _=None: (major, minor)),
        # GPTQ's kernels ask for themselves, and a CPU has no MXFP4.
        patch.object(marlin_utils, "get_device_capability", lambda _=0: (major, minor)),
        patch.dict(QUANTIZATION_METHODS, {"mxfp4": Mxfp4Config}),
    ):
        yield
