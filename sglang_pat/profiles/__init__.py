# SPDX-License-Identifier: Apache-2.0
"""Profiles of GPUs: what a plan's costs are on one, and where each figure comes from.

A profile is one JSON file. Some ship beside this file; ``sglang-pat calibrate`` writes more into
the user's cache, ``$XDG_CACHE_HOME/sglang_pat/profiles`` (docs/calibrate.md).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

FORMAT = 1
SHIPPED = Path(__file__).parent
# Where a figure comes from. "chosen": the best of a few that were tried. "vendor": its data sheet,
# times what our kernels reach of it on an H200. "H200": taken over from there as it is.
SOURCES = ("measured", "fitted", "chosen", "vendor", "estimated", "H200")


class ProfileError(ValueError):
    """A profile that cannot be used; the message names its file and what to do."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a plan weighs. The names are those of ``Target``'s fields.

    ``bytes_per_s`` and ``flops_per_s`` are of all SMs together, ``item_overhead_s`` and
    ``branch_overhead_s`` seconds on one SM. ``sm_speedup`` is how much faster an SM reads K/V that
    has the memory to itself than by its share of ``bytes_per_s``, ``merge_round_s`` the seconds of
    the splits of a query that the merge joins at once. ``reread_weight`` is what packing charges
    for a token read again; the factors are those of the model of a plan's time
    (csrc/pack/cost_model.h).
    """

    bytes_per_s: float
    flops_per_s: float
    item_overhead_s: float
    sm_speedup: float
    merge_round_s: float
    reread_weight: float
    reread_factor: float
    wide_factor: float
    merge_factor: float
    branch_overhead_s: float

    def __post_init__(self) -> None:
        """Raises ValueError for a figure out of its range."""
        for name in COSTS:
            value = getattr(self, name)
            least = "more than 0" if name in _POSITIVE else "0 or more"
            good = math.isfinite(value) and (value > 0 if name in _POSITIVE else value >= 0)
            if not good:
                raise ValueError(f"{name} is {value}, must be a finite number of {least}")
        if self.reread_weight > 1:
            raise ValueError(f"reread_weight is {self.reread_weight}, must be at most 1")
        if self.sm_speedup < 1:
            raise ValueError(f"sm_speedup is {self.sm_speedup}, must be at least 1")


COSTS = tuple(each.name for each in fields(Costs))
_POSITIVE = ("bytes_per_s", "flops_per_s", "item_overhead_s", "sm_speedup", "reread_weight")


@dataclass(frozen=True, slots=True)
class Fit:
    """How well the model of a plan's time holds. ``error``: root mean square of the relative error,
    on ``held_out_plans`` plans that were not fitted, or if there were none, on those that were.
    ``launch_s``: what a launch takes beside the modelled time. None: not recorded."""

    error: float
    fitted_plans: int | None
    held_out_plans: int
    launch_s: float | None


@dataclass(frozen=True, slots=True)
class Profile:
    """The costs of one GPU. ``gpu`` and ``sms``: as ``torch.cuda.get_device_properties`` gives
    them; ``sources``: one of SOURCES for each of the costs. ``fit``: None if the factors were not
    fitted to this GPU. ``path``: the file it was read from."""

    gpu: str
    sms: int
    capability: tuple[int, int]
    costs: Costs
    sources: Mapping[str, str]
    fit: Fit | None = None
    clocks_mhz: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    command: str = ""
    path: Path | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for SMs or sources that make no sense."""
        if self.sms < 1:
            raise ValueError(f"sms is {self.sms}, must be 1 or more")
        if set(self.sources) != set(COSTS):
            raise ValueError(f"sources name {sorted(self.sources)}, must name {sorted(COSTS)}")
        for name, source in self.sources.items():
            if source not in SOURCES:
                raise ValueError(f"the source of {name} is {source!r}, must be one of {SOURCES}")

    def __str__(self) -> str:
        """One line: the rates, and where they come from."""
        kinds = sorted(set(self.sources.values()))
        return (
            f"{self.gpu}, {self.sms} SMs: {self.costs.bytes_per_s / 1e12:.2f} TB/s, "
            f"{self.costs.flops_per_s / 1e12:.0f} TFLOP/s ({', '.join(kinds)})"
        )


def file_name(gpu: str, sms: int) -> str:
    """Of the profile of a GPU: a slice of a GPU has a profile of its own."""
    return f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{sms}sm.json"


def user_folder() -> Path:
    """Where calibration writes. Raises RuntimeError for a user without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang_pat" / "profiles"


def find(gpu: str, sms: int) -> Profile | None:
    """The profile of a GPU: the user's own, else the one that ships, else None.

    Raises ProfileError for a file that is damaged or of another GPU.
    """
    for folder in _folders():
        path = folder / file_name(gpu, sms)
        if os.path.exists(path):  # Path.exists raises for a folder that one may not look into
            found = read(path)
            if (found.gpu, found.sms) != (gpu, sms):
                raise _unusable(path, f"it is of {found.gpu} with {found.sms} SMs, not of {gpu}")
            return found
    return None


def _folders() -> Iterator[Path]:
    """Where profiles are looked for, in this order."""
    with suppress(RuntimeError):  # containers run servers as users that have no home
        yield user_folder()
    yield SHIPPED


@lru_cache(maxsize=8)
def shipped(gpu: str, sms: int) -> Profile:
    """The profile of a GPU that ships with the package, whatever the user measured."""
    return read(SHIPPED / file_name(gpu, sms))


def read(path: Path) -> Profile:
    """Raises ProfileError for what is no profile of this version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unusable(path, f"it cannot be read as JSON ({error})") from None
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise _unusable(path, f"it is not of format {FORMAT}, the one this version knows")
    try:
        fit = data.pop("fit")
        return Profile(
            costs=Costs(**{k: _number(k, v) for k, v in data.pop("costs").items()}),
            fit=None if fit is None else Fit(**fit),
            capability=_capability(data.pop("capability")),
            path=path,
            **data,
        )
    except KeyError as error:
        raise _unusable(path, f"it has no {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise _unusable(path, str(error)) from None


def write(profile: Profile, folder: Path) -> Path:
    """Write a profile into ``folder``, in place of an older one of that GPU. Returns its path."""
    data = {"format": FORMAT} | asdict(profile)
    del data["path"]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(profile.gpu, profile.sms)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)  # so that a server that starts now finds a whole one
    return path


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, must be a number")
    return float(value)


def _capability(value: Any) -> tuple[int, int]:
    major, minor = value
    return int(major), int(minor)


def _unusable(path: Path, why: str) -> ProfileError:
    way_out = "install sglang-pat again" if path.parent == SHIPPED else "delete the file"
    return ProfileError(
        f"the GPU profile {path} cannot be used: {why}. Run sglang-pat calibrate, which writes a "
        f"new one into the user's cache, or {way_out}"
    )
