# SPDX-License-Identifier: Apache-2.0
"""What the fork server of ``kit.forks`` imports before it forks. Not for anyone else."""

from __future__ import annotations

import gc
import importlib
import multiprocessing.spawn

from kit.forks import FLUSH_S, prepare
from sglang_pat.srt import interface, metrics

# What a server's processes import, each by itself if SGLang starts them: most when they start, all
# models when one is looked up. Not prometheus_client, which reads when it is imported whether
# several processes count. setproctitle finds the place of a process's title beside the environment,
# which forks replace.
for name in (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
):
    importlib.import_module(name)
importlib.import_module("setproctitle").getproctitle()
multiprocessing.spawn.prepare = prepare
metrics.FLUSH_SECONDS = FLUSH_S
interface.interface_mismatches()  # each process would read SGLang's sources: seconds of every start
gc.collect()
gc.freeze()  # or the first collection of each fork would copy all that was imported
