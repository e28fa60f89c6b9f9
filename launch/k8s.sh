#!/usr/bin/env bash
# Runs training on several Kubernetes hosts as one JobSet.
#
#   launch/k8s.sh apply --name NAME --image IMAGE --hosts 4 --claim VOLUME \
#       -- --config ... --workdir /shared/runs/NAME
#   launch/k8s.sh watch --name NAME
#   launch/k8s.sh delete --name NAME
set -euo pipefail

usage() {
  cat >&2 <<TEXT
usage: launch/k8s.sh ACTION --name NAME [options] [-- ARGUMENTS]
  ACTION      apply, watch or delete
  --image     image, built from launch/Dockerfile
  --hosts     number of pods; default 1
  --claim     claim of a volume for data and checkpoints that all pods can write;
              it is mounted at /shared
  --resource  kind of accelerator; default nvidia.com/gpu
  --devices   accelerators per host; default 8
  --dry_run   print the JobSet or the command, and run nothing
  ARGUMENTS   arguments of python -m jaxformers.main
TEXT
  exit 2
}

action=${1:-}
case $action in apply | watch | delete) shift ;; *) usage ;; esac
name='' image='' hosts=1 claim='' resource=nvidia.com/gpu devices=8 dry_run=''
while (($#)); do
  [[ $1 == -- || $1 == --dry_run || ${2:-} ]] || usage
  case $1 in
    --name) name=$2 && shift 2 ;;
    --image) image=$2 && shift 2 ;;
    --hosts) hosts=$2 && shift 2 ;;
    --claim) claim=$2 && shift 2 ;;
    --resource) resource=$2 && shift 2 ;;
    --devices) devices=$2 && shift 2 ;;
    --dry_run) dry_run=yes && shift ;;
    --) shift && break ;;
    *) usage ;;
  esac
done
[[ $name ]] || usage

# Refuses values that would have another meaning inside the YAML text.
must() { # OPTION VALUE PATTERN DESCRIPTION
  local LC_ALL=C  # In other locales a-z may include capitals.
  if [[ ! $2 =~ ^$3$ ]]; then
    echo "launch/k8s.sh: $1 '$2': give $4." >&2
    exit 2
  fi
}
# Pods are named NAME-run-0-INDEX-abcde, which may have at most 63 characters.
must --name "$name" '[a-z]([a-z0-9-]{0,43}[a-z0-9])?' \
  'at most 45 of a-z, 0-9 and -, first a letter and last no -'
must --hosts "$hosts" '[1-9][0-9]{0,4}' 'a whole number from 1 to 99999'
must --devices "$devices" '[1-9][0-9]{0,4}' 'a whole number from 1 to 99999'
must --resource "$resource" \
  '([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?' \
  'the name of a resource, such as nvidia.com/gpu'
[[ ! $image ]] || must --image "$image" '[A-Za-z0-9][A-Za-z0-9._:/@-]*' \
  'the name of an image, such as registry.example/jaxformers:1'
[[ ! $claim ]] || must --claim "$claim" '[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?' \
  'the name of a claim, of a-z, 0-9, - and .'

filled() {
  local arguments
  arguments=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1:], ensure_ascii=False))' "$@")
  NAME=$name HOSTS=$hosts IMAGE=$image CLAIM=$claim RESOURCE=$resource \
    DEVICES=$devices ARGS=$arguments python3 -c '
import os, re, sys
text = sys.stdin.read()
print(re.sub("__([A-Z]+)__", lambda m: os.environ[m[1]], text), end="")
' < "$(dirname "$0")/k8s_jobset.yaml"
}

call() {
  if [[ $dry_run ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

case $action in
  apply)
    if [[ ! $image || ! $claim ]] || ! (($#)); then usage; fi
    # A JobSet that has ended stays until it is deleted: "apply" would change
    # nothing, and start nothing.
    if [[ $dry_run ]]; then filled "$@"; else filled "$@" | kubectl create -f -; fi
    ;;
  watch)
    call kubectl logs -f --prefix --tail=40 --max-log-requests=1000 \
      -l "jobset.sigs.k8s.io/jobset-name=$name"
    ;;
  delete) call kubectl delete jobset "$name" ;;
esac
