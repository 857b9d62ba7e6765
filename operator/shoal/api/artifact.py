"""What is known of a Model's weights without reading them: the facts of one revision of a source.

A small Job reads them once per revision and leaves them in its termination message; the operator keeps them in the
Model's status. They are all that sizing and placement need, so that a restart asks no source again.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shoal.api.meta import Bytes, Count, Object, Positive

Short = Annotated[str, StringConstraints(max_length=128)]


class KVGeometry(Object):
    """What decides how many bytes one token takes in the KV cache."""

    kind: Literal["Full", "SlidingWindow", "MLA", "DSA", "Hybrid", "Unknown"]
    """Full: every layer keeps every token (multi-head and grouped-query attention). SlidingWindow: some layers keep a
    window only. MLA: one latent per token, shared by all heads. DSA: MLA with an index. Hybrid: some layers keep a
    state of fixed size (linear attention, Mamba) instead. Unknown: Shoal does not know this architecture."""
    layers: Count | None = None
    """Layers that keep something in the KV cache."""
    full_layers: Count | None = None
    """SlidingWindow and Hybrid: layers that keep every token."""
    sliding_window: Positive | None = None
    """SlidingWindow: tokens that the other layers keep."""
    kv_heads: Positive | None = None
    """Key-value heads of one layer (not of MLA)."""
    head_dim: Positive | None = None
    """Width of a key."""
    v_head_dim: Positive | None = None
    """Width of a value, where it is not that of a key."""
    kv_lora_rank: Positive | None = Field(None, alias="kvLoRARank")
    """MLA and DSA: width of the latent."""
    qk_rope_head_dim: Count | None = Field(None, alias="qkRopeHeadDim")
    """MLA and DSA: width of the positional part."""
    index_head_dim: Positive | None = None
    """DSA: width of the index of one layer."""
    index_layers: Count | None = None
    """DSA: layers with an index of their own."""
    swa_kv_heads: Positive | None = None
    """SlidingWindow: key-value heads of a layer with a window, where they are not those of the others."""
    swa_head_dim: Positive | None = None
    """SlidingWindow: width of a key of a layer with a window, where it is not that of the others."""
    swa_v_head_dim: Positive | None = None
    """SlidingWindow: width of a value of a layer with a window, where it is not that of a key."""
    dtype: Short | None = None
    """The type that the checkpoint asks for, such as fp8_e4m3; absent: the one that computations run in."""
    state_bytes_per_request: Bytes | None = None
    """Hybrid: bytes of the state of one request over all its layers; absent: not known."""


class LayerWidths(Object):
    """Widths of the linear layers that LoRA adapters change, over all GPUs of a replica. The same in every layer."""

    layers: Positive
    """Decoder layers."""
    hidden: Positive
    """Hidden size: what q_proj, k_proj, v_proj, gate_proj and up_proj read, what o_proj and down_proj write."""
    query: Positive
    """All query heads together: what q_proj writes and o_proj reads."""
    key: Positive
    """All key-value heads together: what k_proj writes, and v_proj."""
    feed_forward: Positive | None = None
    """What gate_proj and up_proj write and down_proj reads; absent: the layers have experts instead."""


class ArtifactFacts(Object):
    """The facts of one revision of a source."""

    source: Annotated[str, StringConstraints(max_length=1024)]
    """The source that the facts are of, as the Model named it; a signed URL without what follows its '?'."""
    revision: Annotated[str, StringConstraints(max_length=128)] | None = None
    """What the source was resolved to once: the commit of a hub's branch. It is what replicas fetch."""
    digest: Annotated[str, StringConstraints(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    """Digest of the manifest: names, sizes and validators of all files. Replicas refuse a source with another one."""
    architecture: Short | None = None
    """The first of `architectures` of config.json, such as LlamaForCausalLM."""
    parameters: Count | None = None
    """Parameters, counted from the tensors' shapes; absent where the weights are not safetensors."""
    weight_bytes: Bytes | None = None
    """Bytes of all tensors."""
    file_bytes: Bytes | None = None
    """Bytes of all files that a replica fetches."""
    dtype: Short | None = None
    """The type that computations run in, as the config says: bfloat16, float16, float32."""
    quantization: Short | None = None
    """How the weights are quantized, as the checkpoint says (fp8, awq, gptq, ...); absent: they are not."""
    context_length: Positive | None = None
    """The longest context that the model was made for, in tokens."""
    embedding_bytes: Bytes | None = None
    """Bytes of the embeddings and the output layer in the config's type; quantizing while loading leaves them."""
    attention_bytes: Bytes | None = None
    """Bytes of the attention layers' weights, estimated from their shapes: attention data parallelism repeats them."""
    attention_heads: Positive | None = None
    """Query heads: tensor parallelism must divide them."""
    tensor_divisor: Positive | None = None
    """Tensor parallelism must divide this too: the widths of the other layers, in blocks of the quantization."""
    expert_divisor: Positive | None = None
    """The same of the experts, for tensor parallelism divided by expert parallelism."""
    widths: LayerWidths | None = None
    """Of a decoder whose layers are all alike; absent for any other (latents, states, layers of several shapes)."""
    vocabulary: Positive | None = None
    """Size of the vocabulary."""
    experts: Positive | None = None
    """Routed experts of a mixture of experts."""
    task: Literal["Generate", "Embed"] | None = None
    """What the architecture is for: it generates text, or it embeds."""
    multimodal: bool = False
    """Whether it also reads images, sound or video."""
    vision_layers: Count | None = None
    """Layers of the vision encoder."""
    vision_width: Count | None = None
    """Hidden size of the vision encoder."""
    chat_template: bool | None = None
    """Whether the tokenizer brings a chat template. Without one SGLang puts chat messages together in a way of its own,
    which the model was not trained on."""
    kv: KVGeometry = KVGeometry(kind="Unknown", kvLoRARank=None, qkRopeHeadDim=None)
    """What decides the size of the KV cache."""
    kv_bytes_per_token: Bytes | None = None
    """KV cache of one token over all layers in the config's type, on one GPU; absent: not known."""
    read_by: Annotated[str, StringConstraints(max_length=63)] | None = None
    """Name of the Job that read them, which is made of `spec.source`: another source has another one."""
