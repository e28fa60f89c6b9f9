#!/usr/bin/env bash
# Runs a command as several processes on this machine, which train together.
#
#   launch/local.sh 2 -- python -m jaxformers.main --config ... --workdir ...
#
# The processes find each other by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
# JAX_PROCESS_ID. If one dies, all are ended and restarted, and resume from the
# latest complete checkpoint. After status 2, a mistake of the user, nothing is
# restarted. SIGTERM, SIGHUP and Ctrl-C let the processes save first. No process
# is left behind if this script is killed.
set -uo pipefail

usage() {
  cat >&2 <<TEXT
usage: launch/local.sh N [--devices D] [--restarts K] [--grace S] [--dry_run] -- COMMAND
  N           number of processes
  --devices   virtual CPU devices of each process, without an accelerator
  --restarts  number of times that all restart after a process has died; default 3
  --grace     seconds that the others have to end by themselves; default 10
  --dry_run   print the commands and run nothing
TEXT
  exit 2
}

# Bash arithmetic executes commands that a string contains: accept only digits.
number() { # OPTION VALUE LEAST
  local LC_ALL=C
  if [[ ! $2 =~ ^(0|[1-9][0-9]{0,5})$ ]] || (($2 < $3)); then
    echo "launch/local.sh: $1 '$2': give a whole number from $3 to 999999." >&2
    exit 2
  fi
}

count=${1:-}
[[ $count =~ ^[1-9][0-9]{0,3}$ ]] || usage
shift
devices='' restarts=3 grace=10 dry_run=''
while (($#)); do
  case $1 in
    --devices) devices=${2:-}; number "$1" "$devices" 1; shift 2 ;;
    --restarts) restarts=${2:-}; number "$1" "$restarts" 0; shift 2 ;;
    --grace) grace=${2:-}; number "$1" "$grace" 0; shift 2 ;;
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

HOLD=120  # Seconds that processes have to save after SIGTERM.

# Ends the ranks if this script is gone, even by SIGKILL. It reads lines: PID when
# a rank starts, -PID when it has ended. The script holds the write end of the
# pipe. A rank closes its copy before it runs the command, so that the loop ends
# when the script ends.
guard() {
  trap '' HUP INT QUIT TERM
  local -A ranks=()
  local line pid
  while read -r line; do
    case $line in
      -*) unset "ranks[${line#-}]" ;;
      *) ranks[$line]=yes ;;
    esac
  done
  ((${#ranks[@]})) || return
  kill -TERM "${!ranks[@]}"
  local deadline=$((SECONDS + HOLD))
  while ((SECONDS < deadline && ${#ranks[@]})); do
    for pid in "${!ranks[@]}"; do
      kill -0 "$pid" || unset "ranks[$pid]"
    done
    sleep 0.2
  done
  ((${#ranks[@]})) && kill -KILL "${!ranks[@]}"
}

pids=()
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
    (
      trap '' HUP  # A closing terminal signals all processes; this script signals one.
      echo "$BASHPID" >&"$lifeline"
      exec {lifeline}>&-
      export JAX_COORDINATOR_ADDRESS=127.0.0.1:$port JAX_NUM_PROCESSES=$count
      export JAX_PROCESS_ID=$rank
      exec "$@"
    ) &
    pids+=($!)
  done
}

asked='' told=''
stop() { asked=yes told=''; }
trap stop TERM INT HUP
trap : PIPE  # Continue without the guard if the guard has died.

# Waits for all processes; returns the status of the first that fails, or 0.
watch() {
  local left=$count status worst=0 deadline=''
  while ((left)); do
    # Collect the processes that have ended.
    local pid alive=()
    for pid in "${pids[@]}"; do
      [[ ${ended[$pid]:-} ]] && continue
      if kill -0 "$pid" 2>/dev/null; then
        alive+=("$pid")
        continue
      fi
      wait "$pid"
      status=$?
      ended[$pid]=yes
      echo "-$pid" >&"$lifeline"
      if ((status && !worst)); then
        worst=$status
        deadline=$((SECONDS + grace))
        ((status == 143)) && deadline=$((SECONDS + HOLD))
      fi
    done
    left=${#alive[@]}
    ((left)) || break
    # Pass a signal on, and end the others if a process has failed.
    if [[ $asked && ! $told ]]; then
      told=yes
      # JAX informs the other processes, and all save after the same step.
      kill -TERM "${alive[0]}" 2>/dev/null
    fi
    if [[ $deadline ]] && ((SECONDS >= deadline)); then
      kill -KILL "${alive[@]}" 2>/dev/null
      deadline=''
    fi
    sleep 0.2
  done
  return "$worst"
}

[[ $dry_run ]] || exec {lifeline}> >(guard >/dev/null 2>&1)
for ((attempt = 0; ; attempt++)); do
  port=$(free_port) || { echo "launch/local.sh: python3 finds no free port." >&2; exit 1; }
  [[ $asked ]] && exit 143
  start "$port" "$@"
  [[ $dry_run ]] && exit 0
  declare -A ended=()
  watch
  status=$?
  ((status == 0)) && exit 0
  # Stop after a signal, or after status 2, which a restart would repeat.
  [[ $asked ]] && exit "$status"
  ((status == 2)) && exit "$status"
  if ((attempt >= restarts)); then
    echo "launch/local.sh: the processes failed $((attempt + 1)) times, at last with $status." >&2
    exit "$status"
  fi
  echo "launch/local.sh: a process ended with $status; starting all again." >&2
done
