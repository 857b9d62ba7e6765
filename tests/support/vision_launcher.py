"""Starts SGLang on the CPU for a model that reads images or sound. Runs with the engine's Python.

Modules of such models look up operators of SGLang's kernels when they are imported, which a CPU without AMX has not.
They get one that raises when it is called. SGLang's processes start from this file too: what stands at its top is in
each of them.
"""

# pyright: basic, reportMissingImports=false
# ruff: noqa: E402
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path

import torch

_found = torch._ops._OpNamespace.__getattr__


def _operator(self, name):
    try:
        return _found(self, name)
    except AttributeError:
        if self.name != "sgl_kernel" or not name.endswith("_cpu"):
            raise

        def missing(*_args, **_options):
            raise NotImplementedError(f"torch.ops.sgl_kernel.{name}")

        return missing


def _resample(samples, orig_freq, new_freq, *_args, **_options):
    size = int(samples.shape[-1] * new_freq / orig_freq)
    flat = samples.reshape(-1, 1, samples.shape[-1]).float()
    return torch.nn.functional.interpolate(flat, size=size, mode="linear").reshape(*samples.shape[:-1], size)


def _without_torchaudio() -> None:
    """No torchaudio fits the CPU's torch. SGLang uses one function of it; soundfile decodes."""
    audio, functional = types.ModuleType("torchaudio"), types.ModuleType("torchaudio.functional")
    audio.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    vars(functional)["resample"] = _resample
    vars(audio).update(__version__="0", functional=functional)
    sys.modules |= {"torchaudio": audio, "torchaudio.functional": functional}


if importlib.util.find_spec("torchaudio") is None:
    _without_torchaudio()
torch._ops._OpNamespace.__getattr__ = _operator
sys.path.insert(0, str(Path(sys.prefix) / "share" / "shoal"))
import serve_sglang_cpu  # noqa: F401

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
