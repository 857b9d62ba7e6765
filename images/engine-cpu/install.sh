#!/bin/sh
# install.sh [VENV]: install the real SGLang engine for a machine without a GPU. Idempotent; a second run takes seconds.
# Start it with: VENV/bin/sglang-cpu --model-path DIR --port 30000 ...
#
# VENV: default $SHOAL_ENGINE_VENV, else ${XDG_CACHE_HOME:-~/.cache}/shoal/engine-cpu/venv.
# torch: a CPU build (2.14.1+cpu, else 2.13.0+cpu) if the configured package sources have one: PIP_FIND_LINKS,
#   UV_FIND_LINKS, PIP_EXTRA_INDEX_URL, UV_EXTRA_INDEX_URL or a pip configuration file (pip only).
#   Otherwise PyPI's CUDA build 2.14.1 and only those CUDA libraries that it must find to be imported.
#   TORCH=2.13.0 (any version specifier after ==) skips this choice.
# CUDA_LIBS=stub (default): make_cuda_stubs.py writes empty CUDA libraries (0.7 GB download, 1.8 GB on disk; needs gcc
#   and readelf). Never use such an installation with a GPU.
# CUDA_LIBS=wheels: these libraries come from PyPI (2.7 GB download, 4.7 GB on disk).
# PYTHON: interpreter for a new VENV (default python3.11, else python3). UV: path of uv (default: from PATH; UV=no: pip).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-${SHOAL_ENGINE_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/shoal/engine-cpu/venv}}
cuda_libs=${CUDA_LIBS:-stub}
case $cuda_libs in wheels|stub) ;; *) echo "CUDA_LIBS must be wheels or stub" >&2; exit 2;; esac
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
uv=${UV:-$(command -v uv || true)}
[ "$uv" != no ] || uv=
say() { echo "engine-cpu: $*"; }

# What the installation depends on: unchanged means done.
stamp=$(cd "$here" && cat requirements-engine.txt requirements-cuda-libs.txt install.sh sglang-cpu.sh triton_stub.py \
  make_cuda_stubs.py serve_sglang_cpu.py ngram_cpu.py | cksum; echo "$cuda_libs ${TORCH:-}")
if [ -x "$venv/bin/sglang-cpu" ] && [ "$(cat "$venv/.shoal-installed" 2>/dev/null)" = "$stamp" ]; then
  say "installed in $venv"
  exit 0
fi
if [ "$cuda_libs" = stub ]; then
  for tool in gcc readelf; do
    command -v $tool >/dev/null || { say "CUDA_LIBS=stub needs $tool (or set CUDA_LIBS=wheels: 2.7 GB)" >&2; exit 1; }
  done
fi
mkdir -p "$(dirname "$venv")"
say "installing into $venv (about a minute with uv, six with pip)"

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

if [ -n "$uv" ]; then
  # uv does not read pip's variables; prefer the best version over the first index, as pip does.
  export UV_INDEX_STRATEGY="${UV_INDEX_STRATEGY:-unsafe-best-match}"
  links=
  for l in ${PIP_FIND_LINKS:-}; do
    case $l in /*) [ -d "$l" ] || continue;; esac
    links="$links --find-links $l"
  done
  for l in ${PIP_EXTRA_INDEX_URL:-}; do links="$links --extra-index-url $l"; done
  # shellcheck disable=SC2086
  install() { "$uv" pip install --python "$py" --no-deps $links "$@"; }
  available() { install -q --dry-run "$1" >/dev/null 2>&1; }
else
  install() { "$py" -m pip install -q --no-deps "$@"; }
  available() { install "$1" >/dev/null 2>&1; }
fi

torch_is() {  # prints "VERSION cpu|cuda", without importing torch
  "$py" - "$site/torch/version.py" <<'EOF'
import runpy, sys
try:
    v = runpy.run_path(sys.argv[1])
    print(v["__version__"], "cuda" if v.get("cuda") else "cpu")
except OSError:
    pass
EOF
}

have=$(torch_is)
if [ -n "${TORCH:-}" ]; then want=$TORCH
elif [ -n "$have" ]; then want=${have%%+*}; want=${want%% *}   # keep what an earlier run chose
  case $have in *+cpu*) want=$want+cpu;; esac
else
  want=2.14.1
  for v in 2.14.1+cpu 2.13.0+cpu; do
    if available "torch==$v"; then want=$v; break; fi
  done
fi
case $want in
  *+cpu) kind=cpu;;
  *) kind=cuda; case $have in *" cpu") kind=cpu;; esac;;
esac
if [ $kind = cuda ] && [ -n "${TORCH:-}" ]; then install "torch==$want"; have=$(torch_is); kind=${have##* }; fi
say "torch $want ($kind build)"

# One call, so that everything is downloaded side by side.
if [ $kind = cpu ]; then
  install "torch==$want" -r "$here/requirements-engine.txt"
elif [ "$cuda_libs" = wheels ]; then
  # (requirements-cuda-libs.txt is for 2.14.1; its sonames also serve 2.13.0)
  install "torch==$want" -r "$here/requirements-engine.txt" -r "$here/requirements-cuda-libs.txt"
else
  grep -E '^nvidia-(cuda-runtime|cuda-cupti|cufile)==' "$here/requirements-cuda-libs.txt" > "$venv/.cuda-libs.txt"
  install "torch==$want" -r "$here/requirements-engine.txt" -r "$venv/.cuda-libs.txt"
  "$py" "$here/make_cuda_stubs.py" "$site"
fi

# Import what an engine imports: checks the installation and leaves byte code (uv leaves none; without it
# every start costs some 50 CPU seconds more).
say "importing the engine once"
cd "$here"
env -u PYTHONDONTWRITEBYTECODE "$py" -W ignore - <<'EOF'
import logging, sys
logging.disable(logging.WARNING)
sys.path.insert(0, ".")
import serve_sglang_cpu  # the stand-ins
import torch, torchvision
import sglang.launch_server, sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler, sglang.srt.managers.detokenizer_manager
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.utils import is_cpu, is_cuda
from sglang.version import __version__
assert is_cpu() and not is_cuda()
assert "LlamaForCausalLM" in ModelRegistry.models
print(f"engine-cpu: ok: python {sys.version.split()[0]}, sglang {__version__}, torch {torch.__version__}, torchvision {torchvision.__version__}")
EOF

# The launcher travels with the environment, so that a container needs nothing else.
mkdir -p "$venv/share/shoal"
cp "$here/serve_sglang_cpu.py" "$here/triton_stub.py" "$here/ngram_cpu.py" "$venv/share/shoal/"
cp "$here/sglang-cpu.sh" "$venv/bin/sglang-cpu"
chmod 755 "$venv/bin/sglang-cpu"
echo "$stamp" > "$venv/.shoal-installed"
say "start it with $venv/bin/sglang-cpu --model-path DIR --port 30000"
