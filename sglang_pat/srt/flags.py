# SPDX-License-Identifier: Apache-2.0
"""Flags of a server as SGLang itself parses and resolves them, for a question about a server that
does not run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_pat.config import CPU_PLATFORM
from sglang_pat.srt import BACKEND, launch
from sglang_pat.srt.machines import Gpu, as_if_here, known_gpu

_BACKEND_FLAGS = ("--attention-backend", "--decode-attention-backend")


class QuestionError(ValueError):
    """The question makes no sense, and why."""


class SGLangRefused(Exception):
    """SGLang itself refuses the flags for the model, or cannot read the model; what it says."""


def resolve(arguments: Sequence[str], gpu: Gpu | None = None) -> tuple[Any, Any]:
    """SGLang's resolved ``ServerArgs`` and its ``ModelConfig``; ``gpu``: as if it were here.

    Raises SGLangRefused, or QuestionError for flags that contradict ``gpu``.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.server_args import prepare_server_args

    with _usage_left_out():
        server_args = prepare_server_args(_completed(arguments, gpu))
    launch.mark_checked(server_args)  # the same reasons, not as an exception
    try:
        with as_if_here(gpu) if gpu is not None else nullcontext():
            server_args.resolve_once()
            return server_args, model_config_of(server_args)
    except Exception as error:  # SGLang's own refusal, whatever it is made of
        raise SGLangRefused(" ".join(f"{error}".split()) or type(error).__name__) from error


def asked_gpu(arguments: Sequence[str], gpu: str) -> Gpu | None:
    """The GPU that a question names, None for this machine's. Needs no SGLang, which takes seconds
    to import.

    Raises QuestionError for a GPU that is not known, and for a model's path where nothing is.
    """
    model = model_of(arguments)
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists():
        raise QuestionError(
            f"--model {model}: there is no such folder; give one with a config.json, or a name on "
            "Hugging Face"
        )
    try:
        return known_gpu(gpu) if gpu else None
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


def _completed(arguments: Sequence[str], gpu: Gpu | None) -> list[str]:
    """The flags, with what the question leaves out."""
    completed = list(arguments)
    names = {argument.split("=")[0] for argument in arguments}
    if not names.intersection(_BACKEND_FLAGS):
        completed += ["--attention-backend", BACKEND]
    if "--log-level" not in names:
        completed += ["--log-level", "error"]
    if gpu is not None:
        if "--device" in names:
            raise QuestionError("--gpu and --device ask about different machines: drop one")
        completed += ["--device", "cuda"]
    elif "--device" not in names and os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM:
        completed += ["--device", "cpu"]
    return completed


def model_of(arguments: Sequence[str]) -> str:
    """What the flags name as the model."""
    return next(
        (value for flag, value in pairwise(arguments) if flag == "--model-path"), "an unnamed model"
    )
