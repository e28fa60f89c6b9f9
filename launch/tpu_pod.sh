#!/usr/bin/env bash
# Creates, installs, runs and deletes a Cloud TPU pod, on all of its hosts.
#
#   launch/tpu_pod.sh create  --name NAME --zone ZONE --type v4-32
#   launch/tpu_pod.sh install --name NAME --zone ZONE
#   launch/tpu_pod.sh prepare --name NAME --zone ZONE -- listops
#   launch/tpu_pod.sh run     --name NAME --zone ZONE --type v4-32 --dry_run -- --config ...
#   launch/tpu_pod.sh run     --name NAME --zone ZONE -- --config ... --workdir /mnt/shared/runs/NAME
#   launch/tpu_pod.sh watch   --name NAME --zone ZONE
#   launch/tpu_pod.sh resume  --name NAME --zone ZONE --type v4-32 -- (as for run)
#   launch/tpu_pod.sh delete  --name NAME --zone ZONE
set -euo pipefail

usage() {
  cat >&2 <<TEXT
usage: launch/tpu_pod.sh ACTION --name NAME --zone ZONE [options] [-- ARGUMENTS]
  ACTION      create, install, prepare, run, watch, stop, resume or delete
  --project   project of Google Cloud; default: gcloud's
  --type      accelerator type, such as v4-32; for create and resume
  --version   version of the TPU software; default: Google's for the type
  --spot      a cheaper pod, which may be taken away at any time
  --dry_run   print the commands and run nothing; "run" with --type also
              prepares the data, compiles the config for that type on this
              machine, and prints its cost
  ARGUMENTS   for prepare: python -m jaxformers prepare ARGUMENTS
              for run and resume: python -m jaxformers.main ARGUMENTS
TEXT
  exit 2
}

action=${1:-}
case $action in
  create | install | prepare | run | watch | stop | resume | delete) shift ;;
  *) usage ;;
esac
# Refuses values that begin with -, which gcloud would take for options.
plain() { # OPTION VALUE
  local LC_ALL=C  # In other locales a-z may include capitals.
  if [[ ! $2 =~ ^[a-z0-9]([a-z0-9.:-]*[a-z0-9])?$ ]]; then
    echo "launch/tpu_pod.sh: $1 '$2': give a-z, 0-9, and . : - between them." >&2
    exit 2
  fi
}

name='' zone='' type='' version='' project=() spot=() dry_run=''
while (($#)); do
  case $1 in
    --name | --zone | --project | --type | --version)
      [[ ${2:-} ]] || usage
      plain "$1" "$2"
      ;;
  esac
  case $1 in
    --name) name=$2 && shift 2 ;;
    --zone) zone=$2 && shift 2 ;;
    --project) project=(--project "$2") && shift 2 ;;
    --type) type=$2 && shift 2 ;;
    --version) version=$2 && shift 2 ;;
    --spot) spot=(--spot) && shift ;;
    --dry_run) dry_run=yes && shift ;;
    --) shift && break ;;
    *) usage ;;
  esac
done
[[ $name && $zone ]] || usage
where=(--zone "$zone" "${project[@]}")

say() {
  printf '%q ' "$@"
  printf '\n'
}

tpu() {
  local verb=$1
  shift
  local command=(gcloud compute tpus tpu-vm "$verb" "$@" "${where[@]}")
  if [[ $dry_run ]]; then say "${command[@]}"; else "${command[@]}"; fi
}

on() { # WORKER COMMAND
  tpu ssh "$name" --worker="$1" --command="$2"
}

create() {
  [[ $type ]] || usage
  if [[ ! $version ]]; then
    case $type in
      v5litepod-*) version=v2-alpha-tpuv5-lite ;;
      v5p-*) version=v2-alpha-tpuv5 ;;
      v6e-*) version=v2-alpha-tpuv6e ;;
      *) version=tpu-ubuntu2204-base ;;
    esac
  fi
  tpu create "$name" --accelerator-type "$type" --version "$version" "${spot[@]}"
}

install() {
  local here tarball
  local packed=(setup.cfg pyproject.toml README.md LICENSE jaxformers configs launch)
  here=$(cd "$(dirname "$0")/.." && pwd)
  tarball=$(mktemp -d)/jaxformers.tar.gz
  # An unpacked archive may lie inside another repository, which does not track
  # the setup.cfg of this one.
  if git -C "$here" ls-files --error-unmatch setup.cfg >/dev/null 2>&1; then
    # Install only what is committed.
    git -C "$here" archive --format=tar.gz --output="$tarball" HEAD
  else
    echo "launch/tpu_pod.sh: $here is not a git checkout: installing its files as they are." >&2
    tar -czf "$tarball" -C "$here" --exclude=__pycache__ "${packed[@]}"
  fi
  tpu scp "$tarball" "$name:jaxformers.tar.gz" --worker=all
  on all "mkdir -p jaxformers && tar xzf jaxformers.tar.gz -C jaxformers && cd jaxformers && (command -v python3.11 || (sudo apt-get update && sudo apt-get install -y python3.11 python3.11-venv)) && python3.11 -m venv env && env/bin/pip install --quiet -e '.[tpu]'"
}

quoted() {
  printf ' %q' "$@"
}

# Compiles the config of the arguments for the type of the pod, on this machine.
compile_for_type() {
  local config='' fields=()
  while (($#)); do
    case $1 in
      --config)
        [[ ${2:-} ]] || usage
        config=$2 && shift
        ;;
      --config=*) config=${1#*=} ;;
      --config.* | --noconfig.*)
        fields+=("$1")
        # The value may be the next word.
        if [[ $1 != *=* && $1 != --no* && ${2:-} && ${2:-} != --* ]]; then
          fields+=("$2") && shift
        fi
        ;;
    esac
    shift
  done
  [[ $config ]] || usage
  local command=(python -m jaxformers compile "$config" --device "$type" "${fields[@]}")
  say "${command[@]}"
  "${command[@]}"
}

# Succeeds on a host whose run is live. The host expands it.
# shellcheck disable=SC2016
live='grep -qs jaxformers.main "/proc/$(cat jaxformers/run.pid 2>/dev/null)/cmdline"'

run() {
  (($#)) || usage
  if [[ $action == run && $dry_run && $type ]]; then compile_for_type "$@"; fi
  # The run continues after the shell that starts it has ended. A live run keeps
  # its log and its number.
  on all "if $live; then echo 'launch/tpu_pod.sh: a run is live: stop it first.' >&2; exit 1; fi; cd jaxformers && (nohup env/bin/python -m jaxformers.main --distributed$(quoted "$@") >> run.log 2>&1 & echo \$! > run.pid)"
}

state() {
  local errors said
  errors=$(mktemp)
  if said=$(gcloud compute tpus tpu-vm describe "$name" "${where[@]}" \
    --format='value(state)' 2>"$errors"); then
    echo "$said"
  elif grep -qi 'not.found' "$errors"; then
    echo ABSENT
  else
    # Without a network or a login the pod may well exist.
    cat "$errors" >&2
    return 1
  fi
}

resume() {
  (($#)) || usage
  local now=READY
  [[ $dry_run ]] || now=$(state)
  case $now in
    READY)
      # Do not touch a live run, or hosts that do not answer.
      local ask="$live && echo live || echo dead"
      if [[ $dry_run ]]; then
        on 0 "$ask"
      else
        case $(on 0 "$ask") in
          *live) exit 0 ;;
          *dead) ;;
          *)
            echo "launch/tpu_pod.sh: host 0 does not answer: nothing is resumed." >&2
            exit 1
            ;;
        esac
      fi
      # shellcheck disable=SC2016
      on all 'kill -9 "$(cat jaxformers/run.pid)" 2>/dev/null || true'
      ;;
    ABSENT | PREEMPTED | TERMINATED | STOPPED | SUSPENDED)
      [[ $now == ABSENT ]] || tpu delete "$name" --quiet
      create
      install
      ;;
    *)
      echo "launch/tpu_pod.sh: the pod is $now: nothing to resume yet." >&2
      exit 1
      ;;
  esac
  run "$@"
}

case $action in
  create) create ;;
  install) install ;;
  prepare)
    (($#)) || usage
    on all "cd jaxformers && env/bin/python -m jaxformers prepare$(quoted "$@")"
    ;;
  run) run "$@" ;;
  stop)
    # JAX informs the other hosts, and all save after the same step.
    # shellcheck disable=SC2016
    on 0 'kill -TERM "$(cat jaxformers/run.pid)"'
    ;;
  watch) on 0 'tail -n 40 -F jaxformers/run.log' ;;
  resume) resume "$@" ;;
  delete) tpu delete "$name" --quiet ;;
esac
