"""A plugin of vLLM for engines on a CPU: a request without an adapter is answered by the base model.

vLLM marks the rows of such requests by the index -1. Its GPU kernels leave these rows alone. The PyTorch operators of
its CPU back end index the adapters' stack with -1, and so apply the adapter in the LAST slot whenever one batch mixes
requests with and without an adapter (vLLM 0.32.0; 0.33.0 has this mended).

vLLM loads it through the entry point `vllm.general_plugins`, in every process of an engine. install-vllm.sh declares
it.
"""


def apply() -> None:
    """Replaces the three operators, once per process. Does nothing on other platforms."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    if getattr(lora_ops, "base_rows_kept", False):
        return
    lora_ops.base_rows_kept = True
    shrink, expand, expand_slice = lora_ops.bgmv_shrink, lora_ops.bgmv_expand, lora_ops.bgmv_expand_slice

    def bgmv_shrink(inputs, weights, output, indices, scaling=1.0):
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0

    def bgmv_expand(inputs, weights, output, indices, add_inputs=True):
        expand(inputs * (indices >= 0).unsqueeze(-1), weights, output, indices, add_inputs)

    def bgmv_expand_slice(inputs, weights, output, indices, slice_offset, slice_size, add_inputs=True):
        kept = inputs * (indices >= 0).unsqueeze(-1)
        expand_slice(kept, weights, output, indices, slice_offset, slice_size, add_inputs)

    for module in (lora_ops, torch_ops, punica_cpu):
        module.bgmv_shrink, module.bgmv_expand = bgmv_shrink, bgmv_expand
        module.bgmv_expand_slice = bgmv_expand_slice
