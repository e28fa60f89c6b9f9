#!/usr/bin/env bash
# A run on Kubernetes hosts as one JobSet.
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
  --image     made of launch/Dockerfile
  --hosts     pods; 1
  --claim     a volume that all can write, for data and checkpoints: /shared
  --resource  of a host; nvidia.com/gpu
  --devices   of a host; 8
  --dry_run   prints what would be applied
  ARGUMENTS   of python -m jaxformers.main
TEXT
  exit 2
}

action=${1:-}
case $action in apply | watch | delete) shift ;; *) usage ;; esac
name='' image='' hosts=1 claim='' resource=nvidia.com/gpu devices=8 dry_run=''
while (($#)); do
  case $1 in
    --name) name=${2:?} && shift 2 ;;
    --image) image=${2:?} && shift 2 ;;
    --hosts) hosts=${2:?} && shift 2 ;;
    --claim) claim=${2:?} && shift 2 ;;
    --resource) resource=${2:?} && shift 2 ;;
    --devices) devices=${2:?} && shift 2 ;;
    --dry_run) dry_run=yes && shift ;;
    --) shift && break ;;
    *) usage ;;
  esac
done
[[ $name ]] || usage

filled() {
  local arguments
  arguments=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@")
  NAME=$name HOSTS=$hosts IMAGE=$image CLAIM=$claim RESOURCE=$resource \
    DEVICES=$devices ARGS=$arguments python3 -c '
import os, re, sys
text = sys.stdin.read()
print(re.sub("__([A-Z]+)__", lambda m: os.environ[m[1]], text), end="")
' < "$(dirname "$0")/k8s_jobset.yaml"
}

case $action in
  apply)
    if [[ ! $image || ! $claim ]] || ! (($#)); then usage; fi
    if [[ $dry_run ]]; then filled "$@"; else filled "$@" | kubectl apply -f -; fi
    ;;
  watch)
    kubectl logs -f --prefix --tail=40 --max-log-requests=1000 \
      -l "jobset.sigs.k8s.io/jobset-name=$name"
    ;;
  delete) kubectl delete jobset "$name" ;;
esac
