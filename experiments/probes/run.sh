#!/usr/bin/env bash
# Every probe on a model, each in a process of its own, then one page: OUT/NAME/{probe.json, probe.html, probes/}.
#
#   bash experiments/probes/run.sh NAME OUT DEVICES MODEL [OPTION …]
#   bash experiments/probes/run.sh dense out/probes cuda:0 policy:dense --prompts 128
#   bash experiments/probes/run.sh moe out/probes cuda:0 policy:moe --prompts 128
#   bash experiments/probes/run.sh qwen out/probes cuda:0 Qwen2.5-Coder-0.5B-Instruct --task gsm8k:test.jsonl --prompts 32
#
# The probes run side by side on one GPU: each takes little of it. PROBES="gradient fork" runs some of them, LIMIT=265
# ends each after so many seconds; join.py puts what is there on one page. Same commands on a CPU with --device cpu.
set -u
cd "$(dirname "$0")/../.."
name=$1 out=$2 device=$3 model=$4
shift 4
for probe in ${PROBES:-gradient temperature deadzone drift fork routing}; do
  (
    begin=$SECONDS
    timeout -s INT -k 10 "${LIMIT:-3600}" python -m mxrl probe "$probe" "$model" --device "$device" \
      -o "$out/$name/$probe" "$@" >"$out-$name-$probe.txt" 2>&1
    echo "$name $probe: exit $? after $((SECONDS - begin)) s $(grep '^mxrl: ' "$out-$name-$probe.txt" | tail -n 1)"
  ) &
done
wait
python experiments/probes/join.py "$out/$name"
