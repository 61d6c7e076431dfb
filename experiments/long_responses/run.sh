#!/usr/bin/env bash
# The experiment, stage by stage, from the repository's root; every stage goes on where it was killed.
#
#   run.sh sft [DEVICE]               the policy of long answers, from policy:dense    out/long/policy, out/long/eval.json
#                                     MINUTES=5: longer; INIT=FOLDER: goes on from that policy
#   run.sh gate                       can it write them, and is there headroom? exit code 1 where not
#   run.sh train DEVICES [SECONDS] …  GRPO at three lengths under each recipe          out/long/runs/LENGTH/RECIPE/sSEED
#                                     what follows goes to sweep.py: --only 'long/*', --set steps=6
#   run.sh pack FILE                  the results of both, without checkpoints and models
#   run.sh sft-tiny | train-tiny      the same way at a tiny size on a CPU, to try the commands
#
#   run.sh sft cuda:0 && run.sh gate && run.sh train cuda:0,cuda:1
set -eu
cd "$(dirname "$0")/../.."
here=experiments/long_responses work=${WORK:-out/long} python=${PYTHON:-python}
export TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$work"
case ${1:-} in
  sft)
    [ ! -f "$work/eval.json" ] || { echo "$work/eval.json is there"; exit 0; }
    $python experiments/policies/run.py --init "${INIT:-policy:dense}" --mixture long --numbers 3 42 --digits 1 3 --seed 0 \
      --minutes "${MINUTES:-3.2}" --lr 1e-3 --warmup 50 --batch 512 --batch-tokens 32768 --micro 1 --grow 0.5 \
      --examples 100000 --workers "${WORKERS:-8}" --eval-n 1536 --eval-samples 2 --save-every 250 --log-every 25 \
      --device "${2:-cuda}" --out "$work"
    ;;
  gate) $python $here/gate.py "$work/eval.json" ;;
  train)
    devices=$2 seconds=${3:-}
    shift $(($# < 3 ? $# : 3))
    $python experiments/sweep.py $here/sweep.yaml --out "$work/runs" --devices "$devices" --jobs "${JOBS:-10}" ${seconds:+--seconds "$seconds"} "$@"
    ;;
  pack)
    file=${2%.tar.gz}.tar.gz
    tar -C "$work" -czf "$file.tmp" $(cd "$work" && find eval.json log.jsonl runs -type f \( -name eval.json -o -name summary.json -o -name '*.jsonl' -o -name config.yaml \) -not -path '*/checkpoints/*' -not -path '*/model/*' 2>/dev/null)
    mv "$file.tmp" "$file"
    ls -l "$file"
    ;;
  sft-tiny)
    $python experiments/policies/run.py --init policy:dense --mixture long --numbers 3 5 --digits 1 2 --seed 0 \
      --steps 3 --lr 1e-3 --warmup 2 --batch 64 --batch-tokens 1024 --micro 1 --grow 0.5 --examples 2000 --workers 1 \
      --eval-n 16 --eval-samples 1 --device cpu --out "$work"
    ;;
  train-tiny)
    for numbers in 4 5; do
      $python experiments/sweep.py $here/sweep.yaml --out "$work/runs-$numbers" --devices cpu --only 'short/*/s0' --set model="$work/policy" \
        --set "task_options={numbers: [$numbers, $numbers], digits: [1, 2]}" --set steps=1 --set prompts_per_step=2 --set samples_per_prompt=2 \
        --set max_new_tokens=40 --set eval_problems=4 --set eval_samples=1 --set monitor_every=0
    done
    ;;
  *) sed -n '2,12p' $here/run.sh; exit 2 ;;
esac
