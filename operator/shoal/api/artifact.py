"""Facts of a Model's weights: what one revision of a source says without its weights being read.

A small Job reads the facts once per revision and writes them to its termination message. The operator stores them in
the Model's status, so a restart does not read the source again. Sizing and placement need nothing else.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from shoal.api.meta import Bytes, Count, Object, Positive

Short = Annotated[str, StringConstraints(max_length=128)]


class KVGeometry(Object):
    """What determines the size of one token in the KV cache."""

    kind: Literal["Full", "SlidingWindow", "MLA", "DSA", "Hybrid", "Unknown"]
    """How attention layers cache tokens. Full: every layer keeps every token (multi-head and grouped-query attention).
    SlidingWindow: some layers keep only a window of tokens. MLA: one latent vector per token, shared by all heads. DSA:
    MLA with an index. Hybrid: some layers keep a state of fixed size instead (linear attention, Mamba). Unknown: Shoal
    does not know this architecture."""
    layers: Count | None = None
    """Layers that use the KV cache."""
    full_layers: Count | None = None
    """SlidingWindow and Hybrid: layers that keep every token."""
    sliding_window: Positive | None = None
    """SlidingWindow: tokens that each of the other layers keeps."""
    kv_heads: Positive | None = None
    """Key-value heads of one layer (not used with MLA)."""
    head_dim: Positive | None = None
    """Width of a key."""
    v_head_dim: Positive | None = None
    """Width of a value, where it differs from the width of a key."""
    kv_lora_rank: Positive | None = Field(None, alias="kvLoRARank")
    """MLA and DSA: width of the latent."""
    qk_rope_head_dim: Count | None = Field(None, alias="qkRopeHeadDim")
    """MLA and DSA: width of the positional part."""
    index_head_dim: Positive | None = None
    """DSA: width of the index of one layer."""
    index_layers: Count | None = None
    """DSA: layers that have an index."""
    swa_kv_heads: Positive | None = None
    """SlidingWindow: key-value heads of a layer with a window, where their number differs from that of other layers."""
    swa_head_dim: Positive | None = None
    """SlidingWindow: width of a key of a layer with a window, where it differs from that of other layers."""
    swa_v_head_dim: Positive | None = None
    """SlidingWindow: width of a value of a layer with a window, where it differs from the width of a key."""
    dtype: Short | None = None
    """KV cache type that the checkpoint asks for, such as fp8_e4m3. Default: the compute type."""
    state_bytes_per_request: Bytes | None = None
    """Hybrid: size of one request's state over all layers, in bytes; absent: unknown."""


class LayerWidths(Object):
    """Widths of the linear layers that LoRA adapters change, over all GPUs of a replica. They are the same in every
    layer."""

    layers: Positive
    """Decoder layers."""
    hidden: Positive
    """Hidden size: input width of q_proj, k_proj, v_proj, gate_proj and up_proj, output width of o_proj and
    down_proj."""
    query: Positive
    """Width of all query heads: output width of q_proj, input width of o_proj."""
    key: Positive
    """Width of all key-value heads: output width of k_proj and of v_proj."""
    feed_forward: Positive | None = None
    """Output width of gate_proj and up_proj, input width of down_proj; absent: the layers have experts instead."""


class ArtifactFacts(Object):
    """The facts of one revision of a source."""

    source: Annotated[str, StringConstraints(max_length=1024)]
    """Source URI as written in the Model. The query string of a signed URL is left out."""
    revision: Annotated[str, StringConstraints(max_length=128)] | None = None
    """Immutable revision that the source was resolved to, such as the commit of a branch on the hub. Replicas fetch
    this revision."""
    digest: Annotated[str, StringConstraints(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    """Digest of the manifest: names, sizes and validators of all files. Replicas refuse a source whose manifest
    differs."""
    architecture: Short | None = None
    """First entry of `architectures` in config.json, such as LlamaForCausalLM."""
    parameters: Count | None = None
    """Number of parameters, counted from the shapes of the tensors; absent where the weights are not safetensors."""
    weight_bytes: Bytes | None = None
    """Size of all tensors in bytes."""
    file_bytes: Bytes | None = None
    """Size of all files that a replica fetches, in bytes."""
    dtype: Short | None = None
    """Compute type according to the config: bfloat16, float16 or float32."""
    quantization: Short | None = None
    """Quantization of the checkpoint (fp8, awq, gptq, ...); absent: the weights are not quantized."""
    context_length: Positive | None = None
    """Longest context that the model supports, in tokens."""
    embedding_bytes: Bytes | None = None
    """Size of the embeddings and the output layer in the compute type, in bytes. Quantization at load time does not
    change these layers."""
    attention_bytes: Bytes | None = None
    """Size of the weights of the attention layers in bytes, estimated from their shapes. Data-parallel attention
    replicates them."""
    attention_heads: Positive | None = None
    """Number of query heads. It must be divisible by the tensor parallelism."""
    tensor_divisor: Positive | None = None
    """Common divisor of the widths of the other layers, in blocks of the quantization. It must be divisible by the
    tensor parallelism."""
    expert_divisor: Positive | None = None
    """The same for the experts. It must be divisible by the tensor parallelism divided by the expert parallelism."""
    widths: LayerWidths | None = None
    """Layer widths of a decoder whose layers are all alike; absent for every other architecture (latent vectors,
    states, layers of several shapes)."""
    vocabulary: Positive | None = None
    """Size of the vocabulary."""
    mtp_layers: Count | None = None
    """Layers for multi-token prediction; absent: unknown."""
    experts: Positive | None = None
    """Routed experts of a mixture-of-experts model."""
    task: Literal["Generate", "Embed"] | None = None
    """Task of the architecture: Generate produces text, Embed produces embeddings, scores or labels."""
    labels: Positive | None = None
    """Number of labels of an architecture that classifies sequences. With one label it is a reranker. Absent for every
    other architecture."""
    multimodal: bool = False
    """Whether the model also takes images, audio or video, in SGLang and without arguments. What the Model's own engine
    does is in `status.capabilities`."""
    vision_layers: Count | None = None
    """Layers of the vision encoder."""
    vision_width: Count | None = None
    """Hidden size of the vision encoder."""
    chat_template: bool | None = None
    """Whether the tokenizer includes a chat template. Without a template SGLang concatenates chat messages in a default
    format that the model was not trained on."""
    kv: KVGeometry = KVGeometry(kind="Unknown", kvLoRARank=None, qkRopeHeadDim=None)
    """What determines the size of the KV cache."""
    kv_bytes_per_token: Bytes | None = None
    """Size of one token in the KV cache of one GPU, over all layers and in the compute type, in bytes; absent:
    unknown."""
    read_by: Annotated[str, StringConstraints(max_length=63)] | None = None
    """Name of the Job that read these facts. The name is derived from `spec.source`, so another source has another
    Job."""
