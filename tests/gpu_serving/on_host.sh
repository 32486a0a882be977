#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All GPU tests on a GPU host without network, in the checkout's root:
#     tests/gpu_serving/on_host.sh KIT [STEP...]
# KIT holds default.00, .01, ... of gpu-kit/make_default.sh (made with the project's wheel for Python
# 3.12), default_host.sh beside them and, for the step more, nixl.tar.xz (tests/gpu_serving/README.md).
# Steps, in this order unless named: unpack gpu serving more. Others: warm fp8 sleep spec hybrids
# soak agents keep, and with two GPUs: ranks tp2 tp2agents tp2fp8. Each has a
# limit in seconds, LIMIT_STEP, and the next goes on after one that failed; the exit status is the
# number of steps that failed. $OUT (default: ./out) gets host.log, STEP.xml of pytest, JSON of the
# benchmarks, and in servers.tar.gz the ends of the servers' logs. keep adds what the servers
# compiled, jit.tar.xz: beside the kit it saves the next machine one to three minutes. KIT/python may
# hold more Python packages; with pytest-xdist among them GPU_WORKERS=8 runs tests/gpu on 8 processes.
set -uo pipefail
kit=$(cd "${1:?usage: on_host.sh KIT [STEP...]}" && pwd); shift
steps=("$@"); [ $# -gt 0 ] || steps=(unpack gpu serving more)
root=$(cd "$(dirname "$0")/../.." && pwd); cd "$root" || exit 1
out=${OUT:-$root/out}; mkdir -p "$out"
site=${SITE:-/tmp/site}; work=${WORK:-/tmp/pat_work}; mkdir -p "$work"
: "${LIMIT_WARM:=280}" "${LIMIT_GPU:=330}" "${LIMIT_SERVING:=520}" "${LIMIT_MORE:=400}"
: "${LIMIT_FP8:=400}" "${LIMIT_SLEEP:=240}" "${LIMIT_RANKS:=300}" "${LIMIT_SOAK:=450}"
: "${LIMIT_SPEC:=480}" "${LIMIT_HYBRIDS:=560}"
: "${LIMIT_AGENTS:=500}"
: "${LIMIT_TP2:=560}" "${LIMIT_TP2AGENTS:=500}" "${LIMIT_TP2FP8:=440}"
export PYTHONPATH=$site:$root/tests:$kit/python:$root PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 MAX_JOBS=16
export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1
# No NVLink multicast between GPUs: on a shared host it can put them out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

limited() { # SECONDS COMMAND...: SIGINT first, so that pytest stops its servers and writes its report
  timeout --signal=INT --kill-after=25 "$@"
}
tests() { # STEP SECONDS FILE...
  local step=$1 seconds=$2
  shift 2
  limited "$seconds" python3 -m pytest -c /dev/null --rootdir "$root" -p no:cacheprovider -q -rfExs \
    --durations=12 --tb=short --basetemp="$work/$step" --junitxml="$out/$step.xml" "$@" || return
  python3 - "$out/$step.xml" <<'CHECK' # a suite that skips all of itself has not passed
import sys
from xml.etree import ElementTree
suite = next(ElementTree.parse(sys.argv[1]).iter("testsuite"))
sys.exit("every test was skipped" if suite.get("tests") == suite.get("skipped") else 0)
CHECK
}
step_unpack() {
  bash "$kit/default_host.sh" "$site" "$kit"
  if [ -e "$kit/nixl.tar.xz" ]; then tar xJf "$kit/nixl.tar.xz" -C "$site"; fi
  if [ -e "$kit/jit.tar.xz" ]; then tar xJf "$kit/jit.tar.xz" -C "$HOME"; fi
  python3 -m sglang_pat doctor
}
step_keep() {
  (cd "$HOME" && tar cJf "$out/jit.tar.xz" --exclude='*.o' $(ls -d .cache/sglang .cache/flashinfer))
}
# Alone: servers that start beside it make a test of it ten times as long.
step_gpu() { tests gpu "$LIMIT_GPU" ${GPU_WORKERS:+-n "$GPU_WORKERS"} tests/gpu; }
step_warm() { timeout "$LIMIT_WARM" python3 -m gpu_serving.warm; }
# What needs FlashInfer comes late, as its servers compile for minutes; what changes a server, last.
step_serving() {
  local at=tests/gpu_serving
  tests serving "$LIMIT_SERVING" $at/test_fallbacks.py $at/test_agreement.py $at/test_life.py \
    $at/test_single_request.py
}
step_more() { # by themselves: a cache on the host wants 10 GB free there beside all servers
  local at=tests/gpu_serving
  tests more "$LIMIT_MORE" $at/test_adapters.py $at/test_two_levels.py $at/test_disaggregation.py
}
step_fp8() { tests fp8 "$LIMIT_FP8" tests/gpu_serving/test_e4m3.py; }
step_sleep() { tests sleep "$LIMIT_SLEEP" tests/gpu_serving/test_sleep.py; }
# SGLang imports FlashMLA when it captures graphs of draft models, but does not call it for ours. The
# kit has no room for its kernels, so a package with the imported names alone stands in.
stand_in() {
  [ ! -e "$site/flash_mla" ] || return 0
  mkdir "$site/flash_mla"
  echo 'fused_norm_rope_attn_rope_cast = None' >"$site/flash_mla/__init__.py"
  echo 'class FlashMLASchedMeta: ...' >"$site/flash_mla/flash_mla_interface.py"
}
step_spec() { stand_in; tests spec "$LIMIT_SPEC" tests/gpu_serving/test_speculation.py; }
step_hybrids() { tests hybrids "$LIMIT_HYBRIDS" tests/gpu_serving/test_hybrids.py; } # PAT_HYBRIDS
step_ranks() { stand_in; tests ranks "$LIMIT_RANKS" tests/gpu_serving/test_ranks.py; } # two GPUs
bench() { # STEP SECONDS ARGUMENT...: the serving benchmark, which ends in time by itself
  local step=$1 seconds=$2
  shift 2
  # SGLang's client imports Hugging Face's datasets, which the kit lacks, and does not call it here.
  python3 -c 'import datasets' 2>/dev/null || echo 'load_dataset = None' >"$site/datasets.py"
  limited "$seconds" python3 -m benchmarks.serving --runs 3 "$@" \
    --folder "$work/$step" --json "$out/$step.json" --budget-s $((seconds - 25))
}
step_tp2() { bench tp2 "$LIMIT_TP2" --tp 2 --loads 8192x1 8192x128 0x64 0x256; } # two GPUs
step_tp2agents() { # every token by itself
  bench tp2agents "$LIMIT_TP2AGENTS" --tp 2 --stream-interval 1 --loads '3000+4*1200x64'
}
step_tp2fp8() {
  bench tp2fp8 "$LIMIT_TP2FP8" --tp 2 --backends ${FP8_BACKENDS:-pat fa3 flashinfer} \
    --kv-cache-dtype fp8_e4m3 --loads 8192x128
}
step_agents() { # every token by itself; more agents than these do not fit beside a second server
  local team='3000+4*1200x'
  bench agents "$LIMIT_AGENTS" --backends pat fa3 --stream-interval 1 --max-requests 128 \
    --loads "$team"{8,16,32,64,96,128} --model "${MODEL:-llama3-8b}"
}
step_soak() {
  limited "$LIMIT_SOAK" python3 -m gpu_serving.soak --device cuda --logs "$work/soak" --json "$out/soak.json"
}

failed=0
for step in "${steps[@]}"; do
  began=$SECONDS
  echo "=== $step" | tee -a "$out/host.log"
  "step_$step" 2>&1 | tee -a "$out/host.log" | tail -n 40
  status=${PIPESTATUS[0]}
  echo "=== $step: exit $status after $((SECONDS - began)) s"
  [ "$status" -eq 0 ] || failed=$((failed + 1))
done
# The start and the last lines of every server's log, which an assertion's message does not have.
find "$work" -name '*.log' -size +0 -not -path "$work/ends/*" | while read -r log; do
  to="$work/ends/${log#"$work"/}"; mkdir -p "$(dirname "$to")"; { head -n 200 "$log"; tail -n +201 "$log" | tail -n 200; } >"$to"
done
[ ! -d "$work/ends" ] || tar czf "$out/servers.tar.gz" -C "$work/ends" .
exit "$failed"
