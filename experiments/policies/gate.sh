#!/usr/bin/env bash
# Everything behind the tables of README.md, on one GPU: training, evaluation under recipes, the learning-rate search, the
# gate, GRPO under recipes.
#
#     experiments/policies/gate.sh RUNS                  all of it; a finished part is skipped, so that a killed call goes on
#     experiments/policies/gate.sh RUNS eval grpo        only these stages, of: sft eval grpo recipes
#     python experiments/policies/collect.py --raw RUNS  results/, cards and tables from what it wrote
#
# JOBS (default 4) processes share the GPU; a GRPO run took up to 22 GiB of its memory, and eight at once ran out of 140 GiB.
# `sft` trains into RUNS/sft; the other stages use the shipped policies, POLICIES=RUNS/sft/%s/policy the ones just trained.
# SFT follows the clock (--minutes), so its weights, and the figures after them, are a new draw each time.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; }
runs=$1; shift
stages=${*:-sft eval grpo recipes}
limit=${JOBS:-4}
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
shipped=$("$python" -c 'from mxrl.rl.policy import policies_folder; print(policies_folder())')
policies=${POLICIES:-$shipped/%s}
recipes="mxfp4 mxfp4+mbs mxfp4+of mxfp4+of:1 mxfp4+mbs+of mxfp4:ideal nvfp4"
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
mkdir -p "$runs"
failed=$runs/failed
rm -f "$failed"

# go NAME FINISHED COMMAND…: run it beside the others, unless the file FINISHED is there; its output goes to RUNS/NAME.log
go() {
  local name=$1 finished=$2
  shift 2
  [ -e "$finished" ] && { echo "$name: finished earlier"; return; }
  while [ "$(jobs -rp | wc -l)" -ge "$limit" ]; do wait -n || true; done
  { "$@" > "$runs/$name.log" 2>&1 && echo "$name: done" || { echo "$name: failed, see $runs/$name.log"; echo "$name" >> "$failed"; }; } &
}

sft() {  # KIND
  go "sft-$1" "$runs/sft/$1/eval.json" "$python" "$here/run.py" --kind "$1" --mixture default --batch 2048 \
    --examples 2000000 --seed 0 --minutes 7.2 --eval-samples 2 --out "$runs/sft/$1"
}

evaluate() {  # KIND
  # shellcheck disable=SC2059,SC2086
  [ -e "$runs/eval/$1/policy" ] || { mkdir -p "$runs/eval/$1"; cp -r "$(printf "$policies" "$1")" "$runs/eval/$1/policy"; }
  # shellcheck disable=SC2086
  go "eval-$1" "$runs/eval/$1/eval.json" "$python" "$here/run.py" --eval-only --kind "$1" --eval-n 2048 --eval-samples 2 \
    --recipes $recipes --out "$runs/eval/$1"
}

grpo() {  # KIND LR SEED STEPS [RECIPE [OPTION…]]
  local kind=$1 lr=$2 seed=$3 steps=$4 recipe=${5:-bf16}
  local name=$kind-$lr-$seed model=policy:$kind
  shift $(($# < 5 ? $# : 5))
  [ "$recipe" = bf16 ] || name=$kind-$recipe-$lr-$seed
  # shellcheck disable=SC2059
  [ -n "${POLICIES:-}" ] && model=$(printf "$policies" "$kind")
  go "grpo-$name" "$runs/grpo/$name/summary.json" "$python" -c 'from mxrl.cli import main; main()' train --model "$model" \
    --recipe "$recipe" --seed "$seed" --lr "$lr" --steps "$steps" --eval_every 20 --eval_problems 2048 --eval_batch 2048 \
    --save_every 0 --save_model false --monitor_every 0 --out "$runs/grpo/$name" "$@"
}

for stage in $stages; do
  case $stage in
    sft) for kind in dense moe; do sft $kind; done ;;
    eval) for kind in dense moe; do evaluate $kind; done ;;
    grpo)
      for kind in dense moe; do for lr in 1e-4 3e-4; do grpo $kind $lr 0 60; done; done                # the search
      for seed in 1 2; do grpo dense 1e-4 $seed 40; done
      for seed in 0 1 2; do grpo dense 5e-5 $seed 60; grpo moe 5e-5 $seed 40; done ;;                  # the gate
    recipes)  # at the rate chosen in bf16. The recorded runs had JOBS=6 and 330 s, so they end at step 22 or 23, and 9
      for seed in 0 1 2; do
        grpo dense 5e-5 $seed 40 mxfp4 --micro_batch 256 --monitor_every 10
        grpo dense 5e-5 $seed 20 mxfp4+mbs+of+aqn --micro_batch 256 --monitor_every 10
      done ;;
    *) echo "unknown stage '$stage'; possible: sft eval grpo recipes" >&2; exit 2 ;;
  esac
  wait
done
[ ! -e "$failed" ]
