"""Phrases of engines, drivers, kubelets, the scheduler and the API server, and the reason that each stands for.

Of a table the first row that a text has counts, so the order of its rows is that of causes: the most upstream
first, and what is more precise before what is less.
"""

import re
from typing import Final

from shoal.api import reasons
from shoal.core.layers import faults


def _all(*pairs: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern, re.IGNORECASE), reason) for pattern, reason in pairs)


GPU: Final = _all(
    (r"\bsxid\b", faults.NVLINK_FAULT),
    # A card that the driver does not start, and why: the driver's next line says only that the card did not start.
    (r"(nvidia|\bgsp|amdgpu)\S{0,80}.{0,80}firmware.{0,80}(failed|not found|missing)|no firmware image found"
     r"|firmware load for (nvidia|amdgpu)|bound to nouveau|requires use of the nvidia open kernel modules",
     faults.DRIVER_NOT_LOADED),
    (r"guest driver version .{0,80}not compatible|installed in this system is not supported by the",
     faults.DRIVER_FAULT),
    (r"uncorrectable ecc|double[- ]bit (ecc )?error|uncorrectable memory error|cudaerroreccuncorrectable"
     r"|row[- ]remap.{0,40}fail|(amdgpu|\bras\b).{0,160}uncorrectable (hardware )?error", faults.GPU_ECC_ERROR),
    (r"fallen off the bus|gpu is lost|gpu has been lost|CUDA_ERROR_DEVICE_UNAVAILABLE"
     r"|unable to determine the device handle|rminitadapter failed", faults.GPU_LOST),
    (r"gpu requires reset|thermal (violation|slowdown)|hw (thermal )?slowdown|power brake|pcie? replay"
     r"|inforom.{0,40}(corrupt|invalid)|declared device \S{1,40} as wedged|asic reset failed"
     r"|UR_RESULT_ERROR_DEVICE_LOST", faults.GPU_UNHEALTHY),
    (r"ibv_reg_mr.{0,120}cannot allocate memory", faults.PROCESS_LIMIT),
    (r"stat /dev/infiniband/|no such file.{0,40}/dev/infiniband/", faults.RDMA_DEVICE_LOST),
    (r"nvlink (error|fault|down|status inactive)|uncorrectable nvlink|system not yet initialized"
     r"|CUDA_ERROR_SYSTEM_NOT_READY|nvswitch (fatal|error)|fabric ?manager|\bimex\b", faults.NVLINK_FAULT),
    (r"\bibv_[a-z_]{1,40}\b.{0,80}(failed|error)|net/ib\b.{0,120}(error|failed|async|timeout|vendor err)"
     r"|nccl warn.{0,40}\bnvls\b|cumulticast.{0,80}(fail|error)"
     r"|infiniband.{0,80}(down|error)|\bIBV_WC_[A-Z_]{1,40}|peer access is not supported|nvidia_peermem"
     r"|\bxgmi\b.{0,80}(error|fail|down)|nvshmem initialization failed"
     r"|(nccl|gloo|socketpollconnect).{0,400}(no route to host|network is unreachable|no socket interface found)",
     faults.FABRIC_FAILED),
    (r"(nvidia-gridd|vgpu).{0,160}(unlicensed|licen[cs]e)|unlicensed (gpu|vgpu)|failed to acquire license",
     faults.VGPU_UNLICENSED),
    (r"(mig[- ]?manager|mig\.config|mig mode).{0,160}(fail|error|in use by)|error setting mig|migconfigfailed",
     faults.MIG_FAILED),
    (r"\bmps (client|server|control)\b.{0,80}(fail|connect|not|error|exceed)|\bcudaerrormps|\bCUDA_ERROR_MPS_"
     r"|\berror 80[5-9]\b", faults.MPS_FAILED),
    (r"key was rejected by service|(nvidia|amdgpu|module)\b.{0,80}(required key not available|unavailable key)"
     r"|module (nvidia|amdgpu)[\w-]{0,20} not found in directory|could not insert '?(nvidia|amdgpu)"
     r"|(nvidia|amdgpu).{0,60}module verification failed.{0,60}reject|dkms.{0,80}(nvidia|amdgpu).{0,80}(fail|error)"
     r"|kernel module (nvidia|amdgpu).{0,40}(fail|not loaded)", faults.DRIVER_NOT_LOADED),
    (r"cuda driver version is insufficient|forward compatibility was attempted|driver on your system is too old"
     r"|ptx was compiled with an unsupported toolchain"
     r"|unsatisfied condition: (cuda|driver)", faults.DRIVER_TOO_OLD),
    (r"driver/library version mismatch|api mismatch: the client|disagrees about version of symbol"
     r"|cuda_error_not_initialized|gsp (rpc )?timeout|timeout waiting for rpc from gsp"
     r"|cuda unknown error|\bcudaerrorunknown"
     r"|unsupported display driver|\berror (803|999)\b|cuda driver initialization failed"
     r"|cuda error: initialization error|librmversionmismatch|nvml/rm version mismatch"
     r"|\bcudaerrorinitializationerror", faults.DRIVER_FAULT),
    (r"(dcgm|hostengine).{0,160}(connect|not running|unresponsive|hang|hung|timed? ?out|failed to initialize)"
     r"|failed to initialize dcgm|dcgm_(connectivity_error|probe_hang)", faults.GPU_MONITOR),
    (r"(unresolvable|inject).{0,80}\bcdi devices?|error mounting \"(/\S{0,80})?/(dev/nvidia|\S{0,80}libnvidia-)",
     faults.DEVICE_SPEC_MISSING),
    (r"nvidia-container-cli: device error: .{0,200}unknown device", faults.DEVICE_ALLOCATION),
    (r"no cuda-capable device|cuda_error_no_device|could not select device driver"
     r"|(unable to open|failed to open|no such file).{0,60}/dev/kfd\b"
     r"|found no nvidia driver|nvml_error_|failed to initialize nvml"
     r"|nvidia-container-cli|libcuda\.so(\.1)?: cannot open|no cuda gpus are available"
     r"|nvidia-container-runtime\S{0,20}: no such file|failed to locate driver root|\b0 active drivers"
     r"|no nvidia gpu (device )?(is )?(present|found)|no hip gpus are available|failed to infer device type"
     r"|couldn't communicate with the nvidia driver"
     r"|no runtime for \"?(nvidia|amd)[\w-]{0,40}\"? is configured", faults.DRIVER_MISSING),
)  # fmt: skip
"""L0 to L1, the most upstream first."""
NO_NAME_SERVER: Final = r"temporary failure in name resolution|no name server answer|\bgai error: -[23]\b"
"""A name server that answers says that there is no such name, in other words."""
ENGINE: Final = _all(
    (r"\[errno 5\]|input/output error", faults.NODE_DISK_FAULT),
    (r"\[errno (107|112|116)\]|stale (nfs )?file handle|transport endpoint is not connected", faults.MOUNT_FAILED),
    (r"shm.{0,160}no space left|no space left.{0,160}/dev/shm|\(exit code: -7\)", faults.NO_SPACE),
    (r"safetensorerror|error while deserializing header|headertoo(large|small)|metadataincompletebuffer"
     r"|invalid load key|unexpected eof.{0,40}\.(bin|safetensors|gguf)|corrupt(ed)? (file|checkpoint|weights)"
     r"|pytorchstreamreader failed|not a valid json file|could not parse modelproto|eoferror: ran out of input"
     r"|gguf.{0,40}magic|git-lfs\.github\.com/spec"
     r"|invalid magic", faults.WEIGHTS_CORRUPT),
    (r"does not appear to have a file named|no such file or directory: .{0,200}\.(safetensors|bin|json)"
     r"|cannot find any model weights|cannot find the (weights|tokenizer)|can't load tokenizer"
     r"|can't load the (tokenizer|configuration|model|feature extractor)"
     r"|couldn't instantiate the backend tokenizer",
     faults.WEIGHTS_INCOMPLETE),
    (NO_NAME_SERVER, faults.NAMES_UNRESOLVED),
    (r"429 client error|too many requests for url", faults.SOURCE_LIMITED),
    (r"certificate_verify_failed|certificate verify failed", faults.SOURCE_CERTIFICATE),
    (r"access a gated repo|gatedrepoerror|access to model .{1,200} is restricted"
     r"|(401|403) client error.{0,200}(huggingface|/resolve/)", reasons.GATED),
    (r"nocredentialserror|unable to locate credentials|clienterror\b.{0,40}\(40[13]\)|(?<!psutil\.)accessdenied\b"
     r"|default credentials were not found", reasons.GATED),
    (r"is not a valid model identifier"
     r"|\b(repository|revision|entry)notfounderror|404 client error.{0,200}(huggingface|/resolve/)",
     reasons.SOURCE_NOT_FOUND),
    (r"cas service error|max retries exceeded with url|hf_transfer.{0,80}(error|fail)|request failed after \d+ retries",
     reasons.SOURCE_UNREACHABLE),
    (r"couldn't connect to .{0,60}huggingface|localentrynotfounderror|offlinemodeisenabled",
     reasons.SOURCE_UNREACHABLE),
    (r"size mismatch for|weights? .{0,80}not (found in|initialized from) (the )?checkpoint"
     r"|keyerror: '(model|transformer|lm_head)\.|shape mismatch.{0,80}weight"
     r"|there is no module or parameter named|keyerror: '[\w.]{0,200}(_proj|weight|_scale|layers\.\d+)[\w.]{0,80}'",
     faults.WEIGHTS_MISMATCH),
    (r"lora rank.{0,40}(greater|larger|exceeds)|\brank (of )?\d.{0,60}max[_-]lora[_-]rank", reasons.RANK_TOO_HIGH),
    (r"target modules?.{0,200}(not supported|not in\b|but received)|expected target modules",
     reasons.MODULES_NOT_IN_POOL),
    (r"no kernel image is available|requires sm ?[><=]|sm_?\d{1,4} is not (supported|compatible)"
     r"|compute capability.{0,80}(required|at least|>=)|hiperrornobinaryforgpu|invalid device function"
     r"|is not defined for option 'gpu-name'|unsupported gpu architecture"
     r"|device kernel image is invalid|out of resources?: shared memory|only supports? .{0,60}\bgpus?\b",
     faults.NO_KERNEL),
    (r"device\(?s?\)? (is/are|are|is) busy or unavailable|gpus? .{0,60}occupied by other processes"
     r"|free memory on device.{0,200}less than desired", faults.GPU_IN_USE),
    (r"(prefill|decode) out of memory|no available memory for the cache blocks"
     r"|not enough memory\b.{0,80}increase.{0,20}mem-fraction"
     r"|loading the model weights.{0,80}not enough", faults.NO_CACHE_MEMORY),
    (r"cuda out of memory|outofmemoryerror|cuda_error_out_of_memory|hip out of memory|not enough memory\b"
     r"|insufficient (gpu|device|cuda) memory|cuda failure 2\b|cuda failure .{0,20}out of memory"
     r"|cudaerrormemoryallocation|cublas_status_alloc_failed", faults.OUT_OF_GPU_MEMORY),
    (r"invalid device ordinal|(parallel|world) size.{0,80}(number of |available |local )gpus"
     r"|less than max local gpu count|duplicate gpu detected|required gpus exceeds", faults.PARALLELISM),
    (r"nccl (error|warn)|ncclsystemerror|ncclunhandledcudaerror|ncclinternalerror|watchdog caught collective"
     r"|processgroupnccl.{0,80}(timeout|abort)|gloo connectfullmesh failed"
     r"|diststoreerror|distnetworkerror|\btcpstore\b|gloo/transport.{0,200}(reset|closed|refused|timed out)",
     faults.NCCL_ERROR),
    # In the plural it is a warning of what may come.
    (r"cuda error\b|illegal memory access|device-side assert|unspecified launch failure|\bcudaerror[a-z]"
     r"|\bcublas_status_|hip error|memory access fault by gpu", faults.CUDA_ERROR),
    # SGLang names the exit code of a process of its own beside what each may mean.
    (r"\(exit code: -9\)|cannot allocate memory|\bmemoryerror\b|std::bad_alloc", faults.OUT_OF_MEMORY),
    (r"no space left on device|\bbus error\b|unable to (open|allocate) shared memory", faults.NO_SPACE),
    (r"modulenotfounderror|importerror: |error while loading shared libraries|undefined symbol"
     r"|could not find nvcc|ninja is required|not compiled with cuda enabled|module '[\w.]{1,80}' has no attribute"
     r"|(error|exception)\w*:.{0,200}(package is not found|is not installed|please install)"
     r"|no such file or directory: '(nvcc|gcc|ninja|ptxas)'",
     faults.IMAGE_INCOMPLETE),
    (r"\[errno 13\]|permissionerror|\[errno 30\]|read-only file system", faults.PATH_REFUSED),
    (r"too many open files|can't start new thread|pthread_create failed|inotify.{0,60}(limit|no space)"
     r"|blockingioerror.{0,40}temporarily unavailable|memlock.{0,60}limit", faults.PROCESS_LIMIT),
    (r"trust[-_]remote[-_]code", faults.REMOTE_CODE),
    (r"\(exit code: -(4|6|8|11)\)|segmentation fault|fatal python error", faults.ENGINE_CRASHED),
    (r"watchdog timeout", faults.ENGINE_STALLED),
    (r"(not|be) divisible by|cannot be divided (by|into)", faults.PARALLELISM),
    (r"dtype.{0,80}(not|only) supported"
     r"|quantiz\w{1,8}.{0,120}(not supported|unsupported|does not match|unknown)|unknown quantiz", faults.QUANTIZATION),
    (r"chat[_ -]?template.{0,160}(not a|not found|invalid|no such|does not|failed|error|syntax)"
     r"|jinja2\.exceptions\.\w{1,40}|(invalid|unknown|failed to load).{0,40}chat[_ -]?template", faults.CHAT_TEMPLATE),
    (r"address already in use|errno 98\b", faults.PORT_TAKEN),
    (r"(unknown|invalid|unsupported|unrecognized) (tool[-_ ]?call(ing)?|reasoning)[-_ ]?parser"
     r"|(tool[-_ ]?call|reasoning)[-_ ]?parser.{0,120}(not (found|supported|registered)|invalid|unknown)"
     r"|unrecognized arguments|error: argument |invalid choice: |no such option"
     r"|max_num_batched_tokens .{0,80}is smaller than|(larger|greater) than max_num_batched_tokens"
     r"|draft model path must be", faults.ENGINE_ARGUMENTS),
    (r"model architectures? .{0,120}(not supported|failed to be inspected)|unsupported architecture"
     r"|__init__\(\) got an unexpected keyword argument|head[_ ]size.{0,40}not supported"
     r"|unrecognized (model|configuration class|processing class)\b|untagged enum modelwrapper"
     r"|'\w{1,64}config' object has no attribute|rope_scaling.{0,40}must (be|have)"
     r"|does not recognize this architecture|tokenizer class .{0,80}(does not exist|not currently imported)",
     faults.ARCHITECTURE_UNKNOWN),
    (r"max(imum)?[ _-](seq|model)[ _-]len.{0,160}(larger|greater|longer)|context.length.{0,80}(greater|longer|exceeds)",
     faults.CONTEXT_TOO_LONG),
    # Last: a message about arguments in words of its own.
    (r"(error|exception)\w*:.{0,200}(\s--[a-z][a-z-]{2,}|not (yet )?(supported|compatible) with"
     r"|cannot be used (together )?with"
     r"|must be (greater|less|smaller|larger|between|positive|at least|at most))", faults.ENGINE_ARGUMENTS),
)  # fmt: skip
"""L2.5 to L4. A driver's failure often shows as a CUDA error too, so these come after `GPU`."""
VOCABULARY: Final = _all(
    (r"draft (model|worker|token)|speculati", faults.ENGINE_ARGUMENTS),
    (r"(unknown|invalid|unsupported|unrecognized) [\w -]{0,60}(backend|option|value|parser|choice|type|method|mode)\b"
     r"|valid options|choose (one )?from|must be one of", faults.ENGINE_ARGUMENTS),
    (r"multicast|symm(etric)?_?dev|symmetric memory|\bnvls\b|\bp2p\b|cuda_?ipc|nvshmem|net/ofi|\befa\b"
     r"|\bucx\b|\bucp_|rdma|ibverbs"
     r"|\bmlx\d|deep_?ep\b|mooncake.{0,80}transfer|gpudirect", faults.FABRIC_FAILED),
    (r"\bnvml\b|nvidia driver|cuda driver|/dev/nvidia|nvidia-smi|nvidia-modprobe|libnvidia-", faults.DRIVER_FAULT),
    (r"c(\+\+)? compiler|\bgcc\b|\bg\+\+|\bnvcc\b|\bptxas\b|\bcmake\b|\bninja\b|cuda_home|\bglibc|command not found"
     r"|no module named|shared object|not installed|cannot import name", faults.IMAGE_INCOMPLETE),
    (r"disk quota exceeded|errno 122\b", faults.NO_SPACE),
    (r"operation not permitted|errno 1\b", faults.PATH_REFUSED),
    (r"safetensors|checkpoint|state_dict|model weights|weight_loader|loading weights", faults.WEIGHTS_MISMATCH),
    (r"(?<!de)tokenizer|vocab(ulary)?\b|preprocessor_config|generation_config|config\.json", faults.WEIGHTS_INCOMPLETE),
    (r"\bcuda\b|cudnn|cublas|cutlass|cudagraph|\btriton\b|flashinfer|flash_attn|deep_?gemm|\bkernel\b"
     r"|\bnan\b|\binf\b",
     faults.CUDA_ERROR),
    (r"\bparser\b|think_(start|end)_token|\bargument\b|errno 99\b|must (be|have|encode)|not allowed|invalid value",
     faults.ENGINE_ARGUMENTS),
)  # fmt: skip
"""What the line that tells of an engine's error is about, where no phrase of it is known."""
MACHINE: Final = _all(
    (r"\[hardware error\].{0,200}(uncorrect|fatal|uncorrectable)|uncorrected .{0,40}(dram|memory)|edac .{0,80}\bUE\b",
     faults.MACHINE_FAULT),
    (r"\baer: .{0,40}uncorrect|severity=uncorrect", faults.MACHINE_FAULT),
    (r"critical temperature reached|shutdown temperature|thermal ?trip|over-?temperature|overheat"
     r"|(power supply|power unit|\bpsu\b|\bpsu ?\d).{0,80}(lost|fail|fault|removed|absent|error|degraded)"
     r"|power.{0,20}redundancy.{0,20}(lost|degraded)|\bac lost\b"
     r"|\bfans?\b.{0,80}(fail|\b0 rpm|stopped|lower (critical|non-recoverable))", faults.MACHINE_SUPPLY),
    (r"(ext4|xfs|btrfs)\S{0,20}.{0,40}(error|corrupt)|\bi/o error|blk_update_request|nvme.{0,60}(timeout|abort|reset)"
     r"|remount\w{0,3} .{0,40}read-only", faults.NODE_DISK_FAULT),
    (r"unable to handle kernel|kernel panic|soft lockup|hard lockup|self-detected stall|\bkernel ?oops"
     r"|blocked for more than \d{1,5} seconds", faults.KERNEL_FAULT),
    (r"mlx\d_.{0,120}(unplugged|link down|error)|\bnic link is down|(infiniband|roce|\bib\d).{0,60}link.{0,20}down",
     faults.RDMA_DEVICE_LOST),
    (r"conntrack.{0,20}table full", faults.PROCESS_LIMIT),
)  # fmt: skip
OF_MACHINES: Final = _all(
    (r"\bmlx[45]|\bbnxt|\befa\b|\brdma|infiniband|\broce\b", faults.RDMA_DEVICE_LOST),
    (r"\bNVRM\b|nvidia|nouveau|amdgpu|\bi915\b|habanalabs", faults.DRIVER_FAULT),
    (r"leak(age)? detect|\bcoolant|cold ?plate|voltage|redfish|\bipmi\b|\bbmc\b", faults.MACHINE_SUPPLY),
)
"""What a warning about a node is about, where no phrase of it is known."""
_LIMITED: Final = r"toomanyrequests|too many requests|pull rate limit"
_CERTIFICATE: Final = r"x509:|certificate (is not trusted|has expired|signed by unknown|verify failed)"
SOURCE: Final = _all(
    (NO_NAME_SERVER, faults.NAMES_UNRESOLVED),
    (rf"{_LIMITED}|answer(s|ed) 429\b", faults.SOURCE_LIMITED),
    (rf"{_CERTIFICATE}|the certificate of .{{1,300}} is not trusted", faults.SOURCE_CERTIFICATE),
    (r"answer(s|ed) 5\d\d\b", faults.SOURCE_ERRORS),
)
FETCH: Final = _all(
    (r"\[errno 5\]|input/output error", faults.NODE_DISK_FAULT),
    (r"stale (nfs )?file handle|transport endpoint is not connected", faults.MOUNT_FAILED),
    (r"no space left on device|disk quota exceeded", reasons.DISK_FULL),
    (r"read-only file system|\[errno 13\]|permissionerror", reasons.CACHE_UNAVAILABLE),
    (NO_NAME_SERVER, faults.NAMES_UNRESOLVED),
    (rf"{_LIMITED}|rate limit|(code |\[)429\b|\b429 client", faults.SOURCE_LIMITED),
    (rf"{_CERTIFICATE}|certificate_verify_failed", faults.SOURCE_CERTIFICATE),
    (r"(checksum|sha-?256|digest|md5|etag|hash).{0,40}(mismatch|differ|does not match)|consistency check failed",
     reasons.DIGEST_MISMATCH),
    (r"(repository|revision|(?<!local)entry)notfounderror|\bnosuch(key|bucket)\b|(code |\[)404\b"
     r"|\b404 (client|not found)|notexisterror|does not exist"
     r"|no such (repository|revision|bucket|key)", reasons.SOURCE_NOT_FOUND),
    (r"\bgated|is restricted|expired ?token|authenticationfailed"
     r"|\b40[13]\b (client error|forbidden|unauthorized)|status code 40[13]|accessdenied"
     r"|\(40[13]\)|not authorized|nocredentials|(unable to locate|default) credentials|invalidaccesskeyid"
     r"|signaturedoesnotmatch|\bunauthorized\b", reasons.GATED),
    (r"answer(s|ed) 5\d\d\b|\b50[0234]\b (server error|bad gateway|service unavailable)", faults.SOURCE_ERRORS),
    (r"permanentredirect|must be addressed using the specified endpoint", reasons.SOURCE_INVALID),
    (r"timed? ?out|could not connect|connection broken|incompleteread|connection (refused|reset|aborted)"
     r"|network is unreachable|no route to host|max retries exceeded"
     r"|cas service error|couldn't connect|localentrynotfounderror|offlinemode|407 proxy|unable to connect to proxy"
     r"|request failed after", reasons.SOURCE_UNREACHABLE),
)  # fmt: skip
"""Why a fetch of weights failed that gives no reason of its own, in the words of clients of hubs and stores."""
PULL: Final = _all(
    (r"proxy authentication|\b407\b", faults.REGISTRY_UNREACHABLE),
    (r"pull policy of never|failed size validation|unexpected commit (size|digest)", faults.IMAGE_NOT_FOUND),
    (_LIMITED, faults.IMAGE_LIMITED),
    (r"no match(ing manifest)? for (platform|linux/)", faults.WRONG_ARCHITECTURE),
    (r"no space left on device", faults.DISK_PRESSURE),
    (r"unauthorized|denied|authentication required|no basic auth|403 forbidden", faults.IMAGE_DENIED),
    (rf"{_CERTIFICATE}|server gave http response to https client", faults.REGISTRY_CERTIFICATE),
    (r"manifest unknown|name unknown|no such repository|not found|does not exist|invalidimagename"
     r"|couldn't parse image", faults.IMAGE_NOT_FOUND),
    (r"no such host|i/o timeout|connection refused|deadline exceeded|dial tcp|network is unreachable|tls handshake"
     r"|5\d\d (internal|bad gateway|service unavailable)", faults.REGISTRY_UNREACHABLE),
)  # fmt: skip
SETUP: Final = _all(
    (
        r"(containerd|crio|cri-dockerd|docker)\.sock\b|runtime service .{0,80}(refused|unavailable|no such)",
        faults.RUNTIME_FAULT,
    ),
    (r"plugin type=|failed to set ?up network|network ?plugin is not ready", faults.SANDBOX_FAILED),
    (r"exec format error", faults.WRONG_ARCHITECTURE),
    (r"exec: .{1,200}: permission denied", faults.PATH_REFUSED),
    (
        r"failed to stat \"|subpath|error mounting"
        r"|mkdir(at)? .{1,300}: (read-only file system|permission denied|not a directory)",
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
    (r"dynamic resources|dra driver|nodeprepareresources", faults.DEVICE_ALLOCATION),
    (r"network|\bcni\b|plugin type=|\bipam\b", faults.SANDBOX_FAILED),
    (r"oci runtime create failed|shim task|\brunc\b", faults.RUNTIME_FAULT),
    (r"failed to (create|setup|set up) .{0,40}sandbox", faults.SANDBOX_FAILED),
    (r"mountvolume|unable to attach or mount", faults.MOUNT_FAILED),
)
ADAPTER: Final = _all(
    (
        r"(hidden|intermediate|embedding|vocab)[_ ]?size|size of tensor"
        r"|(shape|size|dimension)s?\b.{0,80}(mismatch|do(es)? not match)"
        r"|expected .{0,80}\bgot \d",
        reasons.BASE_MISMATCH,
    ),
)
"""Why an engine does not load an adapter."""
MOUNT: Final = _all(
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
ENDED: Final = _all(
    (r"ended with exit code \d{1,3} \(\d{1,6} restarts?\): oomkilled", faults.OUT_OF_MEMORY),
    (r"ended with exit code 127\b", faults.IMAGE_INCOMPLETE),
    (r"ended with exit code (134|136|139)\b", faults.ENGINE_CRASHED),
    (r"ended with exit code (137|143)\b", faults.ENGINE_STOPPED),
)
"""How a Model's condition tells of its engine's end (`core/status/diagnosis.py`)."""
ADMISSION: Final = _all(
    (r"etcdserver: (mvcc|no leader|request timed out|leader changed)|database space exceeded"
     r"|server is currently unable to handle the request", faults.CONTROL_PLANE),
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
_NOT_SET_UP: Final = r"/uninitialized|agent-not-ready|driver-upgrade|\.com/[\w.-]{0,40}(driver|not-ready)"
_LEAVES: Final = (
    r"(tobedeleted|deletioncandidate)\w{0,40}autoscaler|karpenter\.sh/disrupted|out-of-service|impending|termination"
)
TAINTS: Final = _all((_NOT_SET_UP, faults.NODE_NOT_SET_UP), (_LEAVES, faults.NODE_LEAVES))
"""Taints that autoscalers, clouds and agents set, by what they say."""
EVICTIONS: Final = _all(
    (r"\bpids\b|pidpressure", faults.PID_PRESSURE),
    (r"inodes|diskpressure|imagefs|nodefs", faults.DISK_PRESSURE),
    (r"memorypressure", faults.MEMORY_PRESSURE),
)
SCHEDULER: Final = _all(
    # A taint of a vendor's or health agent's is on nodes with GPUs, whose others may be in use.
    (r"untolerated taint\(?s?\)? \{[^}]{0,200}(unhealthy|xid|ecc-|degraded)", faults.GPU_UNHEALTHY),
    (r"deviceclass .{0,200}not found", reasons.DEVICE_CLASS_NOT_FOUND),
    (r"resource ?claim|resource driver|dynamicresources", reasons.NO_DEVICES),
    (r"no nodes available to schedule pods", reasons.NO_NODES),
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
