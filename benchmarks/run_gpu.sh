#!/usr/bin/env bash
# Tests and benchmarks on a machine with a CUDA GPU, about ten minutes at most; results go to $OUT (default ./out/gpu).
#
#   bash benchmarks/run_gpu.sh [tests] [kernels] [train] [rollout] [counters]      default: the first four, in this order
#   bash benchmarks/run_gpu.sh rank_tests ranks scan analyze                       on a host with two GPUs
#
# On a machine that reaches no package index: wheels of what its Python lacks lie in .whl/ and go to /tmp/site; those of
# the other libraries lie in .whl/peers/ and go to /tmp/peers, which only the kernels' part sees. MXRL_COMMIT names the
# commit where the source travels without its history. LIMIT_kernels=300 and the like change how many seconds a part may
# take. The models' parts ask for Triton by name, so that nothing else serves unseen. A part that fails or runs out of
# time doesn't stop the next one.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:-out/gpu}
mkdir -p "$OUT"
wheels() { # folder of wheels, where to
  compgen -G "$1/*.whl" >/dev/null && [ ! -e "$2/.complete" ] || return 0
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$2" "$1"/*.whl &&
    touch "$2/.complete"
}
wheels .whl /tmp/site || exit
wheels .whl/peers /tmp/peers || echo "run_gpu.sh: the other libraries could not be installed; their rows will say so"
export PYTHONPATH=src:/tmp/site PYTHONUNBUFFERED=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false
export HF_HUB_DISABLE_PROGRESS_BARS=1
export MXRL_COMMIT=${MXRL_COMMIT:-$(git rev-parse HEAD 2>/dev/null)}

part() { # name, seconds, command …
  local name=$1 limit="LIMIT_$1" seconds
  seconds=${!limit:-$2}
  shift 2
  local begin=$SECONDS code
  timeout -k 5 "$seconds" "$@" >"$OUT/$name.txt" 2>&1
  code=$?
  echo "== $name: exit $code after $((SECONDS - begin)) s (limit $seconds)"
}

[ $# -gt 0 ] || set -- tests kernels train rollout
for name in "$@"; do
  case $name in
    tests)
      OMP_NUM_THREADS=2 part tests 170 python3 -m pytest -n 14 -p no:cacheprovider --tb=short --durations=8 \
        tests/unit/test_{devices,attention,sample,engine,nn_grouped,nn_activations,nn_shared,scan_replay}.py tests/unit/test_*_triton.py
      tail -n 40 "$OUT/tests.txt" | cut -c1-200
      ;;
    kernels)
      part kernels 190 env PYTHONPATH="$PYTHONPATH:/tmp/peers" python3 benchmarks/bench_kernels.py --device cuda --out "$OUT/kernels_cuda.jsonl"
      grep -E '^(\||NOTE)' "$OUT/kernels.txt" | cut -c1-200 || tail -n 15 "$OUT/kernels.txt"
      ;;
    train)
      part train 75 env MXRL_BACKEND=triton python3 benchmarks/bench_train_step.py --device cuda --out "$OUT/train_step_cuda.jsonl"
      tail -n 25 "$OUT/train.txt" | cut -c1-200
      ;;
    rollout)
      part rollout 120 env MXRL_BACKEND=triton python3 benchmarks/bench_rollout.py --device cuda --out "$OUT/rollout_cuda.jsonl"
      tail -n 30 "$OUT/rollout.txt" | cut -c1-200
      ;;
    rank_tests)
      part rank_tests 300 python3 -m pytest -n 3 -p no:cacheprovider --tb=short --durations=8 tests/integration/test_ranks.py -k "${RANK_TESTS:-test}"
      grep -v "Failed to load" "$OUT/rank_tests.txt" | tail -n 40 | cut -c1-200
      ;;
    ranks)
      part ranks 420 env MXRL_BACKEND=triton python3 benchmarks/bench_ranks.py --out "$OUT/ranks_cuda.jsonl" ${RANKS:-}
      grep -E "tokens/s|rror|written" "$OUT/ranks.txt" | cut -c1-250 | tail -n 40
      ;;
    scan)
      part scan 200 python3 benchmarks/bench_scan.py --device cuda --gpus 1,2 --folder /dev/shm/mxrl-scan --gigabytes 8 ${SCAN:-} --out "$OUT/scan_cuda.jsonl"
      tail -n 20 "$OUT/scan.txt" | cut -c1-250
      ;;
    analyze)
      part analyze 300 python3 benchmarks/bench_analyze.py --folder /dev/shm/mxrl-analyze ${ANALYZE:-} --out "$OUT/analyze_cuda.jsonl"
      tail -n 20 "$OUT/analyze.txt" | cut -c1-300
      ;;
    counters)
      part counters 120 python3 benchmarks/counters.py --out "$OUT/counters_cuda.jsonl"
      tail -n 40 "$OUT/counters.txt" | cut -c1-200
      ;;
    *)
      echo "run_gpu.sh: unknown part '$name'; possible: tests kernels train rollout rank_tests ranks scan analyze counters" >&2
      exit 2
      ;;
  esac
done
