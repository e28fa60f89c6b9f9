#!/usr/bin/env bash
# Runs a command as several processes on this machine, which train together.
#
#   launch/local.sh 2 -- python -m jaxformers.main --config ... --workdir ...
#
# Every process finds the others by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES
# and JAX_PROCESS_ID. When one dies all are ended and started again, and go on
# from the latest whole checkpoint. SIGTERM lets them save first.
set -uo pipefail

usage() {
  cat >&2 <<TEXT
usage: launch/local.sh N [--devices D] [--restarts K] [--grace S] [--dry_run] -- COMMAND
  N           processes
  --devices   CPU devices of each (virtual), where there is no accelerator
  --restarts  after a process has died; 3
  --grace     seconds that the others have to end by themselves; 10
  --dry_run   prints the commands and runs nothing
TEXT
  exit 2
}

count=${1:-}
[[ $count =~ ^[1-9][0-9]*$ ]] || usage
shift
devices='' restarts=3 grace=10 dry_run=''
while (($#)); do
  case $1 in
    --devices) devices=${2:-}; shift 2 || usage ;;
    --restarts) restarts=${2:-}; shift 2 || usage ;;
    --grace) grace=${2:-}; shift 2 || usage ;;
    --dry_run) dry_run=yes; shift ;;
    --) shift; break ;;
    *) usage ;;
  esac
done
(($#)) || usage

if [[ $devices ]]; then
  export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices"
fi

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

pids=()
HOLD=120  # Seconds that all have to save after SIGTERM.
start() {
  local port=$1 rank
  shift
  pids=()
  for ((rank = 0; rank < count; rank++)); do
    if [[ $dry_run ]]; then
      printf 'JAX_COORDINATOR_ADDRESS=127.0.0.1:%s JAX_NUM_PROCESSES=%s JAX_PROCESS_ID=%s' \
        "$port" "$count" "$rank"
      printf ' %q' "$@"
      printf '\n'
      continue
    fi
    JAX_COORDINATOR_ADDRESS="127.0.0.1:$port" JAX_NUM_PROCESSES=$count \
      JAX_PROCESS_ID=$rank "$@" &
    pids+=($!)
  done
}

asked=''
stop() {
  asked=yes
  # JAX tells the others, and all save after the same step.
  kill -TERM "${pids[0]:-}" 2>/dev/null || true
}
trap stop TERM INT

# The status of the first process that fails; 0 if none does.
watch() {
  local left=$count status worst=0 deadline=''
  while ((left)); do
    if [[ $deadline ]] && ((SECONDS >= deadline)); then
      kill -KILL "${pids[@]}" 2>/dev/null
      deadline=''
    fi
    local pid alive=0
    for pid in "${pids[@]}"; do
      if kill -0 "$pid" 2>/dev/null; then
        alive=$((alive + 1))
      elif [[ -z ${ended[$pid]:-} ]]; then
        wait "$pid"
        status=$?
        ended[$pid]=yes
        if ((status && !worst)); then
          worst=$status
          deadline=$((SECONDS + grace))
          ((status == 143)) && deadline=$((SECONDS + HOLD))
        fi
      fi
    done
    left=$alive
    ((left)) && sleep 0.2
  done
  return "$worst"
}

for ((attempt = 0; ; attempt++)); do
  port=$(free_port)
  [[ $asked ]] && exit 143
  start "$port" "$@"
  [[ $dry_run ]] && exit 0
  declare -A ended=()
  watch
  status=$?
  ((status == 0)) && exit 0
  # Asked to end, or a mistake of the user's, which nothing mends by itself.
  [[ $asked ]] && exit "$status"
  ((status == 2)) && exit "$status"
  if ((attempt >= restarts)); then
    echo "launch/local.sh: ended $((attempt + 1)) times, at last with $status." >&2
    exit "$status"
  fi
  echo "launch/local.sh: a process ended with $status; starting all again." >&2
done
