"""An engine on a real GPU beside what sizing predicts of it: memory, KV cache, stages of a start, speeds.

python -m tests.bench.bench_gpu [--cases llama-3-1-8b,llama-3-1-8b/fp8] [--vllm PATH] [--out FOLDER]

Needs an NVIDIA GPU and an installed vLLM; without them it says so and ends. The weights are random (nothing is
downloaded), so the speeds are those of the shapes, and answers mean nothing. Each case starts one engine with the
arguments that Shoal gives it, waits until it is ready, asks it, and stops it.
"""

import argparse
import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model, Sizing
from shoal.core.sizing import GPU, Sized, size
from shoal.engine.port import EngineLaunch
from shoal.engine.vllm.launch import engine_args, environment
from shoal.engine.vllm.tuning import tuning_of

GI, MI = 2**30, 2**20
_CATALOGUE: Final = Path(__file__).resolve().parents[2] / "examples" / "catalogue"
_QWEN: dict[str, Any] = {"tie_word_embeddings": True, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
_COMMON: dict[str, Any] = {"torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: Final[Mapping[str, dict[str, Any]]] = {
    "llama-3-1-8b": _COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    },
    "qwen2-5-0-5b": _COMMON | _QWEN | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24, "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "qwen3-30b-a3b": _COMMON | _QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "num_attention_heads": 32, "num_key_value_heads": 4,
        "num_hidden_layers": 48, "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
}  # fmt: skip
CASES: Final = ("llama-3-1-8b", "qwen2-5-0-5b", "llama-3-1-8b/fp8", "llama-3-1-8b/lora", "qwen3-30b-a3b")
_PREFILLS: Final = (512, 2048, 8192, 30000)
_BATCHES: Final = (1, 4, 16, 64, 128, 256)
_CONTEXT: Final = 1024
_STEPS: Final = 128
_START_SECONDS: Final = 600.0
_SAID: Final = {
    # Without a GiB after the number, seconds.
    "free at the start": r"worker init memory snapshot: .*?free_memory=([\d.]+)GiB",
    "weights": r"Model loading took ([\d.]+) GiB",
    "weights loaded": r"Model loading took [\d.]+ GiB memory and ([\d.]+) seconds",
    "files read": r"Loading weights took ([\d.]+) seconds",
    "compiled": r"torch\.compile took ([\d.]+) s in total",
    "first batch": r"Initial profiling/warmup run took ([\d.]+) s",
    "consumed": r"total consumed \(from mem_get_info\): ([\d.]+)GiB",
    "not KV": r"Total non KV cache memory: ([\d.]+)GiB",
    "graphs estimated": r"CUDA graph pool memory: .*?, ([\d.]+) GiB \(estimated\)",
    "KV cache": r"Available KV cache memory: ([\d.]+) GiB",
    "KV tokens": r"KV cache size: ([\d,]+) tokens",
    "graphs captured": r"Graph capturing finished in ([\d.]+) secs",
    "graphs": r"Graph capturing finished in [\d.]+ secs, took (-?[\d.]+) GiB",
    "engine initialised": r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s",
}
"""What the engine's log says (with VLLM_LOGGING_LEVEL=DEBUG), by our name of it."""


@dataclass(slots=True)
class Measured:
    """What one engine showed."""

    log: str = ""
    said: dict[str, float] = field(default_factory=dict[str, float])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds after the start of the process."""
    used_mib: int = 0
    peak_mib: int = 0
    prefill: dict[int, float] = field(default_factory=dict[int, float])
    """Tokens of a prompt -> seconds to its first token, alone."""
    prefill_rate: float = 0.0
    """Tokens a second of eight prompts of 8192 tokens at once."""
    decode: dict[int, float] = field(default_factory=dict[int, float])
    """Requests at once -> seconds of one step."""
    metrics: str = ""


def nvidia(what: str) -> list[str]:
    """What nvidia-smi says of the first GPU. Raises FileNotFoundError without it, CalledProcessError without a GPU."""
    told = subprocess.run(
        ["nvidia-smi", "--id=0", f"--query-gpu={what}", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return [word.strip() for word in told.stdout.strip().split(",")]


class Watch:
    """The most memory in use on the GPU while it runs."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            self.peak = max(self.peak, int(nvidia("memory.used")[0]))


def folder_of(config: dict[str, Any], folder: Path) -> Path:
    """A model without weights: a config, and a tokenizer with as many words as the model has."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"w{number}": number for number in range(config["vocab_size"])}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )
    return folder


def launch_of(case: str, path: Path, port: int) -> tuple[EngineLaunch, ArtifactFacts]:
    """The engine of a case as the operator would start it."""
    name, _, variant = case.partition("/")
    document = yaml.safe_load((_CATALOGUE / f"{name}.yaml").read_text())
    facts = ArtifactFacts.model_validate(document["status"]["artifact"])
    document.pop("status")
    document["metadata"]["namespace"] = "bench"
    document["spec"]["engine"] = {"type": "vLLM", "contextLength": 32768}
    if variant == "fp8":
        document["spec"]["engine"]["quantization"] = {"weights": "FP8"}
    pool = None
    if variant == "lora":
        pool = LoRAPool.model_validate({
            "metadata": {"name": "pool", "namespace": "bench"}, "spec": {"modelRef": {"name": name}},
        })  # fmt: skip
    model = Model.model_validate(document)
    launch = EngineLaunch(
        model, "0.32.0", str(path), port, 1, facts=facts, pool=pool, host="127.0.0.1",
    )  # fmt: skip
    return launch, facts


def predicted(launch: EngineLaunch, facts: ArtifactFacts, memory_mib: int, capability: str) -> Sized:
    """What sizing says of it. Raises RuntimeError where it does not fit."""
    major, _, minor = capability.partition(".")
    gpu = GPU("this", memory_mib * MI, compute_capability=(int(major), int(minor)))
    found = size(
        facts, gpu, tensor=1, context_length=32768, overrides=Sizing(),
        tuning=tuning_of(engine_args(launch)[1:], facts=facts),
    )  # fmt: skip
    if not isinstance(found, Sized):
        raise RuntimeError(found.why)
    return found


def measure(command: Sequence[str], launch: EngineLaunch, log: Path, *, speeds: bool, dummy: bool) -> Measured:
    """Starts the engine, asks it, and stops it. Raises RuntimeError with the end of its log where it does not start."""
    args = list(engine_args(launch))
    keys = args.index("--config")
    del args[keys : keys + 2]
    if dummy:
        args.append("--load-format=dummy")
    env = os.environ | environment(pool=launch.pool is not None)
    env |= {"VLLM_LOGGING_LEVEL": "DEBUG", "PYTHONUNBUFFERED": "1", "HOME": os.environ.get("HOME", "/tmp")}
    print("   ", " ".join(args), flush=True)
    result = Measured()
    with Watch() as watch, log.open("wb") as file:
        start = time.monotonic()
        process = subprocess.Popen(
            [*command, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        reader = threading.Thread(target=_keep, args=(process, file, start), daemon=True)
        reader.start()
        try:
            asyncio.run(_ask(f"http://127.0.0.1:{launch.port}", launch, process, start, result, speeds))
        except Exception as error:
            result.seconds["failed"] = time.monotonic() - start
            print(f"    failed: {error!r}", flush=True)
        finally:
            stopping = time.monotonic()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)
            result.seconds["stopped in"] = time.monotonic() - stopping
            reader.join(5)
    result.peak_mib = watch.peak
    result.log = log.read_text(errors="replace")
    for name, pattern in _SAID.items():
        if found := re.findall(pattern, result.log):
            result.said[name] = float(found[-1].replace(",", ""))
    return result


def _keep(process: "subprocess.Popen[bytes]", file: Any, start: float) -> None:
    """Writes the engine's log with the seconds since its start before each line."""
    if process.stdout is None:
        return
    for line in process.stdout:
        file.write(b"%8.2f " % (time.monotonic() - start) + line)
        file.flush()


async def _ask(
    url: str, launch: EngineLaunch, process: "subprocess.Popen[bytes]", start: float, result: Measured, speeds: bool
) -> None:
    rng = random.Random(7)  # noqa: S311 - prompts, not secrets
    vocabulary = launch.facts.vocabulary if launch.facts and launch.facts.vocabulary else 32000

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, vocabulary) for _ in range(length)]

    limits = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def complete(tokens: list[int], more: int) -> float:
            begun = time.monotonic()
            body = {
                "model": launch.model.engine_model_name, "prompt": tokens, "max_tokens": more, "ignore_eos": True,
                "temperature": 0.0,
            }  # fmt: skip
            async with session.post("/v1/completions", json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise RuntimeError(text[:500])
            return time.monotonic() - begun

        async def metrics() -> str:
            async with session.get("/metrics") as response:
                return await response.text()

        while True:
            if process.poll() is not None or time.monotonic() - start > _START_SECONDS:
                raise RuntimeError("the engine did not start")
            try:
                async with session.get("/health") as response:
                    if response.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
        result.seconds["ready"] = time.monotonic() - start
        result.used_mib = int(nvidia("memory.used")[0])
        result.seconds["first answer takes"] = await complete(prompt(100), 1)
        result.seconds["second answer takes"] = await complete(prompt(100), 1)
        if speeds:
            for length in _PREFILLS:
                await complete(prompt(length), 1)
                result.prefill[length] = min([await complete(prompt(length), 1) for _ in range(3)])
            begun = time.monotonic()
            await asyncio.gather(*(complete(prompt(8192), 1) for _ in range(8)))
            result.prefill_rate = 8 * 8192 / (time.monotonic() - begun)
            for batch in _BATCHES:
                prompts = [prompt(_CONTEXT) for _ in range(batch)]
                # So that what is timed finds its prompt in the cache, and only decodes.
                await asyncio.gather(*(complete(tokens, 1) for tokens in prompts))
                before = _decoded(await metrics())
                await asyncio.gather(*(complete(tokens, _STEPS) for tokens in prompts))
                after = _decoded(await metrics())
                result.decode[batch] = (after[0] - before[0]) / max(1.0, after[1] - before[1])
        result.metrics = await metrics()


def _decoded(text: str) -> tuple[float, float]:
    """Seconds and number of the steps that the engine's own histogram has counted."""
    name = "vllm:inter_token_latency_seconds"
    return _metric(text, f"{name}_sum"), _metric(text, f"{name}_count")


def _metric(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))


def show(case: str, sized: Sized, result: Measured) -> None:
    """Predicted beside measured."""
    parts, said = sized.breakdown, result.said
    none = float("nan")
    got = said.get
    rows = [
        ("missing at the start, GiB", parts.overhead / GI, parts.memory / GI - got("free at the start", none)),
        ("weights and slots, GiB", (parts.weights + parts.adapters) / GI, got("weights", none)),
        ("activations and buffers, GiB", parts.activations / GI, got("not KV", none) - got("weights", none)),
        ("graphs, GiB", parts.graphs / GI, got("graphs estimated", none)),
        ("graphs as captured, GiB", parts.graphs / GI, got("graphs", none)),
        ("KV cache, GiB", parts.kv / GI, got("KV cache", none)),
        ("KV tokens", float(sized.kv_tokens or 0), got("KV tokens", none)),
    ]
    print(f"  {case}: {'':22} {'predicted':>11} {'measured':>11} {'ratio':>7}")
    for name, ours, theirs in rows:
        print(f"    {name:32} {ours:11,.2f} {theirs:11,.2f} {ours / theirs if theirs else none:7.3f}")
    print(f"    nvidia-smi: {result.used_mib} MiB when ready, {result.peak_mib} at most")
    print("    seconds:", ", ".join(f"{name} {value:.2f}" for name, value in result.seconds.items()))
    named = ("files read", "weights loaded", "compiled", "first batch", "graphs captured", "engine initialised")
    print("    of the log:", ", ".join(f"{name} {said[name]:.2f} s" for name in named if name in said))
    if result.prefill:
        alone = ", ".join(f"{n}: {1000 * s:.1f} ms ({n / s:,.0f}/s)" for n, s in result.prefill.items())
        print(f"    prefill alone: {alone}; eight of 8192 at once: {result.prefill_rate:,.0f} tokens/s")
        print("    a decode step:", ", ".join(f"{n} requests {1000 * s:.2f} ms" for n, s in result.decode.items()))
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--vllm", default=shutil.which("vllm"), help="the engine's launcher; default: in PATH")
    parser.add_argument("--out", type=Path, help="folder for logs and metrics")
    parser.add_argument("--checkpoints", type=Path, help="folder with weights for cases, by name; otherwise random")
    parser.add_argument("--port", type=int, default=18000)
    parser.add_argument("--no-speeds", action="store_true", help="memory and stages only")
    options = parser.parse_args()
    try:
        name, memory, capability = nvidia("name,memory.total,compute_cap")
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"left out: this machine shows no NVIDIA GPU ({error})")
        return 0
    if options.vllm is None:
        print("left out: no vLLM in PATH, and none named with --vllm")
        return 0
    print(f"{name}, {memory} MiB, compute capability {capability}, {nvidia('memory.used')[0]} MiB in use before")
    with tempfile.TemporaryDirectory(prefix="shoal-gpu-") as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        for number, case in enumerate(options.cases.split(",")):
            base, slug = case.partition("/")[0], case.replace("/", "-")
            own = options.checkpoints / base if options.checkpoints else None
            dummy = own is None or not own.is_dir()
            folder = folder_of(CONFIGS[base], Path(scratch) / base if own is None or dummy else own)
            launch, facts = launch_of(case, folder, options.port + number)
            sized = predicted(launch, facts, int(memory), capability)
            result = measure(
                [options.vllm, "serve"], launch, out / f"{slug}.log", speeds=not options.no_speeds, dummy=dummy
            )
            (out / f"{slug}.metrics").write_text(result.metrics)
            show(case, sized, result)
            if "failed" in result.seconds:
                print(result.log[-4000:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
