# SPDX-License-Identifier: Apache-2.0
"""Two servers of each backend, one a GPU, behind SGLang's router with each of two policies, and the
load of SGLang's own client: ``python -m gpu_serving.router --json FILE`` in tests/. The options are
those of ``benchmarks.serving``; the first of the loads is asked for."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from serving.test_router import POLICIES, Router

from benchmarks.common.document import conditions, device_name, heading, write
from benchmarks.serving.__main__ import make_parser, server_arguments
from benchmarks.serving.loads import parse
from benchmarks.serving.model import open_model
from benchmarks.serving.servers import ask
from sglang_pat.demo.server import Server

SHOWN = ("median_itl_ms", "median_tpot_ms", "median_ttft_ms", "output_throughput")


def main() -> None:
    parser = make_parser()
    parser.prog, parser.description = "gpu_serving.router", __doc__
    parser.set_defaults(loads=["8*8192x16"], backends=["pat", "fa3"], runs=3, max_requests=128)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="sglang_pat_router_"))
    model = open_model(options.model, folder)
    load = parse(options.loads[0], output=options.output_tokens, folder=folder)
    # Of the router the client could not ask which model it has.
    of_model = ("--model", str(model), "--tokenizer", str(model))
    load = replace(load, arguments=(*load.arguments, *of_model))
    args = server_arguments(options, model)
    with ExitStack() as stack:
        routers: dict[tuple[str, str], Router] = {}
        processes: list[Server] = []
        for backend in options.backends:
            servers = [
                Server(
                    model,
                    backend=backend,
                    device=options.device,
                    log=folder / f"{backend}-{gpu}.log",
                    args=args,
                    env={"CUDA_VISIBLE_DEVICES": str(gpu)},
                )
                for gpu in range(2)
            ]
            for policy in POLICIES:
                log = folder / f"{backend}-{policy}.log"
                routers[backend, policy] = Router(policy, servers, log)
            processes += [*servers, *(routers[backend, policy] for policy in POLICIES)]
        for process in processes:
            stack.callback(process.stop)
            process.start()
        for process in processes:
            process.wait_until_ready()
        document = conditions("router", "gpu_serving.router", device_name(options.device), {})
        document |= {"load": load.name, "rows": []}
        print("\n".join(heading(document)), flush=True)
        for run in range(-1, options.runs):  # the first one warms up
            for (backend, policy), router in routers.items():
                for server in router.servers:
                    server.post("/flush_cache?timeout=10")
                row = ask(load, port=router.port, seed=run + 1, folder=folder)
                print(run, backend, policy, {name: row[name] for name in SHOWN}, flush=True)
                if run >= 0:
                    document["rows"].append(row | {"backend": backend, "policy": policy})
                    write(document, options.json)


if __name__ == "__main__":
    main()
