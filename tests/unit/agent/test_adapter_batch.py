"""The Job that reads a batch of adapters: what it is, what it reads, and what it says in 4 KiB."""

import asyncio
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from shoal.agent import adapterfacts
from shoal.agent.adapterfacts import FactsReading, read_batch, run_batch
from shoal.api import names, reasons
from shoal.api.adapterfacts import BATCH_ADAPTERS, BATCH_ENV, AdapterBatch, AdapterFacts, AdapterToRead
from shoal.api.config import CABundle, Proxy
from shoal.api.lorapool import LoRAPool
from shoal.artifacts import Settings, folders
from shoal.core.facts import Container, Pod
from shoal.core.lora.format import facts as answers
from shoal.core.lora.format.facts import Result, job_name, message, parse, results
from shoal.core.status.observed import ModelProblem
from shoal.manifests.adapterfacts import adapter_facts_job
from shoal.runtime.facts import facts as facts_command
from tests.support.adapters import make_adapter
from tests.support.operators import CONFIG
from tests.support.s3 import s3_server
from tests.support.sources import LOCAL, LOCAL_ENV, HubServer, tar_of, write_files

WIDTHS = {"q_proj": (4096, 4096), "k_proj": (4096, 1024), "v_proj": (4096, 1024), "o_proj": (4096, 4096),
          "gate_proj": (4096, 14336), "up_proj": (4096, 14336), "down_proj": (14336, 4096)}  # fmt: skip


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:16]


def facts(number: int, **more: object) -> AdapterFacts:
    said: dict[str, object] = {
        "revision": f"sha256:{hashlib.sha256(b'%d' % number).hexdigest()}",
        "commit": hashlib.sha256(b"c%d" % number).hexdigest()[:40],
        "rank": 16,
        "alpha": 32.0,
        "size_bytes": 83_945_296 + number,
        "file_bytes": 83_946_200 + number,
        "modules": WIDTHS,
        "targets": tuple(sorted(WIDTHS)),
        "layers": 32,
        "base": "meta-llama/Llama-3.1-8B-Instruct",
    }
    return AdapterFacts.model_validate(said | more)


def batch(*uris: str, digest: str | None = None, max_bytes: int = 1 << 20) -> AdapterBatch:
    rows = tuple(AdapterToRead(key=f"{number:016x}", uri=uri, digest=digest) for number, uri in enumerate(uris))
    return AdapterBatch(adapters=rows, credentials=("hf://private/",), max_bytes=max_bytes)


def keys_of(wanted: AdapterBatch) -> list[str]:
    return [one.key for one in wanted.adapters]


async def read(wanted: AdapterBatch, **more: object) -> list[Result]:
    quick = Settings(network=LOCAL, pause_seconds=0.001)
    found = await read_batch(FactsReading(wanted, **{"settings": quick, **more}))  # pyright: ignore[reportArgumentType]
    assert [k for k, _ in found] == keys_of(wanted)
    return [result for _, result in found]


# --- what is said ---------------------------------------------------------------------------------------------------


def test_a_full_batch_of_one_pools_adapters_fits_into_a_termination_message():
    rows = [(key(n), facts(n)) for n in range(BATCH_ADAPTERS)]
    text = message(rows)
    assert len(text.encode()) <= answers.LIMIT_BYTES
    assert parse(text) == dict(rows)


def test_a_full_batch_of_failures_fits_and_keeps_the_beginning_of_each_message():
    rows = [
        (key(n), ModelProblem(reasons.GATED, f"{n}: " + "the repository is gated " * 40)) for n in range(BATCH_ADAPTERS)
    ]
    text = message(rows)
    assert len(text.encode()) <= answers.LIMIT_BYTES
    found = parse(text)
    for name, problem in rows:
        said = found[name]
        assert isinstance(said, ModelProblem)
        assert said.reason == reasons.GATED
        assert problem.message.startswith(said.message)
        assert len(said.message) >= 80


def test_one_failure_alone_is_told_whole():
    said = ModelProblem(reasons.CORRUPT, "x" * 500)
    assert parse(message([(key(1), said)])) == {key(1): said}


def test_what_does_not_fit_is_left_out_and_what_is_said_is_whole():
    rows: list[tuple[str, Result]] = [
        (key(n), facts(n, modules={f"{m}{n}": w for m, w in WIDTHS.items()}, base=f"base {n}"))
        for n in range(BATCH_ADAPTERS)
    ]
    text = message(rows)
    assert len(text.encode()) <= answers.LIMIT_BYTES
    found = parse(text)
    assert 0 < len(found) < BATCH_ADAPTERS
    assert found == dict(rows[: len(found)])


def test_bytes_that_are_no_text_do_not_stop_the_answer():
    text = message([(key(1), ModelProblem(reasons.CORRUPT, "file \udcff is odd"))])
    assert parse(text) == {key(1): ModelProblem(reasons.CORRUPT, "file ? is odd")}
    text.encode()  # as the termination message is written


def test_a_line_that_is_too_long_by_itself_is_told_as_a_failure():
    modules = {f"module_with_a_long_name_{n}": (1, 1) for n in range(200)}
    found = parse(message([(key(1), facts(1, modules=modules)), (key(2), facts(2))]))
    assert found == {
        key(1): ModelProblem(reasons.UNSUPPORTED, "it changes more modules than can be told"),
        key(2): facts(2),
    }


def test_the_answer_is_bytes_not_letters():
    rows = [(key(n), ModelProblem(reasons.CORRUPT, "字" * 600)) for n in range(BATCH_ADAPTERS)]
    assert len(message(rows).encode()) <= answers.LIMIT_BYTES


@pytest.mark.parametrize("alpha", [16, 0.5])
def test_facts_come_back_as_they_were(alpha: float):
    said = facts(1, commit=None, alpha=float(alpha), added_token=32001, modules={"q_proj": None}, base=None)
    assert parse(message([(key(1), said)])) == {key(1): said}


@pytest.mark.parametrize(
    "text",
    ["", "Killed", "{}", "[]", '{"shapes": 1, "adapters": []}', '{"shapes": [], "adapters": [1, {"key": "a"}]}'],
)
def test_a_message_that_is_none_says_nothing(text: str):
    assert parse(text) == {}


def test_a_broken_line_takes_no_other_with_it():
    content = json.loads(message([(key(1), facts(1)), (key(2), facts(2))]))
    content["adapters"][0]["shape"] = 9
    assert parse(json.dumps(content)) == {key(2): facts(2)}


def test_a_reason_that_nobody_knows_is_no_reason_of_ours():
    said = parse(json.dumps({"shapes": [], "adapters": [{"key": key(1), "reason": "Odd", "message": "odd"}]}))
    assert said == {key(1): ModelProblem(reasons.STAGE_FAILED, "odd")}


def pod(exit_code: int | None, text: str | None) -> Pod:
    container = Container("facts", False, 0, None, None, exit_code, None, text, exit_code is None)
    return Pod("chat", "p", "u", None, exit_code is not None, False, False, {}, None, containers=(container,))


def test_the_operator_reads_it_from_the_pod_that_ended():
    text = message([(key(1), facts(1))])
    assert results(pod(0, text)) == {key(1): facts(1)}
    assert results(pod(None, None)) == {}
    assert results(pod(137, None)) == {}


# --- what is read ---------------------------------------------------------------------------------------------------


async def test_one_bad_source_does_not_keep_the_others_from_being_read(tmp_path: Path):
    good = [make_adapter(tmp_path / f"good{n}", seed=n) for n in range(2)]
    broken = write_files(tmp_path / "broken", {"adapter_config.json": b"{"})
    first, bad, absent, second = await read(
        batch(f"file://{good[0]}", f"file://{broken}", "file:///nowhere", f"file://{good[1]}")
    )
    assert isinstance(first, AdapterFacts)
    assert isinstance(second, AdapterFacts)
    assert first.revision != second.revision
    assert first.modules["down_proj"] == (128, 64)
    assert isinstance(bad, ModelProblem)
    assert bad.reason == reasons.CORRUPT
    assert isinstance(absent, ModelProblem)
    assert (absent.reason, "/nowhere does not exist" in absent.message) == (reasons.SOURCE_NOT_FOUND, True)


async def test_an_error_that_nobody_thought_of_is_its_sources_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_adapter(tmp_path / "good")
    read_one = adapterfacts.read_one

    async def broken(wanted: AdapterToRead, reading: FactsReading) -> AdapterFacts:
        if wanted.uri.endswith("/bad"):
            raise UnicodeError("a library broke")
        return await read_one(wanted, reading)

    monkeypatch.setattr(adapterfacts, "read_one", broken)
    bad, good = await read(batch("file:///nowhere/bad", f"file://{tmp_path}/good"))
    assert bad == ModelProblem(reasons.SOURCE_UNREACHABLE, "file:///nowhere/bad cannot be read: UnicodeError")
    assert isinstance(good, AdapterFacts)


async def test_a_source_that_hangs_has_its_own_time(tmp_path: Path):
    good = make_adapter(tmp_path / "good")
    files = {path.name: path.read_bytes() for path in good.iterdir()}
    hub = HubServer(files, repo="team/a")
    hub.silent_file = "adapter_model.safetensors"
    server = TestServer(hub.app())
    await server.start_server()
    settings = Settings(network=LOCAL, hub_endpoint=f"http://127.0.0.1:{server.port}")
    hanging, read_well = await read(batch("hf://team/a", f"file://{good}"), settings=settings, seconds=1.5)
    await server.close()
    assert hanging == ModelProblem(
        reasons.SOURCE_UNREACHABLE, "hf://team/a was not read within 1.5 s: it is too slow, or hangs"
    )
    assert isinstance(read_well, AdapterFacts)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources with `hung` in their address never answer, others at once."""

    async def read_one(wanted: AdapterToRead, _reading: FactsReading) -> AdapterFacts:
        if "hung" in wanted.uri:
            await asyncio.Event().wait()
        return facts(1)

    monkeypatch.setattr(adapterfacts, "read_one", read_one)


@pytest.mark.usefixtures("hanging")
async def test_the_answer_does_not_wait_for_long_for_sources_that_hang_however_many() -> None:
    hung = [f"s3://a/hung{n}" for n in range(adapterfacts.AT_A_TIME + 1)]
    *late, fine = await read(batch(*hung, "s3://a/fine"), seconds=600.0, slot_seconds=0.05, idle_seconds=0.3)
    assert isinstance(fine, AdapterFacts)
    assert {type(one) for one in late} == {ModelProblem}
    assert late[0] == ModelProblem(
        reasons.SOURCE_UNREACHABLE,
        "s3://a/hung0 was not read within 0.3 s after others that were declared with it: it is slow, or hangs; "
        "it is read again, beside fewer and with more time",
    )


@pytest.mark.usefixtures("hanging")
async def test_what_is_read_by_itself_has_all_its_time() -> None:
    (found,) = await read(batch("s3://a/hung"), seconds=0.5, slot_seconds=0.01, idle_seconds=0.01)
    assert found == ModelProblem(
        reasons.SOURCE_UNREACHABLE, "s3://a/hung was not read within 0.5 s: it is too slow, or hangs"
    )


async def test_a_branch_is_resolved_and_no_weights_are_fetched(tmp_path: Path):
    files = {path.name: path.read_bytes() for path in make_adapter(tmp_path / "a", rank=64, layers=40).iterdir()}
    hub = HubServer(files | {"tokenizer.json": b"{}"}, repo="team/a")
    server = TestServer(hub.app())
    await server.start_server()
    (found,) = await read(
        batch("hf://team/a@main"), settings=Settings(network=LOCAL, hub_endpoint=f"http://127.0.0.1:{server.port}")
    )
    await server.close()
    assert isinstance(found, AdapterFacts)
    assert (found.commit, found.rank, found.layers) == ("a" * 40, 64, 40)
    assert found.size_bytes == len(files["adapter_model.safetensors"])


async def test_the_pools_secret_opens_its_prefix_only(tmp_path: Path):
    files = {path.name: path.read_bytes() for path in make_adapter(tmp_path / "a").iterdir()}
    write_files(tmp_path / "secrets" / "0", {"token": b"right"})
    for repo, opened in (("private/a", True), ("public/a", False)):
        hub = HubServer(files, repo=repo, private=True, token="right")
        server = TestServer(hub.app())
        await server.start_server()
        settings = Settings(network=LOCAL, hub_endpoint=f"http://127.0.0.1:{server.port}")
        (found,) = await read(batch(f"hf://{repo}"), settings=settings, secrets=tmp_path / "secrets")
        await server.close()
        assert isinstance(found, AdapterFacts) == opened
        if isinstance(found, ModelProblem):
            assert found.reason == reasons.GATED
            assert "name the Secret in the pool's credentials" in found.message


async def test_the_content_is_held_to_the_digest_of_the_spec(tmp_path: Path):
    folder = make_adapter(tmp_path / "a")
    digest = folders.digest_of(folder)
    (right,) = await read(batch(f"file://{folder}", digest=digest))
    assert isinstance(right, AdapterFacts)
    other = f"sha256:{'0' * 64}"
    (wrong,) = await read(batch(f"file://{folder}", digest=other))
    assert isinstance(wrong, ModelProblem)
    assert wrong.reason == reasons.DIGEST_MISMATCH
    assert wrong.message.startswith(f"file://{folder} has digest {digest}, but spec.source.digest says {other}")


async def test_an_archive_is_read_and_held_to_its_digest(tmp_path: Path):
    packed = tar_of({f"v1/{path.name}": path.read_bytes() for path in make_adapter(tmp_path / "a").iterdir()})
    with s3_server() as s3:
        s3.put("x", {"a.tar.gz": packed})
        write_files(tmp_path / "secrets" / "0", s3.secret())
        uri, digest = "s3://models/x/a.tar.gz", f"sha256:{hashlib.sha256(packed).hexdigest()}"
        row = AdapterToRead(key="0" * 16, uri=uri, digest=digest)
        for limit, fits in ((1 << 20, True), (1000, False)):
            wanted = AdapterBatch(adapters=(row,), credentials=("s3://models/",), max_bytes=limit)
            (found,) = await read(wanted, secrets=tmp_path / "secrets")
            assert isinstance(found, AdapterFacts) == fits
            assert fits or (isinstance(found, ModelProblem) and found.reason == reasons.TOO_LARGE)


def test_the_container_leaves_its_answer_and_ends_well(tmp_path: Path):
    said: list[str] = []
    wanted = batch(f"file://{make_adapter(tmp_path / 'a')}", "file:///nowhere")
    assert run_batch(FactsReading(wanted, settings=Settings(network=LOCAL)), said.append) == 0
    found = parse(said[0])
    assert [type(found[one.key]) for one in wanted.adapters] == [AdapterFacts, ModelProblem]


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_reads_the_batch_of_its_environment(tmp_path: Path):
    wanted = batch(f"file://{make_adapter(tmp_path / 'a')}")
    log = tmp_path / "log"
    command = [sys.executable, "-m", "shoal", "agent", "facts", "--adapters", "--termination-log", str(log)]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "operator", BATCH_ENV: wanted.model_dump_json(), **LOCAL_ENV}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert isinstance(parse(log.read_text())[wanted.adapters[0].key], AdapterFacts)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--adapters", "--batch", "{"], "SHOAL_ADAPTER_FACTS is not a batch of adapters"),
        (["--adapters", "--batch", '{"adapters": []}'], "maxBytes: Field required"),
        ([], "--uri or SHOAL_STAGE_URI names the source"),
    ],
)
def test_the_command_without_its_input_says_what_is_missing(arguments: list[str], said: str):
    done = CliRunner().invoke(facts_command, arguments, env={"SHOAL_STAGE_URI": None, BATCH_ENV: None})
    assert done.exit_code == 2
    assert said in done.output


# --- the Job --------------------------------------------------------------------------------------------------------


def pool() -> LoRAPool:
    return LoRAPool.model_validate(
        {
            "metadata": {"name": "llama", "namespace": "chat", "uid": "pool-uid"},
            "spec": {
                "modelRef": {"name": "llama-8b"},
                "credentials": [{"uriPrefix": "hf://private/", "secretRef": {"name": "hub-read"}}],
            },
        }
    )


def test_the_job_is_of_the_pool_and_says_what_it_reads():
    wanted = batch("hf://private/a", "hf://team/b")
    job = adapter_facts_job(pool(), wanted, CONFIG, keep_seconds=60)
    meta, spec = job["metadata"], job["spec"]["template"]["spec"]
    assert (meta["namespace"], meta["name"]) == ("chat", job_name("chat/llama", keys_of(wanted)))
    assert meta["annotations"][names.ANNOTATION_READS].split() == [one.key for one in wanted.adapters]
    assert meta["labels"][names.LABEL_POOL] == "llama"
    assert meta["labels"][names.LABEL_COMPONENT] == names.COMPONENT_ADAPTER_FACTS
    assert meta["labels"] == job["spec"]["template"]["metadata"]["labels"]
    (owner,) = meta["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("LoRAPool", "pool-uid")
    assert job["spec"]["ttlSecondsAfterFinished"] == 60
    (container,) = spec["containers"]
    assert container["command"] == ["shoal", "agent", "facts", "--adapters"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert AdapterBatch.model_validate_json(env[BATCH_ENV]) == wanted
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    secret = mounts[f"{names.ADAPTER_SECRETS_DIR}/0"]
    assert {"secretName": "hub-read", "optional": True} in [
        volume["secret"] for volume in spec["volumes"] if volume["name"] == secret
    ]
    assert set(mounts.values()) == {volume["name"] for volume in spec["volumes"]}
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_same_batch_has_the_same_job_in_any_order():
    one, two = batch("hf://team/a", "hf://team/b"), batch("hf://team/b", "hf://team/a")
    assert job_name("chat/llama", keys_of(one)) == job_name("chat/llama", keys_of(two))
    assert job_name("chat/llama", keys_of(one)) != job_name("chat/other", keys_of(one))
    assert job_name("chat/llama", keys_of(one)) != job_name("chat/llama", keys_of(batch("hf://team/a")))


def test_the_job_reaches_what_an_agent_reaches():
    config = CONFIG.model_copy(
        update={
            "hub_endpoint": "https://mirror.example",
            "proxy": Proxy(https="http://proxy.example:3128"),
            "ca_bundle": CABundle(config_map="roots", key="ca.crt"),
        }
    )
    job = adapter_facts_job(pool(), batch("hf://team/a"), config, keep_seconds=60)
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["HF_ENDPOINT"] == "https://mirror.example"
    assert env["HTTPS_PROXY"] == "http://proxy.example:3128"
    assert env["SSL_CERT_FILE"].endswith("/ca.crt")
    assert {"name": "ca", "configMap": {"name": "roots"}} in spec["volumes"]
