# SPDX-License-Identifier: Apache-2.0
"""Options: the ``SGLANG_PAT_*`` environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

import torch

from sglang_pat import _C
from sglang_pat.target import BRANCHINGS, DEFAULT_SPLIT_TOKENS, POLICIES, SPLITS

PREFIX = "SGLANG_PAT_"
# What `make test-versions` runs on; the last is the one to install.
TESTED_SGLANG = ("0.5.22", "0.5.23")
SUPPORTED_SGLANG = TESTED_SGLANG[-1]
# Not taken from sglang_pat.srt.platform: only SGLang may import that, while it picks its platform.
CPU_PLATFORM = "pat_cpu"

# First value = default.
_ALLOWED = {
    "check": ("0", "1"),
    "policy": POLICIES,
    "split": SPLITS,
    "branching": BRANCHINGS,
    "partial": ("fp32", "bf16"),
    "launch": tuple(_C.LAUNCHES),
}


def _of(policy: str, split: str, **others: str) -> dict[str, str]:
    """Another paper's rule for packs and splits, run as ours are: branches off, one launch."""
    return {"policy": policy, "split": split, "branching": "never", **others}


# What a preset sets; other options keep their defaults. `pat` is the paper: packs (section 5.1),
# streams and split (section 6), fp32 partials. Its choice of tiles, the smallest that holds a
# pack, is that of all presets. `naive` is its PAT-naive (section 8.5): every node is a pack.
PRESETS: dict[str, dict[str, str]] = {
    "default": {},
    "pat": {
        "policy": "paper",
        "split": "mean",
        "branching": "never",
        "partial": "fp32",
        "launch": "streams",
    },
    "naive": {
        "policy": "naive",
        "split": "mean",
        "branching": "never",
        "partial": "fp32",
        "launch": "streams",
    },
    # ChunkAttention: every shared chunk of 64 tokens is an item of all queries that share it
    # (chunk-first), what a query has for itself is one item (sequence-first).
    "chunk": _of("naive", "chunks", split_tokens="64"),
    # PagedAttention: queries alone, in partitions of 512 tokens (V2) or whole (V1).
    "paged": _of("queries", "fixed", split_tokens="512"),
    "paged-v1": _of("queries", "none"),
    # RelayAttention, and Hydragen with one level: the system prompt once, the rest by queries.
    "relay": _of("root", "cost"),
    # FastTree: packs by what tiles that are not full compute in vain, in pieces of 1,024 tokens, or
    # of 128 where these are few.
    "fasttree": _of("padding", "phases", split_tokens="1024"),
    # PackInfer: groups of requests with about so many tokens, whatever they share, each one item.
    # Its capacity comes from a profile of the GPU; the best of fixed pieces on an H200 stands in.
    "packinfer": _of("bytes", "fixed", branching="groups", split_tokens="1024"),
}
_PRESET = PREFIX + "PRESET"
DEFAULT_MB = 256  # below the 384 MB that FlashInfer takes in the same place
# One request has nobody to share with, so SGLang's attention serves it at its own speed.
DEFAULT_MIN_BATCH = 2
DEFAULT_DUMP_BATCHES = 1000  # seconds to minutes of a busy server: beyond its first requests
# Options that are whole numbers from 1: the default and what they count.
_NUMBERS = {
    "workspace_mb": (DEFAULT_MB, "MB"),
    "min_batch": (DEFAULT_MIN_BATCH, "requests"),
    "split_tokens": (DEFAULT_SPLIT_TOKENS, "tokens"),
    "dump_batches": (DEFAULT_DUMP_BATCHES, "batches"),
}


@dataclass(frozen=True)
class PatConfig:
    """Options of one server.

    ``check`` (``SGLANG_PAT_CHECK``): every step, compare the slots of requests that share an item.
    ``preset`` (``SGLANG_PAT_PRESET``): the rules to start from, see ``PRESETS`` and ``rules``.
    ``policy`` (``SGLANG_PAT_POLICY``), ``split`` (``SGLANG_PAT_SPLIT``) and ``branching``
    (``SGLANG_PAT_BRANCHING``): see ``Target``; ``cost`` is ``never`` where branches do not pay or
    were not measured: on the CPU and on GPUs other than Hopper.
    ``split_tokens`` (``SGLANG_PAT_SPLIT_TOKENS``): of a piece, with the splits ``fixed``,
    ``chunks`` and ``phases``, and of a branch, with the branching ``groups``.
    ``partial`` (``SGLANG_PAT_PARTIAL``): dtype of the partial outputs that the merge reads.
    ``launch`` (``SGLANG_PAT_LAUNCH``): how a GPU's forward is launched, see ``Workspace``.
    ``workspace_mb`` (``SGLANG_PAT_WORKSPACE_MB``): MB (2**20 bytes) of GPU memory for the
    workspace; how many requests of a batch fit depends on it, see ``sglang_pat.capacity``.
    ``min_batch`` (``SGLANG_PAT_MIN_BATCH``): requests of the smallest decode batch that pat serves,
    rows of padding included; smaller ones are the base's, in graphs and without.
    ``dump`` (``SGLANG_PAT_DUMP``): new file to write the first ``dump_batches``
    (``SGLANG_PAT_DUMP_BATCHES``) batches with a new plan to, an absolute path; "" for none.
    ``remarks``: what ``from_env`` has to say about a preset or a rule, a sentence each.
    """

    check: bool = False
    policy: str = "bytes"
    split: str = "cost"
    split_tokens: int = DEFAULT_SPLIT_TOKENS
    branching: str = "cost"
    partial: str = "fp32"
    launch: str = "queue"
    workspace_mb: int = DEFAULT_MB
    min_batch: int = DEFAULT_MIN_BATCH
    dump_batches: int = DEFAULT_DUMP_BATCHES
    preset: str = "default"
    dump: str = ""
    remarks: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> PatConfig:
        """Read the options.

        Raises ValueError that names the variable, its value and what is allowed, for a name or a
        value that is not known: a misspelt option must not be served as the default.
        """
        names = ("preset", "dump", *_ALLOWED, *_NUMBERS)
        known = {PREFIX + name.upper(): name for name in names}
        given: dict[str, str] = {}
        for variable, value in environ.items():
            if not variable.startswith(PREFIX):
                continue
            if variable not in known:
                raise ValueError(
                    f"{variable}={value} is not an option of sglang_pat; "
                    f"the options are {', '.join(known)}: correct or unset it"
                )
            name = known[variable]
            if name in _NUMBERS:
                _check_whole(variable, value, *_NUMBERS[name])
                given[name] = value
                continue
            if name == "dump":
                _check_absolute(variable, value)
                given[name] = value
                continue
            allowed = PRESETS if variable == _PRESET else _ALLOWED[name]
            if value not in allowed:
                raise ValueError(
                    f"{variable}={value} is not a known value; "
                    f"use one of {', '.join(allowed)} or unset it"
                )
            given[name] = value
        preset, dump = given.pop("preset", "default"), given.pop("dump", "")
        chosen, remarks = rules(preset, given)
        return cls(
            check=chosen["check"] == "1",
            policy=chosen["policy"],
            split=chosen["split"],
            branching=chosen["branching"],
            partial=chosen["partial"],
            launch=chosen["launch"],
            **{name: int(chosen[name]) for name in _NUMBERS},
            preset=preset,
            dump=dump,
            remarks=remarks,
        )

    @property
    def partial_dtype(self) -> torch.dtype:
        return torch.float32 if self.partial == "fp32" else torch.bfloat16

    def __str__(self) -> str:
        values = asdict(self)
        names = [each.name for each in fields(self)[:-1] if values[each.name] != ""]
        shown = " ".join(f"{name}={values[name]}" for name in names)
        return "; ".join([shown, *self.remarks])


def rules(preset: str, given: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """All options, as text: ``given`` ones by name, else the preset's, else the defaults; and
    remarks on what that means.

    An option beside a preset wins, and a remark says so. Branches go with the default policy and
    split alone: with another they are off, and a remark says so, unless ``branching`` is given.
    Raises KeyError for a preset that is not in ``PRESETS``.
    """
    of_preset = PRESETS[preset]
    defaults = {name: allowed[0] for name, allowed in _ALLOWED.items()}
    defaults |= {name: str(default) for name, (default, _) in _NUMBERS.items()}
    chosen = {**defaults, **of_preset, **given}
    remarks = [
        f"{name}={given[name]} was asked for and wins over the {value} of preset {preset}"
        for name, value in of_preset.items()
        if given.get(name, value) != value
    ]
    others = [name for name in ("policy", "split") if chosen[name] != defaults[name]]
    if others and "branching" not in {*given, *of_preset}:
        chosen["branching"] = "never"
        rule = f"{others[0]}={chosen[others[0]]}"
        remarks.append(f"no branches, as {rule} is not the default: ask for them with branching")
    return chosen, tuple(remarks)


def _check_absolute(variable: str, value: str) -> None:
    if not os.path.isabs(value):
        raise ValueError(
            f"{variable}={value} is not an absolute path: give one, such as "
            f"{os.path.abspath('batches.jsonl')}, or unset it"
        )


def _check_whole(variable: str, value: str, default: int, unit: str) -> None:
    if not (value.isascii() and value.isdecimal() and int(value) > 0):
        raise ValueError(
            f"{variable}={value} is not a whole number of {unit}, 1 or more: "
            f"give one, such as {default}, or unset it"
        )
