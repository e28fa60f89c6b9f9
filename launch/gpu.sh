#!/usr/bin/env bash
# Runs one part of the first work for a new GPU, within a limit of seconds.
#
#   launch/gpu.sh PART OUT [ARCHIVES]
#
#   check     the tests of models and orthogonal maps, and a run that is killed
#   speed     python -m benchmarks.gpu
#   table_1   TransJect, table 1: IMDb, and AG's News where its archive is
#   table_2   TransJect, table 2: ListOps, then the other tasks
#   neutreno  softmax and NeuTRENO on CIFAR-10, three seeds
#
# Every part is asked to end a minute before the limit. A run that does not
# finish in time saves its state, and the same command continues it. OUT gets a
# log of each part, and PART.tar.gz with configs, curves and results of its runs.
# ARCHIVES is a folder of data sets. Variables: LIMIT, seconds for a part, more
# than 60 (default 540); WORK, folder of the runs (/tmp/jaxformers-gpu); SMALL=1
# for small sizes, to try a part on a CPU. speed needs a limit of more than 90.
set -uo pipefail
usage() {
  sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//' >&2
  exit 2
}

(($# == 2 || $# == 3)) || usage
for value in "$@"; do
  [[ $value && $value != -* ]] || usage
done
part=$1 out=$2 archives=${3:-}
limit=${LIMIT:-540} work=${WORK:-/tmp/jaxformers-gpu}
[[ $limit =~ ^[1-9][0-9]{0,5}$ ]] || usage
((limit > 60)) || usage
[[ $part =~ ^(check|speed|table_1|table_2|neutreno)$ ]] || usage
[[ $part != speed ]] || ((limit > 90)) || usage
mkdir -p "$out" "$work/$part" || exit
out=$(realpath "$out") && work=$(realpath "$work") || exit
if [[ $archives ]]; then
  archives=$(realpath -e "$archives") || exit 2
fi
cd "$(dirname "$0")/.." || exit
# PyTorch needs memory next to JAX. Training uses deterministic operations, so
# that results repeat exactly; `speed` measures the usual operations.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
[[ $part == speed ]] ||
  export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_deterministic_ops=true"

# Runs a command, and asks it to end a minute before the limit of the part.
within_limit() {
  local left=$((limit - 60 - SECONDS))
  timeout --signal=TERM --kill-after=55 "$((left > 1 ? left : 1))" "$@"
}

# Sizes of a trial on a CPU.
small=()
[[ ${SMALL:-} ]] && small=(--config.total_steps=20 --config.eval_steps=20
  --config.schedule.warmup_steps=2)

table() { # TABLE [ARGUMENT ...]
  within_limit python launch/tables.py "$@" --workdir "$work/$part" \
    ${archives:+--archives "$archives"} ${SMALL:+--size tiny} "${small[@]}"
}

run_part() {
  case $part in
    check)
      local tests=(tests/orthogonal tests/models tests/training/test_resume.py)
      [[ ${SMALL:-} ]] && tests=(tests/orthogonal/test_convert.py)
      within_limit python -m pytest -n 0 -q -x "${tests[@]}" ;;
    speed)
      within_limit python -m benchmarks.gpu --out "$out/gpu.json" \
        --seconds $((limit - 90)) ${SMALL:+--small} ;;
    table_1)
      table 1 --models random_transject,transject,transformer --seeds 0,1,2 ;;
    table_2)
      table 2 --models transject,transformer --seeds 0 ;;
    neutreno)
      within_limit python launch/sweep.py --workdir "$work/neutreno" \
        --config configs/vision/cifar10.py:size=tiny \
        --grid model=transformer,neutreno --seeds 0,1,2 \
        ${archives:+--config.task.archive="$archives/cifar10_jpeg.tar.xz"} \
        "${small[@]}" ;;
  esac
}

run_part 2>&1 | tee "$out/$part.log"
status=$?
# Keep the files that describe the runs; checkpoints stay in WORK.
(cd "$work/$part" && find . -name config.json -o -name metrics.jsonl -o -name results.json \
  | tar czf - --files-from -) > "$out/$part.tar.gz"
exit "$status"
