# SPDX-License-Identifier: Apache-2.0
"""``make test-models``: every decoder architecture of SGLang, built and compared with doctor.

Arguments: architectures, instead of all. Ends with 1 where doctor and a model disagree,
or where another one than those of ``UNBUILT`` cannot be built.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

PROCESSES = os.cpu_count() or 1
SECONDS = 120  # of one model
DRAFTS = r"NextN|MTP|Eagle|EAGLE|DFlash|DSpark|Draft|Assistant|LiLiCorr"
OTHERS = (
    r"Classification|RewardModel|EmbeddingModel|Weights$|^(Bert|XLMRoberta|Contriever|CLIP|Lfm2Bi|"
    r"MindSpore|EmbeddingGemma|PixtralVisionModel|MistralModel|Qwen3Model)"
)

# Why the others cannot be built here.
UNBUILT = {
    "Dots3NoteForCausalLM": "it asks for CUDA when it is made",
    "InternS1ProForConditionalGeneration": "it gives its layers an argument that they do not take",
    "MiMoV2ASRForCausalLM": "it reads its audio tokenizer's weights when it is made",
    "Phi4MMForCausalLM": "its audio encoder reads numbers back that it computes",
}


def main(names: list[str], folder: Path) -> int:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.models.registry import ModelRegistry

    import models.built  # noqa: F401  # before the forks

    skipped = re.compile(f"{DRAFTS}|{OTHERS}")
    names = names or [name for name in sorted(ModelRegistry.models) if not skipped.search(name)]
    gc.collect()
    gc.freeze()
    running = 0
    for name in names:
        if running == PROCESSES:
            os.wait()
            running -= 1
        if os.fork() == 0:
            _answer(name, folder)
        running += 1
    while running:
        os.wait()
        running -= 1
    return _report({name: _read(folder / f"{name}.json") for name in names})


def _answer(name: str, folder: Path) -> None:
    """Be the process of one model, and end."""
    from models.built import compare

    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    signal.alarm(SECONDS)
    try:
        found = compare(name)
    except BaseException as error:
        found = {"status": "not built", "reason": f"{type(error).__name__}: {error}"}
    (folder / f"{name}.json").write_text(json.dumps(found))
    os._exit(0)


def _read(file: Path) -> Any:
    if not file.exists():
        return {"status": "not built", "reason": f"it died, or took more than {SECONDS} s"}
    return json.loads(file.read_text())


def _report(found: dict[str, Any]) -> int:
    counts: Counter[str] = Counter()
    for name, each in found.items():
        topic = each["status"] if "wrong" in each else "not built"
        counts[topic] += 1
        if topic in ("not built", "refused"):
            reason = UNBUILT.get(name) if topic == "not built" else ""
            print(f"{topic:<15} {name}: {' '.join((reason or each['reason']).split())[:150]}")
    wrong = {name: each["wrong"] for name, each in found.items() if each.get("wrong")}
    for name, layers in wrong.items():
        for layer, (doctor, model) in list(layers.items())[:3]:
            print(
                f"{'WRONG':<15} {name}, layer {layer}: {doctor or 'pat'!r}, but {model or 'pat'!r}"
            )
    news = [name for name, each in found.items() if ("wrong" in each) == (name in UNBUILT)]
    for name in news:
        print(f"{'NEWS':<15} {name} is {'' if name in UNBUILT else 'not '}built: see UNBUILT")
    print(f"{len(found)} architectures:", ", ".join(f"{n} {topic}" for topic, n in counts.items()))
    print(f"{sum('wrong' in each for each in found.values())} built, {len(wrong)} disagree")
    return int(bool(wrong or news))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ["SGLANG_PLATFORM"] = "pat_cpu"
    with tempfile.TemporaryDirectory() as results:
        sys.exit(main(sys.argv[1:], Path(results)))
