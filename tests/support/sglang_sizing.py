# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportOptionalMemberAccess=false
"""SGLang's own sizing code, asked for its figures. Runs in the engine's environment, not in ours.

Reads {"cases": [{"config": {...}, "tensor": 4, "memory_mib": 81559, "kv_dtype": "auto", ...}]} from stdin and writes
one object per case to stdout. Nothing is computed here: the functions are SGLang's, and only what would ask a GPU (its
memory, its parallel groups) is given to them.
"""

import ast
import contextlib
import functools
import json
import re
import runpy
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

runpy.run_path(str(Path(sys.prefix) / "share" / "shoal" / "serve_sglang_cpu.py"), run_name="imported")

import sglang.srt.arg_groups.cuda_graph_hook as graph_hook  # noqa: E402
import sglang.srt.arg_groups.memory_hook as memory_hook  # noqa: E402
import sglang.srt.layers.cp.utils  # noqa: E402
import sglang.srt.mem_cache.kv_cache_configurator  # noqa: E402, F401
import sglang.srt.model_executor.pool_configurator as pools  # noqa: E402
import torch  # noqa: E402
from sglang.srt.configs import hybrid_arch, model_config  # noqa: E402
from sglang.srt.distributed.utils import get_pp_indices  # noqa: E402
from sglang.srt.layers.quantization import QUANTIZATION_METHODS  # noqa: E402
from sglang.srt.lora import mem_pool  # noqa: E402
from sglang.srt.lora.utils import get_normalized_target_modules  # noqa: E402
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype  # noqa: E402
from sglang.srt.model_executor.cuda_graph_config import Backend, default_cuda_graph_config  # noqa: E402


@functools.cache
def model_of(config):
    """SGLang's reading of a config.json (its text)."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(config)
        return model_config.ModelConfig(folder, trust_remote_code=False)


def fraction_of(model, case):
    """SGLang's mem_fraction_static."""
    cfg = SimpleNamespace(
        device="cuda", tp_size=case["tensor"], pp_size=case.get("pipeline", 1), dcp_size=1,
        attn_dp_size=case.get("attention_dp", 1),
        chunked_prefill_size=case.get("chunked_prefill_size"), max_running_requests=None, max_total_tokens=None,
        max_prefill_tokens=16384, disaggregation_mode="null", speculative_num_draft_tokens=None,
        speculative_algorithm=None, disable_cuda_graph_padding=False, model_path="x", language_only=False,
        language_model_only=False, enable_symm_mem=False, mem_fraction_static=None, torch_compile_max_bs=None,
        moe_a2a_backend="none", enable_two_batch_overlap=False, attn_cp_size=1,
        cuda_graph_config=default_cuda_graph_config(), _cuda_graph_config_locked=set(),
    )  # fmt: skip
    # What a CUDA machine defaults to.
    cfg.cuda_graph_config.prefill.backend = Backend.BREAKABLE
    cfg.cuda_graph_config.decode.max_bs = case.get("cuda_graph_max_bs")

    def declare(_args, _source, **values):
        for name, value in values.items():
            setattr(cfg, name, value)

    common = {
        "resolving_view": lambda a: a, "resolved_view": lambda a: a, "declare_resolution": declare,
        "model_config_of": lambda a: model,
    }  # fmt: skip
    memory = {
        **common, "get_device_memory_capacity": lambda _device: case["memory_mib"],
        "use_mla_backend": lambda _a: model.attention_arch == model_config.AttentionArch.MLA,
        "post_capture_kv_sizing_planned": lambda _a: False, "attn_dp_enabled_of": lambda c: c.attn_dp_size > 1,
        "get_platform": lambda: SimpleNamespace(is_xpu=False),
    }  # fmt: skip
    with mock.patch.multiple(graph_hook, **common), mock.patch.multiple(memory_hook, **memory):
        graph_hook.apply_cuda_graph_compatibility(cfg)
        memory_hook.handle_gpu_memory_settings(cfg)
    return cfg.mem_fraction_static


def pools_of(model, case):
    """Cell size in bytes by SGLang's pool configurator, and the state of one request of a hybrid model."""
    tensor = case["tensor"] // case.get("attention_dp", 1)
    kv_dtype = case.get("kv_dtype", "auto")
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=kv_dtype, model=None, model_dtype=model.dtype,
        is_draft_worker=False, is_dflash=False, speculative_draft_attention_backend=None,
    )  # fmt: skip
    depth = max(model.num_hidden_layers, model.num_attention_layers)
    stages = case.get("pipeline", 1)
    parts = [get_pp_indices(depth, rank, stages) for rank in range(stages)]
    start, end = max(parts, key=lambda part: part[1] - part[0])
    plain = SimpleNamespace(is_eagle=bool, is_standalone=bool, is_dflash_family=bool)
    layers = SimpleNamespace(
        start_layer=start, end_layer=end, num_effective_layers=end - start,
        full_attention_layer_ids=model.full_attention_layer_ids,
        swa_attention_layer_ids=model.swa_attention_layer_ids,
    )  # fmt: skip
    hybrid = hybrid_arch.mambaish_config(model)
    kvc = SimpleNamespace(
        model_config=model, kv_cache_dtype=dtype, kv_cache_dtype_str=kv_dtype, layer_info=layers,
        is_draft_worker=False, spec_algorithm=plain, pp_size=stages, page_size=1, is_hybrid_swa=model.is_hybrid_swa,
        sliding_window_size=None, use_mla_backend=model.attention_arch == model_config.AttentionArch.MLA,
        mambaish_config=hybrid, fused_entry_bytes=lambda _name: None,
        server_args=SimpleNamespace(enable_hisparse=False),
    )  # fmt: skip
    memory = SimpleNamespace(
        enable_unified_memory=False, disable_radix_cache=False, enable_hisparse=False,
        enable_unified_cache_external_linker=False,
    )  # fmt: skip
    schedule = SimpleNamespace(swa_full_tokens_ratio=0.8, max_total_tokens=None, max_running_requests=None)
    kernel = SimpleNamespace(dsa_prefill_backend="any", dsa_decode_backend="any")
    asked = {
        "get_parallel": SimpleNamespace(attn_tp_size=tensor, tp_size=tensor, attn_dcp_size=1),
        "get_schedule": schedule, "get_memory": memory, "get_exec": SimpleNamespace(kernel=kernel),
        "get_disagg": SimpleNamespace(disaggregation_mode="null"), "linear_attn_tp_size": tensor,
        "get_glm_dsa_cp_layer_shard_info": (0, 1), "compute_page_shard_scratch_bytes": 0,
    }  # fmt: skip
    with answered(asked):
        return {
            "cell": pools.create_memory_pool_configurator(kvc)._cell_size,
            "state": hybrid.mamba2_cache_params.mamba_cache_per_req if hybrid is not None else None,
        }


def slots_of(model, case):
    """Bytes on one GPU of the buffers that SGLang's LoRA memory pool makes, on a device without memory."""
    wanted = case.get("adapters")
    if wanted is None:
        return None
    base = torch.nn.Linear(1, 1, device="meta")
    base.config = model.hf_config
    dp, tensor = case.get("attention_dp", 1), case["tensor"]
    parallel = SimpleNamespace(
        tp_size=tensor, tp_rank=0, attn_tp_size=tensor // dp, moe_ep_size=1, moe_ep_rank=0,
        moe_tp_size=tensor, moe_tp_rank=0,
    )  # fmt: skip
    modules = set(wanted["modules"])
    with mock.patch.object(mem_pool, "get_parallel", return_value=parallel):
        pool = mem_pool.LoRAMemoryPool(
            base_hf_config=model.hf_text_config, max_loras_per_batch=wanted["slots"], dtype=model.dtype,
            max_lora_rank=wanted["rank"], target_modules=get_normalized_target_modules(modules), base_model=base,
            eviction_policy="lru", lora_added_tokens_size=0,
        )  # fmt: skip
    layers = [t for buffer in (pool.A_buffer, pool.B_buffer) for tensors in buffer.values() for t in tensors]
    tables = (pool.embedding_A_buffer, pool.embedding_B_buffer, pool.lm_head_A_buffer, pool.lm_head_B_buffer)
    return sum(t.nbytes for t in [*layers, *(t for table in tables for t in table.values())])


@contextlib.contextmanager
def answered(values):
    """Functions of these names answer so, in every module that took them by name."""
    with contextlib.ExitStack() as stack:
        prefixes = ("sglang.srt.configs.", "sglang.srt.model_executor.pool", "sglang.srt.mem_cache.kv_cache_c")
        for name, module in list(sys.modules.items()):
            if not name.startswith((*prefixes, "sglang.srt.layers.cp.utils")):
                continue
            for function, value in values.items():
                if hasattr(module, function):
                    stack.enter_context(mock.patch.object(module, function, return_value=value))
            if hasattr(module, "_is_cpu"):
                stack.enter_context(mock.patch.object(module, "_is_cpu", False))
            layers = "get_glm_dsa_layer_split_effective_num_layers"
            if hasattr(module, layers):
                stack.enter_context(mock.patch.object(module, layers, side_effect=lambda _kvc, count: count))
        yield


def answer(case):
    model = model_of(json.dumps(case["config"]))
    return {
        "context": model.context_len, "fraction": fraction_of(model, case), "multimodal": model.is_multimodal,
        "quantization": model.quantization, "generation": model.is_generation, "slots": slots_of(model, case),
        **pools_of(model, case),
    }  # fmt: skip


def registry():
    """Names that SGLang's model registry knows."""
    found = set()
    # Their text: importing them all would ask for kernels that no CPU has.
    for path in (Path(model_config.__file__).parents[1] / "models").rglob("*.py"):
        entry = re.search(r"^EntryClass\s*=\s*(\[[^\]]*\]|\([^)]*\)|\w+)", path.read_text(), re.M)
        found |= set(re.findall(r"[A-Za-z_]\w+", entry[1])) if entry else set()
    return sorted(found)


def staged():
    """Classes whose forward takes what an earlier pipeline stage computed."""
    bases, takes = {}, {}
    for path in (Path(model_config.__file__).parents[1] / "models").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name not in bases:
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name == "forward":
                        takes[node.name] = "pp_proxy_tensors" in {a.arg for a in part.args.args + part.args.kwonlyargs}

    def found(name):
        if name in takes:
            return takes[name]
        return next((answer for base in bases.get(name, ()) if (answer := found(base)) is not None), None)

    return sorted(name for name in bases if found(name))


def capabilities():
    """method -> ten times the least compute capability."""
    found = {}
    for name, method in QUANTIZATION_METHODS.items():
        try:
            found[name] = method.get_min_capability()
        except TypeError:  # asks an instance
            found[name] = method(**({"use_mxfp8": True} if name == "mxfp8" else {})).get_min_capability()
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    out = {"answers": [answer(case) for case in asked["cases"]]}
    if asked.get("registry"):
        out |= {
            "registry": registry(), "staged": staged(), "capabilities": capabilities(),
            "multimodal": sorted(model_config.multimodal_model_archs),
        }  # fmt: skip
    sys.__stdout__.write("\n=====\n" + json.dumps(out))
