#!/bin/sh
# sglang-cpu ARGUMENTS...: the real SGLang server on a machine without a GPU. Takes SGLang's own arguments; what a CPU
# needs stands before them, so that the caller's win. install.sh copies this to VENV/bin/sglang-cpu.
set -eu
# Some environments forbid byte code; then every start would compile all of SGLang anew (+50 CPU seconds).
unset PYTHONDONTWRITEBYTECODE
venv=$(cd "$(dirname "$0")/.." && pwd)
# NGRAM compiles its store of texts at the first start: with a C++ compiler, and with ninja, which lies there.
export PATH="$PATH:$venv/bin"
# The exec matters: SIGTERM must reach SGLang itself, and nobody else.
# --sleep-on-idle: without it an idle scheduler keeps a core busy.
exec "$venv/bin/python" "$venv/share/shoal/serve_sglang_cpu.py" \
  --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none \
  --lora-backend torch_native \
  --max-total-tokens "${SHOAL_CPU_MAX_TOTAL_TOKENS:-20000}" \
  --max-running-requests "${SHOAL_CPU_MAX_RUNNING_REQUESTS:-16}" \
  --sleep-on-idle "$@"
