"""What a message says about its cause. Engines, kubelets, the scheduler and the API server write them; no field of the
API says the same.

Only known phrases count. A message without one keeps the reason that it came with.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shoal.api import reasons
from shoal.core.layers import faults, xids

LONGEST: Final = 8192
"""Characters of a message that are read, from its end: an engine's last lines say why."""
_LONGEST_QUOTE: Final = 300


@dataclass(frozen=True, slots=True)
class Phrase:
    """A known phrase in a message."""

    reason: str
    quote: str
    """The line that it is in."""
    meaning: str = ""
    """What a number in it means."""

    @property
    def explained(self) -> str:
        """The line, with the meaning."""
        return f"{self.quote} ({self.meaning})" if self.meaning else self.quote


def _all(*pairs: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern, re.IGNORECASE), reason) for pattern, reason in pairs)


_GPU: Final = _all(
    (r"uncorrectable ecc|double[- ]bit (ecc )?error|uncorrectable memory error|cudaerroreccuncorrectable"
     r"|row[- ]remap.{0,40}fail", faults.GPU_ECC_ERROR),
    (r"fallen off the bus|gpu is lost|gpu has been lost|CUDA_ERROR_DEVICE_UNAVAILABLE"
     r"|unable to determine the device handle", faults.GPU_LOST),
    (r"gpu requires reset|thermal (violation|slowdown)|hw (thermal )?slowdown|power brake", faults.GPU_UNHEALTHY),
    (r"nvlink (error|fault|down|status inactive)|uncorrectable nvlink|system not yet initialized"
     r"|CUDA_ERROR_SYSTEM_NOT_READY|nvswitch (fatal|error)|fabric ?manager|\bimex\b", faults.NVLINK_FAULT),
    (r"\bibv_[a-z_]{1,40}\b.{0,80}(failed|error)|net/ib\b.{0,120}(error|failed|async|timeout|vendor err)"
     r"|infiniband.{0,80}(down|error)|\bIBV_WC_[A-Z_]{1,40}|peer access is not supported|nvidia_peermem"
     r"|(nccl|gloo|socketpollconnect).{0,400}(no route to host|network is unreachable|no socket interface found)",
     faults.FABRIC_FAILED),
    (r"cuda driver version is insufficient|forward compatibility was attempted|driver on your system is too old"
     r"|ptx was compiled with an unsupported toolchain"
     r"|unsatisfied condition: (cuda|driver)", faults.DRIVER_TOO_OLD),
    (r"driver/library version mismatch|gsp (rpc )?timeout|timeout waiting for rpc from gsp", faults.DRIVER_FAULT),
    (r"(unresolvable|inject).{0,80}\bcdi devices?", faults.DEVICE_SPEC_MISSING),
    (r"nvidia-container-cli: device error: .{0,200}unknown device", faults.DEVICE_ALLOCATION),
    (r"no cuda-capable device|found no nvidia driver|nvml_error_|failed to initialize nvml"
     r"|nvidia-container-cli|libcuda\.so(\.1)?: cannot open|no cuda gpus are available"
     r"|no nvidia gpu (device )?(is )?(present|found)|no hip gpus are available|failed to infer device type"
     r"|no runtime for \"?(nvidia|amd)[\w-]{0,40}\"? is configured", faults.DRIVER_MISSING),
)  # fmt: skip
"""L0 to L1, the most upstream first."""
NO_NAME_SERVER: Final = r"temporary failure in name resolution|no name server answer"
"""A name server that answers says that there is no such name, in other words."""
_ENGINE: Final = _all(
    (r"safetensorerror|error while deserializing header|headertoo(large|small)|metadataincompletebuffer"
     r"|invalid load key|unexpected eof.{0,40}\.(bin|safetensors|gguf)|corrupt(ed)? (file|checkpoint|weights)"
     r"|pytorchstreamreader failed|not a valid json file|could not parse modelproto", faults.WEIGHTS_CORRUPT),
    (r"does not appear to have a file named|no such file or directory: .{0,200}\.(safetensors|bin|json)"
     r"|cannot find any model weights|cannot find the (weights|tokenizer)|can't load tokenizer"
     r"|couldn't instantiate the backend tokenizer",
     faults.WEIGHTS_INCOMPLETE),
    (NO_NAME_SERVER, faults.NAMES_UNRESOLVED),
    (r"access a gated repo|(401|403) client error.{0,200}(huggingface|/resolve/)", reasons.GATED),
    (r"\b(repository|revision|entry)notfounderror|404 client error.{0,200}(huggingface|/resolve/)",
     reasons.SOURCE_NOT_FOUND),
    (r"couldn't connect to .{0,60}huggingface|localentrynotfounderror|offlinemodeisenabled",
     reasons.SOURCE_UNREACHABLE),
    (r"size mismatch for|weights? .{0,80}not (found in|initialized from) (the )?checkpoint"
     r"|keyerror: '(model|transformer|lm_head)\.|shape mismatch.{0,80}weight"
     r"|there is no module or parameter named|keyerror: '[\w.]{0,200}(_proj|weight|_scale|layers\.\d+)[\w.]{0,80}'",
     faults.WEIGHTS_MISMATCH),
    (r"lora rank.{0,40}(greater|larger|exceeds)|\brank (of )?\d.{0,60}max[_-]lora[_-]rank", reasons.RANK_TOO_HIGH),
    (r"target modules?.{0,200}(not supported|not in\b|but received)|expected target modules",
     reasons.MODULES_NOT_IN_POOL),
    (r"no kernel image is available|sm_?\d{1,4} is not (supported|compatible)"
     r"|compute capability.{0,80}(required|at least|>=)|hiperrornobinaryforgpu|invalid device function"
     r"|device kernel image is invalid|out of resources?: shared memory",
     faults.NO_KERNEL),
    (r"device\(?s?\)? (is/are|are|is) busy or unavailable|gpus? .{0,60}occupied by other processes"
     r"|free memory on device.{0,200}less than desired", faults.GPU_IN_USE),
    (r"no available memory for the cache blocks|not enough memory\b.{0,80}increase.{0,20}mem-fraction"
     r"|loading the model weights.{0,80}not enough", faults.NO_CACHE_MEMORY),
    (r"cuda out of memory|outofmemoryerror|cuda_error_out_of_memory|hip out of memory|not enough memory\b"
     r"|cudaerrormemoryallocation|cublas_status_alloc_failed", faults.OUT_OF_GPU_MEMORY),
    (r"invalid device ordinal|(parallel|world) size.{0,80}(number of |available |local )gpus"
     r"|less than max local gpu count|duplicate gpu detected|required gpus exceeds", faults.PARALLELISM),
    (r"nccl (error|warn)|ncclsystemerror|ncclunhandledcudaerror|ncclinternalerror|watchdog caught collective"
     r"|processgroupnccl.{0,80}(timeout|abort)"
     r"|diststoreerror|distnetworkerror|\btcpstore\b", faults.NCCL_ERROR),
    (r"cuda error|illegal memory access|device-side assert|unspecified launch failure|\bcudaerror[a-z]|\bcublas_status_"
     r"|hip error", faults.CUDA_ERROR),
    (r"cannot allocate memory|\bmemoryerror\b|std::bad_alloc", faults.OUT_OF_MEMORY),
    (r"no space left on device|\bbus error\b|unable to (open|allocate) shared memory", faults.NO_SPACE),
    (r"modulenotfounderror|importerror: |error while loading shared libraries|undefined symbol"
     r"|could not find nvcc|ninja is required|not compiled with cuda enabled"
     r"|no such file or directory: '(nvcc|gcc|ninja|ptxas)'",
     faults.IMAGE_INCOMPLETE),
    (r"\[errno 13\]|permissionerror|\[errno 30\]|read-only file system", faults.PATH_REFUSED),
    (r"too many open files|can't start new thread|pthread_create failed|inotify.{0,60}(limit|no space)"
     r"|memlock.{0,60}limit", faults.PROCESS_LIMIT),
    (r"trust[-_]remote[-_]code", faults.REMOTE_CODE),
    (r"(not|be) divisible by|cannot be divided (by|into)", faults.PARALLELISM),
    (r"quantiz\w{1,8}.{0,120}(not supported|unsupported|does not match|unknown)|unknown quantiz", faults.QUANTIZATION),
    (r"chat[_ -]?template.{0,160}(not a|not found|invalid|no such|does not|failed|error|syntax)"
     r"|jinja2\.exceptions\.\w{1,40}|(invalid|unknown|failed to load).{0,40}chat[_ -]?template", faults.CHAT_TEMPLATE),
    (r"address already in use|errno 98\b", faults.PORT_TAKEN),
    (r"(unknown|invalid|unsupported|unrecognized) (tool[-_ ]?call(ing)?|reasoning)[-_ ]?parser"
     r"|(tool[-_ ]?call|reasoning)[-_ ]?parser.{0,120}(not (found|supported|registered)|invalid|unknown)"
     r"|unrecognized arguments|error: argument |invalid choice: |no such option"
     r"|max_num_batched_tokens .{0,80}is smaller than|draft model path must be", faults.ENGINE_ARGUMENTS),
    (r"model architectures? .{0,120}(not supported|are not supported)|unsupported architecture"
     r"|unrecognized (model|configuration class|processing class)\b|untagged enum modelwrapper"
     r"|'\w{1,64}config' object has no attribute|rope_scaling.{0,40}must (be|have)"
     r"|does not recognize this architecture|tokenizer class .{0,80}(does not exist|not currently imported)",
     faults.ARCHITECTURE_UNKNOWN),
    (r"max(imum)?[ _-](seq|model)[ _-]len.{0,160}(larger|greater|longer)|context.length.{0,80}(greater|longer|exceeds)",
     faults.CONTEXT_TOO_LONG),
)  # fmt: skip
"""L2.5 to L4. A driver's failure often shows as a CUDA error too, so these come after `_GPU`."""
_MACHINE: Final = _all(
    (r"\[hardware error\].{0,200}(uncorrect|fatal|uncorrectable)|uncorrected .{0,40}(dram|memory)|edac .{0,80}\bUE\b",
     faults.MACHINE_FAULT),
)  # fmt: skip
_OWN_LIMIT: Final = re.compile(r"exceed(s|ed) (the|its) (total |local |ephemeral |storage ){0,4}limit", re.IGNORECASE)
_LIMITED: Final = r"toomanyrequests|too many requests|pull rate limit"
_CERTIFICATE: Final = r"x509:|certificate (is not trusted|has expired|signed by unknown|verify failed)"
_SOURCE: Final = _all(
    (NO_NAME_SERVER, faults.NAMES_UNRESOLVED),
    (rf"{_LIMITED}|answer(s|ed) 429\b", faults.SOURCE_LIMITED),
    (rf"{_CERTIFICATE}|the certificate of .{{1,300}} is not trusted", faults.SOURCE_CERTIFICATE),
    (r"answer(s|ed) 5\d\d\b", faults.SOURCE_ERRORS),
)
_PULL: Final = _all(
    (_LIMITED, faults.IMAGE_LIMITED),
    (r"no match(ing manifest)? for (platform|linux/)", faults.WRONG_ARCHITECTURE),
    (r"no space left on device", faults.DISK_PRESSURE),
    (r"unauthorized|denied|authentication required|no basic auth|403 forbidden", faults.IMAGE_DENIED),
    (_CERTIFICATE, faults.REGISTRY_CERTIFICATE),
    (r"manifest unknown|name unknown|no such repository|not found|does not exist|invalidimagename"
     r"|couldn't parse image", faults.IMAGE_NOT_FOUND),
    (r"no such host|i/o timeout|connection refused|deadline exceeded|dial tcp|network is unreachable|tls handshake"
     r"|5\d\d (internal|bad gateway|service unavailable)", faults.REGISTRY_UNREACHABLE),
)  # fmt: skip
_SETUP: Final = _all(
    (r"exec format error", faults.WRONG_ARCHITECTURE),
    (
        r"subpath|error mounting|mkdir(at)? .{1,300}: (read-only file system|permission denied|not a directory)",
        faults.MOUNT_FAILED,
    ),
    (
        r"executable file not found|stat .{1,200}: no such file or directory|exec: .{1,200}: (no such|not found)",
        faults.IMAGE_INCOMPLETE,
    ),
    (r"runasnonroot and image", faults.RUNS_AS_ROOT),
    (
        r"(secret|configmap) \"?[\w.-]{1,253}\"? not found|couldn't find key"
        r"|(seccomp|apparmor).{0,200}(profile|not found|no such file)",
        faults.CONTAINER_CONFIG,
    ),
    (r"no runtime for .{1,80} is configured", faults.OBJECT_MISSING),
    (r"dynamic resources|dra driver", faults.DEVICE_ALLOCATION),
    (r"failed to (create|setup|set up) .{0,40}sandbox|network plugin|cni", faults.SANDBOX_FAILED),
    (r"mountvolume|unable to attach or mount", faults.MOUNT_FAILED),
)
_MOUNT: Final = _all(
    (r"multi-attach", faults.VOLUME_ELSEWHERE),
    (
        r"(secret|configmap) \"?[\w./-]{1,400}\"? not found|references non-existent (secret|config) key"
        r"|object \"[^\"]{1,400}\"/\"[^\"]{1,400}\" not registered",
        faults.CONTAINER_CONFIG,
    ),
    (r"no space left on device", faults.DISK_PRESSURE),
    (r"name or service not known|failed to resolve|no such host", faults.NAMES_UNRESOLVED),
    (r"persistentvolumeclaim .{1,400} not found", faults.VOLUME_MISSING),
)
_ENDED: Final = _all(
    (r"ended with exit code \d{1,3} \(\d{1,6} restarts?\): oomkilled", faults.OUT_OF_MEMORY),
    (r"ended with exit code 127\b", faults.IMAGE_INCOMPLETE),
    (r"ended with exit code (134|136|139)\b", faults.ENGINE_CRASHED),
    (r"ended with exit code (137|143)\b", faults.ENGINE_STOPPED),
)
"""How a Model's condition tells of its engine's end (`core/status/diagnosis.py`)."""
_ADMISSION: Final = _all(
    (r"exceeded quota|failed quota", reasons.RESOURCE_QUOTA),
    (r"(maximum|minimum) [\w./-]{1,80} usage per (container|pod)"
     r"|per (container|pod) is .{0,40}, but (limit|request)", reasons.LIMIT_RANGE),
    (r"violates podsecurity", faults.POD_SECURITY),
    (r"error looking up service ?account|no priorityclass with name|runtimeclass .{0,300}not found",
     faults.OBJECT_MISSING),
    (r"because it is being terminated", faults.NAMESPACE_ENDS),
    (r"failed calling webhook.{0,600}(x509:|certificate)", faults.WEBHOOK_CERTIFICATE),
    (r"failed calling webhook", faults.WEBHOOK_UNREACHABLE),
    (r"admission webhook .{0,253} denied|denied by|validatingadmissionpolicy", faults.WEBHOOK_REFUSED),
    (r"is forbidden: user .{0,253} cannot|cannot (get|list|watch|create|update|patch|delete) resource",
     faults.PERMISSION_MISSING),
)  # fmt: skip
_NOT_SET_UP: Final = r"/uninitialized|agent-not-ready"
_LEAVES: Final = (
    r"(tobedeleted|deletioncandidate)\w{0,40}autoscaler|karpenter\.sh/disrupted|out-of-service|impending|termination"
)
_TAINTS: Final = _all((_NOT_SET_UP, faults.NODE_NOT_SET_UP), (_LEAVES, faults.NODE_LEAVES))
"""Taints that autoscalers, clouds and agents set, by what they say."""
_EVICTIONS: Final = _all(
    (r"\bpids\b|pidpressure", faults.PID_PRESSURE),
    (r"inodes|diskpressure|imagefs|nodefs", faults.DISK_PRESSURE),
    (r"memorypressure", faults.MEMORY_PRESSURE),
)
_SCHEDULER: Final = _all(
    (r"volume node affinity|no available persistent volumes to bind", faults.VOLUME_ELSEWHERE),
    (r"unbound immediate", faults.VOLUME_UNBOUND),
    (r"persistentvolumeclaim", faults.VOLUME_MISSING),
    (r"insufficient [\w.-]{1,253}/[\w.-]|cannot allocate all claims", faults.TOO_FEW_GPUS),
    (r"insufficient (cpu|memory|ephemeral-storage|hugepages|pods)|too many pods", faults.TOO_FEW_RESOURCES),
    # Taints that Kubernetes and health agents set say more than that nobody tolerates them.
    (r"untolerated taint\(?s?\)? \{node\.kubernetes\.io/unreachable", faults.NODE_SILENT),
    (r"untolerated taint\(?s?\)? \{node\.kubernetes\.io/not-ready", faults.NODE_NOT_READY),
    (r"untolerated taint\(?s?\)? \{node\.kubernetes\.io/disk-pressure", faults.DISK_PRESSURE),
    (r"untolerated taint\(?s?\)? \{node\.kubernetes\.io/memory-pressure", faults.MEMORY_PRESSURE),
    (r"untolerated taint\(?s?\)? \{node\.kubernetes\.io/network-unavailable", faults.NETWORK_UNAVAILABLE),
    (r"untolerated taint\(?s?\)? \{node\.kubernetes\.io/pid-pressure", faults.PID_PRESSURE),
    (r"untolerated taint\(?s?\)? \{node\.kubernetes\.io/unschedulable", faults.NODE_CORDONED),
    (rf"untolerated taint\(?s?\)? \{{[^}}]{{0,200}}({_NOT_SET_UP})", faults.NODE_NOT_SET_UP),
    (rf"untolerated taint\(?s?\)? \{{[^}}]{{0,200}}({_LEAVES})", faults.NODE_LEAVES),
    (r"untolerated taint\(?s?\)? \{[^}]{0,200}(unhealthy|xid|ecc-|degraded)", faults.GPU_UNHEALTHY),
    (r"untolerated taint", faults.TAINT),
    (
        r"topology spread constraints|pod (anti-)?affinity|existing pods? anti-affinity|free ports for the requested",
        faults.POD_RULES,
    ),
    (r"didn't match pod's node affinity|node selector", faults.AFFINITY),
    (r"were unschedulable", faults.NODE_CORDONED),
)
"""The scheduler counts nodes for each of these. What the class's own nodes lack comes first: nodes of other kinds never
match its selector."""
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_XID: Final = re.compile(r"\bxid(?: \([^)]{0,80}\))?[:= ]{1,3}(\d{1,3})\b|\bnvidiaxid(\d{1,3})", re.IGNORECASE)


def engine(text: str) -> Phrase | None:
    """Why an engine or a container of a pod ended; also for kubelets' messages about GPUs. The most upstream cause of
    those that the text names."""
    found = _worst(xid(text), _first(text, (*_GPU, *_ENGINE)))
    return found if found is not None and _is_fault(found) else None  # what is only worth knowing ended nothing


def gpu(text: str) -> Phrase | None:
    """What a node's condition or event says of its GPUs."""
    return _worst(xid(text), _first(text, _GPU))


def xid(text: str) -> Phrase | None:
    """The worst of the Xid messages in a text: of faults the most upstream, and notes after them."""
    found: list[Phrase] = []
    for match in _XID.finditer(text[-LONGEST:]):
        number, line = int(match[1] or match[2]), _line(text[-LONGEST:], match)
        if (known := xids.of(number, line)) is not None:
            found.append(Phrase(known.reason, line, f"Xid {number}: {known.meaning}"))
    return min(found, key=_severity, default=None)


def source(text: str) -> Phrase | None:
    """Why a source of weights gives nothing, though its address is right."""
    return _first(text, _SOURCE)


def node(text: str) -> Phrase | None:
    """What a node's event says of the machine itself."""
    return _first(text, _MACHINE)


def taint(text: str) -> Phrase | None:
    """What a taint says of its node."""
    return _first(text, _TAINTS)


def evicted(text: str) -> Phrase | None:
    """Of what a node ran short, when its kubelet evicted a pod; None: of what the pod itself used."""
    return _first(text, _EVICTIONS)


def own_limit(text: str) -> bool:
    """Whether a pod was evicted for a limit of its own, and not because its node ran short."""
    return _OWN_LIMIT.search(text[-LONGEST:]) is not None


def pull(text: str) -> Phrase | None:
    """Why an image cannot be pulled."""
    return _first(text, _PULL)


def setup(text: str) -> Phrase | None:
    """Why a container cannot be set up."""
    return _first(text, (*_GPU, *_SETUP))


def mount(text: str) -> Phrase | None:
    """Why a volume cannot be mounted."""
    return _first(text, _MOUNT)


def ended(text: str) -> Phrase | None:
    """What a Model's condition says of its engine's exit code, where the engine's own words say nothing."""
    return _first(text, _ENDED)


def admission(text: str) -> Phrase | None:
    """Why the API server refuses an object."""
    return _first(text, _ADMISSION)


def scheduler(text: str) -> Phrase | None:
    """Why the scheduler finds no node."""
    return _first(text, _SCHEDULER)


def shorten(text: str, longest: int = _LONGEST_QUOTE) -> str:
    """A message as one line, at most so long, without control characters: engines colour their logs, and people who may
    write a status could otherwise write to the reader's terminal."""
    line = " ".join(_CONTROL.sub(" ", _ESCAPE.sub("", text)).split())
    return line if len(line) <= longest else f"{line[: longest - 4]} ..."


def _is_fault(phrase: Phrase) -> bool:
    return faults.advice(phrase.reason).state == "fault"


def _severity(phrase: Phrase) -> tuple[bool, int, bool]:
    """A contained error may come with one that is not."""
    contained = phrase.reason == faults.GPU_ECC_CONTAINED
    return not _is_fault(phrase), faults.advice(phrase.reason).layer.order, contained


def _worst(of_xid: Phrase | None, other: Phrase | None) -> Phrase | None:
    """What an Xid says, unless it is a note beside a fault."""
    if of_xid is None or (other is not None and not _is_fault(of_xid)):
        return other
    return of_xid


def _first(text: str, known: Iterable[tuple[re.Pattern[str], str]]) -> Phrase | None:
    read = text[-LONGEST:]
    for pattern, reason in known:
        if match := pattern.search(read):
            return Phrase(reason, _line(read, match))
    return None


def _line(text: str, match: re.Match[str]) -> str:
    begin, end = text.rfind("\n", 0, match.start()) + 1, text.find("\n", match.end())
    line = text[begin : end if end >= 0 else len(text)].strip()
    if len(line) <= _LONGEST_QUOTE:
        return line
    start = max(0, match.start() - begin - 40)
    return shorten(line[start:])
