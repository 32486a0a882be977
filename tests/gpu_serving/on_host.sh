#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All GPU tests on a GPU host without network, in the checkout's root:
#     tests/gpu_serving/on_host.sh KIT [STEP...]
# KIT and the steps: tests/gpu_serving/README.md. Each step has a limit in seconds (LIMIT overrides
# it), and the next goes on after one that failed; the exit status is the number of steps that
# failed. $OUT (default: ./out) gets host.log, STEP.xml of pytest, JSON of the benchmarks, and in
# servers.tar.gz the ends of the servers' logs.
set -uo pipefail
kit=$(cd "${1:?usage: on_host.sh KIT [STEP...]}" && pwd); shift
steps=("$@"); [ $# -gt 0 ] || steps=(unpack gpu serving more)
root=$(cd "$(dirname "$0")/../.." && pwd); cd "$root" || exit 1
out=${OUT:-$root/out}; mkdir -p "$out"
site=${SITE:-/tmp/site}; work=${WORK:-/tmp/pat_work}; mkdir -p "$work"
export PYTHONPATH=$site:$root/tests:$kit/python:$root PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 MAX_JOBS=16 PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1
# No NVLink multicast between GPUs: on a shared host it can put them out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
at=tests/gpu_serving

limited() { # SECONDS COMMAND...: SIGINT first, so that pytest stops its servers and writes its report
  timeout --signal=INT --kill-after=25 "${LIMIT:-$1}" "${@:2}"
}
tests() { # SECONDS ARGUMENT... of pytest; a suite that skips all of itself has not passed
  limited "$1" python3 -m pytest -c /dev/null --rootdir "$root" -p no:cacheprovider -q -rfExs \
    --durations=12 --tb=short --basetemp="$work/$step" --junitxml="$out/$step.xml" "${@:2}" || return
  python3 - "$out/$step.xml" <<'CHECK'
import sys
from xml.etree import ElementTree
suite = next(ElementTree.parse(sys.argv[1]).iter("testsuite"))
sys.exit("every test was skipped" if suite.get("tests") == suite.get("skipped") else 0)
CHECK
}
# SGLang imports FlashMLA when it captures graphs of draft models, but does not call it for ours.
# Where the kit is without it, a package with the imported names alone stands in.
stand_in() {
  [ ! -e "$site/flash_mla/_loader.py" ] || return 0
  mkdir -p "$site/flash_mla"
  echo 'fused_norm_rope_attn_rope_cast = None' >"$site/flash_mla/__init__.py"
  echo 'class FlashMLASchedMeta: ...' >"$site/flash_mla/flash_mla_interface.py"
}
with_drafts() { stand_in; tests "$@"; } # SECONDS ARGUMENT... of pytest
# SGLang's client imports Hugging Face's datasets, which the kit lacks, and does not call it here.
without_datasets() {
  python3 -c 'import datasets' 2>/dev/null || echo 'load_dataset = None' >"$site/datasets.py"
}
bench() { # SECONDS ARGUMENT...: the serving benchmark, which ends in time by itself
  without_datasets
  # The arguments come last: --server-args takes all that follows it.
  limited "$1" python3 -m benchmarks.serving --folder "$work/$step" --json "$out/$step.json" \
    --budget-s $((${LIMIT:-$1} - 25)) --runs 3 "${@:2}"
}
rows() { # SECONDS ARGUMENT... of the kernel benchmark, beside its peers
  limited "$1" python3 -m benchmarks.kernel "${@:2}" \
    --json "$out/$step.json" --budget-s $((${LIMIT:-$1} - 15))
}
run() {
  case $1 in
    unpack)
      bash "$kit/default_host.sh" "$site" "$kit"
      for more in nixl router fa3_256; do
        if [ -e "$kit/$more.tar.xz" ]; then tar xJf "$kit/$more.tar.xz" -C "$site"; fi
      done
      if [ -e "$kit/flashmla.tgz" ]; then tar xzf "$kit/flashmla.tgz" -C "$site"; fi
      if [ -e "$kit/jit.tar.xz" ]; then tar xJf "$kit/jit.tar.xz" -C "$HOME"; fi
      python3 -m compileall -q -j 0 "$site" >/dev/null # or each process compiles 7,000 modules
      if [ -e "$kit/smollm2.00" ]; then
        cat "$kit"/smollm2.?? | tar xf - -C "$site" && python3 -m sglang_pat.demo.smollm2
      fi
      python3 -m sglang_pat doctor ;;
    # Object files are kept, as ninja would compile all anew without them.
    keep) (cd "$HOME" && tar cf - .cache/sglang .cache/flashinfer | xz -T0 >"$out/jit.tar.xz") ;;
    gpu) tests 330 ${GPU_WORKERS:+-n "$GPU_WORKERS"} tests/gpu ;;
    warm) tests 280 $at/test_pairs.py -k 'ratio7 or flashinfer_prefill' ;;
    serving) tests 520 $at/test_pairs.py $at/test_life.py \
      -k '(ratio or gemma2 or gpt_oss or test_life) and not fp8_e4m3' ;;
    more) tests 400 $at/test_features.py ;;
    fp8) tests 400 $at/test_pairs.py -k 'fp8_e4m3 or scaled4' ;;
    sleep) tests 240 $at/test_sleep.py ;;
    spec) with_drafts 480 $at/test_speculation.py -k 'not mtp and not latents8' ;;
    mtp) with_drafts 300 $at/test_speculation.py -k mtp ;;
    # All rows of test_pairs.py that no other step runs.
    hybrids) tests 560 $at/test_pairs.py \
      -k "${HYBRIDS:-not (ratio or scaled4 or gemma2 or gpt_oss or deepseek or tp2 or dp2)}" ;;
    latents) tests 400 $at/test_pairs.py -k deepseek ;;
    latentdrafts) with_drafts 400 $at/test_speculation.py -k latents8 ;;
    ranks) with_drafts 400 $at/test_pairs.py $at/test_speculation.py -k 'tp2 or dp2' ;;
    kernel) rows 200 ;;
    ragged) rows 400 --ragged --heads 32/8 64/8 16/2 8/1 28/4 ;;
    e4m3) rows 200 --kv-dtype fp8_e4m3 --heads 32/8 64/8 ;;
    sinks) rows 150 --sinks --heads 64/8/64 32/4/64 8/1/64 ;;
    drafts) rows 200 --draft-tokens 4,8 ;;
    dim256) rows 150 --heads 16/2/256 32/8/256 ;;
    long) rows 150 --trees 1,{64,256,512}_32768,128 1,10_4096,416 --heads 32/8 64/8 8/1 ;;
    latents_rows) limited 100 python3 -m benchmarks.kernel.latents --peers --json "$out/$step.json" ;;
    latents_ragged) limited 300 python3 -m benchmarks.kernel.latents --ragged --peers --json "$out/$step.json" ;;
    papers) limited 200 python3 -m benchmarks.papers --json "$out/$step.json" ;;
    host) limited 200 python3 -m benchmarks.host.step --json "$out/$step.json" ;;
    llama) bench 580 --stream-interval 8 --model "${MODEL:-llama3-8b}" \
      --loads 8192x{1,128} 4096x64 '8*2048x16' 0x{64,256} ;;
    # Few requests, private tails, agents, rollouts, forks and a trace: one start for all.
    traffic) bench 580 --runs 2 --backends pat fa3 --pool-tokens 262144 \
      --loads 6000x8 0+2000x2 2000x4 8192x64 1024+512x256 '3000+4*1200x64' rollouts:10x16 forks:8x6 \
      "--dataset-name mooncake --dataset-path $kit/mooncake_conversation.jsonl --num-prompts ${REQUESTS:-150}" \
      --server-args --json-model-override-args '{"max_position_embeddings": 131072}' ;;
    fp8_kv) bench 300 --runs 2 --backends pat fa3 --kv-cache-dtype fp8_e4m3 --loads 8192x128 0x64 ;;
    tp2) bench 560 --tp 2 --runs 2 --loads 8192x128 0x64 8192x1 '3000+4*1200x64' --pool-tokens 131072 \
      --max-requests 128 ;;
    mla) bench 560 --model "${MODEL:-deepseek-v2-lite}" --backends ${MLA_BACKENDS:-pat fa3} \
      --loads ${MLA_LOADS:-8192x128 4096x64 0x64 32768x128} --max-requests 128 ;;
    tp2mla) bench 400 --tp 2 --model deepseek-v2-lite --backends pat fa3 flashmla --loads 8192x128 --pool-tokens 65536 \
      --max-requests 128 ;;
    tp2sinks) bench 400 --tp 2 --model gpt-oss-20b --backends pat fa3 --loads 8192x128 --pool-tokens 65536 \
      --max-requests 128 --server-args --enforce-disable-flashinfer-allreduce-fusion ;;
    tp2fp8) bench 440 --tp 2 --backends ${FP8_BACKENDS:-pat fa3 flashinfer} \
      --kv-cache-dtype fp8_e4m3 --loads 8192x128 ;;
    agents) bench 500 --backends pat fa3 --stream-interval 1 --max-requests 128 \
      --loads '3000+4*1200x'{8,16,32,64,96,128} --model "${MODEL:-llama3-8b}" ;;
    router) without_datasets
      limited 400 python3 -m gpu_serving.router --folder "$work/router" --json "$out/router.json" ;;
    demo) limited 240 python3 -m sglang_pat demo ;;
    real) stand_in
      limited 560 python3 -m gpu_serving.real --device cuda ${SETTINGS:+--settings $SETTINGS} \
        --logs "$work/real" --json "$out/real.json" ;;
    soak) limited 450 python3 -m gpu_serving.soak --device cuda --logs "$work/soak" --json "$out/soak.json" ;;
    realsoak) limited 590 python3 -m gpu_serving.soak --device cuda --real --seconds "${SOAK_S:-390}" \
      --logs "$work/realsoak" --json "$out/realsoak.json" ;;
    *) echo "no step $1"; false ;;
  esac
}

failed=0
for step in "${steps[@]}"; do
  began=$SECONDS
  echo "=== $step" | tee -a "$out/host.log"
  run "$step" 2>&1 | tee -a "$out/host.log" | tail -n 40
  status=${PIPESTATUS[0]}
  echo "=== $step: exit $status after $((SECONDS - began)) s"
  [ "$status" -eq 0 ] || failed=$((failed + 1))
done
# The start and the last lines of every server's log, which an assertion's message does not have.
find "$work" -name '*.log' -size +0 -not -path "$work/ends/*" | while read -r log; do
  to="$work/ends/${log#"$work"/}"; mkdir -p "$(dirname "$to")"
  { head -n 200 "$log"; tail -n +201 "$log" | tail -n 200; } >"$to"
done
[ ! -d "$work/ends" ] || tar czf "$out/servers.tar.gz" -C "$work/ends" .
exit "$failed"
