#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Serves MODEL with pat: on the GPU if pat serves it, else on the CPU.
#
#     examples/launch.sh [MODEL [further arguments of sglang.launch_server]]
#
# MODEL is a folder or a name on the Hugging Face hub, or "demo" (default): SmolLM2-135M-Instruct out
# of a package, with a K/V pool of 32,768 tokens if no --max-total-tokens is given.
# $PYTHON is the Python that has SGLang and sglang_pat (default: python).
set -eu
model=${1:-demo}
[ $# = 0 ] || shift
PYTHON=${PYTHON:-python}
export PYTHONSAFEPATH=1 # a checkout as the current folder would shadow the installed package

device=$("$PYTHON" -c 'from sglang_pat.demo.server import own_device; print(own_device())')
if [ "$device" = cpu ]; then
    export SGLANG_PLATFORM=pat_cpu
fi
if [ "$model" = demo ]; then
    model=$("$PYTHON" -m sglang_pat.demo.smollm2)
    # Without a bound the pool would take most of the memory, for a toy model.
    set -- --max-total-tokens 32768 "$@"
fi
exec "$PYTHON" -m sglang.launch_server --model-path "$model" --device "$device" \
    --attention-backend pat --enable-metrics "$@"
