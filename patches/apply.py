# SPDX-License-Identifier: Apache-2.0
"""A copy of the installed SGLang with our patch in it: ``python patches/apply.py DIRECTORY``.

The copy is ``DIRECTORY/sglang``, and ``PYTHONPATH=DIRECTORY`` puts it before the installed one.
Only the files that the patch changes are copied; all others are links, so it takes little room and
needs the installation. The patch must fit line by line: there is no fuzz, and no hunk moves.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PATCH = Path(__file__).with_name("0.5.23-pat.patch")
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DoesNotFit(ValueError):
    """The lines that a hunk changes are not where it says: this is another SGLang."""


def patched_files(patch: str, root: Path) -> dict[str, str]:
    """The new text of each file that a unified diff changes, by its path under ``root``.

    A file may come up several times: later hunks see what earlier ones made. Raises DoesNotFit, and
    FileNotFoundError for a file that is not there.
    """
    texts: dict[str, list[str]] = {}
    for path, start, old, new in _hunks(patch):
        if path not in texts:
            texts[path] = (root / path).read_text(encoding="utf-8").splitlines()
        lines = texts[path]
        if lines[start : start + len(old)] != old:
            raise DoesNotFit(
                f"{path}, line {start + 1}: the patch is for SGLang 0.5.23 as released; expected "
                f"{old[0]!r} and {len(old) - 1} more lines"
            )
        lines[start : start + len(old)] = new
    return {path: "\n".join(lines) + "\n" for path, lines in texts.items()}


def unpack(directory: Path, patch: Path = PATCH) -> Path:
    """Make ``directory/sglang``, the installed SGLang with ``patch``; returns ``directory``.

    Raises DoesNotFit, FileExistsError if it is there already, and ModuleNotFoundError without an
    installed SGLang.
    """
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("SGLang is not installed: pip install sglang==0.5.23")
    installed = Path(spec.origin).parent
    texts = patched_files(patch.read_text(encoding="utf-8"), installed.parent)
    _link(installed, directory / installed.name, {installed.parent / path for path in texts})
    for path, text in texts.items():
        (directory / path).write_text(text, encoding="utf-8")
    return directory


def _link(source: Path, target: Path, without: set[Path]) -> None:
    """Make ``target`` a folder of links to all in ``source`` but the files ``without``."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        # Compiled files of the copy must not replace those of the installed package.
        if entry in without or entry.name == "__pycache__":
            continue
        if any(entry in path.parents for path in without):
            _link(entry, target / entry.name, without)
        else:
            (target / entry.name).symlink_to(entry)


def _hunks(patch: str) -> Iterator[tuple[str, int, list[str], list[str]]]:
    """File, first line (from 0), old lines and new lines of each hunk. Text between files is no
    part of the patch."""
    path, lines = "", iter(patch.splitlines())
    for line in lines:
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
        elif match := _HUNK.match(line):
            num_old, num_new = int(match[1] or 1), int(match[3] or 1)
            old: list[str] = []
            new: list[str] = []
            while len(old) < num_old or len(new) < num_new:
                mark, text = (one := next(lines))[:1], one[1:]
                if mark != "+":
                    old.append(text)
                if mark != "-":
                    new.append(text)
            # Counted in the new file, because the hunks before this one have been applied.
            yield path, int(match[2]) - 1, old, new


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", type=Path, help="a new folder, for PYTHONPATH")
    try:
        print(f"export PYTHONPATH={unpack(parser.parse_args().directory).resolve()}")
    except (DoesNotFit, FileExistsError, ModuleNotFoundError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
