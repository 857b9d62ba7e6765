"""Credentials for the API server: kubeconfig files as client-go reads them, exec plugins, the pod's service account."""

import asyncio
import base64
import json
import ssl
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.kube import auth, execplugin, kubeconfig
from shoal.kube.client import KubeClient
from shoal.kube.errors import APIServerUnavailable
from shoal.kube.resources import PODS
from tests.support.mutual import InstallationPKI, process

SERVER = "https://127.0.0.1:6443"
V1, V1BETA1 = "client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"

pytestmark = pytest.mark.usefixtures("_nowhere")


@pytest.fixture
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without kubeconfig, on a machine that is no pod."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(auth, "SERVICE_ACCOUNT", tmp_path / "serviceaccount")
    monkeypatch.setattr("shoal.kube.client.ATTEMPTS", 1)


def config(
    name: str = "lab",
    *,
    cluster: dict[str, Any] | None = None,
    user: dict[str, Any] | None = None,
    context: dict[str, Any] | None = None,
    current: str | None = None,
) -> dict[str, Any]:
    """A kubeconfig with one entry of each kind, all of one name."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name if current is None else current,
        "clusters": [{"name": name, "cluster": {"server": SERVER, **(cluster or {})}}],
        "users": [{"name": name, "user": {} if user is None else user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, **(context or {})}}],
    }


def write(path: Path, content: dict[str, Any] | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def encoded(pem: str) -> str:
    return base64.b64encode(pem.encode()).decode()


async def refused(path: Path, content: dict[str, Any] | str, context: str | None = None) -> str:
    """Why this kubeconfig cannot be used; the message names its file."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is what the caller checks
        await auth.load(write(path, content), context)
    assert str(path) in str(caught.value)
    return str(caught.value)


# --- which file, which context ------------------------------------------------------------------------------------


async def test_the_given_file_comes_before_kubeconfig_and_that_before_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "home" / ".kube" / "config", config("home", user={"token": "home"}))
    assert (await auth.load()).token == "home"
    monkeypatch.setenv("KUBECONFIG", write(tmp_path / "variable", config("variable", user={"token": "variable"})))
    assert (await auth.load()).token == "variable"
    given = write(tmp_path / "given", config("given", user={"token": "given"}))
    assert (await auth.load(given)).token == "given"


async def test_of_several_files_the_first_with_a_name_has_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = config("one", user={"token": "first"}, current="")
    second = config("one", user={"token": "second", "tokenFile": "/nowhere"}, current="two")
    third = config("two", user={"token": "third"}, cluster={"server": "https://third:1"}, current="one")
    files = [write(tmp_path / str(i), each) for i, each in enumerate((first, second, third))]
    monkeypatch.setenv("KUBECONFIG", ":".join([str(tmp_path / "missing"), "", *files]))
    # The current context is the second file's, the first that has one; what it names is in the third.
    found = await auth.load()
    assert (found.token, found.server) == ("third", "https://third:1")
    # The first file's user as a whole: nothing of the second's is mixed in.
    assert (await auth.load(None, "one")).token == "first"
    # Companion: in another order, other words.
    monkeypatch.setenv("KUBECONFIG", ":".join(reversed(files)))
    assert (await auth.load(None, "one")).token == "second"


async def test_a_context_may_refer_to_another_files_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = {"current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]}
    clusters = {"clusters": [{"name": "k", "cluster": {"server": SERVER + "/"}}], "users": None}
    users = {"users": [{"name": "u", "user": {"token": "t\n"}}], "current-context": None}
    files = [write(tmp_path / name, each) for name, each in {"a": contexts, "b": clusters, "c": users}.items()]
    monkeypatch.setenv("KUBECONFIG", ":".join(files))
    found = await auth.load()
    assert (found.server, found.token, found.renew_seconds) == (SERVER, "t", None)
    monkeypatch.setenv("KUBECONFIG", ":".join(files[:2]))
    with pytest.raises(ValueError, match=r"/a: contexts\[c\].context.user is 'u', which no file defines"):
        await auth.load()
    monkeypatch.setenv("KUBECONFIG", ":".join([files[0], files[2]]))
    with pytest.raises(ValueError, match=r"/a: contexts\[c\].context.cluster is 'k', which no file defines"):
        await auth.load()


async def test_the_namespace_is_that_of_the_chosen_context(tmp_path: Path) -> None:
    both = config("one", context={"namespace": "chat"})
    both["contexts"].append({"name": "other", "context": {"cluster": "one", "user": "one"}})
    both["contexts"].append({"name": "nobody", "context": {"cluster": "one", "namespace": "open"}})
    path = write(tmp_path / "config", both)
    assert (await auth.load(path)).namespace == "chat"
    assert (await auth.load(path, "other")).namespace == "default"
    anonymous = await auth.load(path, "nobody")
    assert (anonymous.namespace, anonymous.token, anonymous.certificate) == ("open", None, None)


async def test_a_context_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "config"
    assert "no context 'prod'; there are: lab" in await refused(path, config(), "prod")
    assert "no context 'gone'; there are: lab" in await refused(path, config(current="gone"))
    assert "no context 'x'; there is none at all" in await refused(path, "", "x")
    # A cluster is never guessed.
    assert "current-context is not set; choose a context" in await refused(path, config(current=""))
    with pytest.raises(ValueError, match="no context 'x'; there is none at all"):
        await auth.load(None, "x")


async def test_a_given_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="/missing cannot be read: No such file"):
        await auth.load(str(tmp_path / "missing"))
    with pytest.raises(IsADirectoryError, match="cannot be read: Is a directory"):
        await auth.load(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("a: [", "is not YAML, line 2: did not find expected"),
        ("[1, 2]", "is not a kubeconfig: fields with values are needed"),
        ("clusters: [lab]", "is not a kubeconfig: clusters[0]: fields with values are needed"),
        ("clusters: [{name: lab}]", "clusters[0].cluster: Field required"),
        (config(cluster={"server": "kube:6443"}), "clusters[0].cluster.server: String should match"),
        (
            config(cluster={"certificate-authority-data": "%%"}),
            "cluster.certificate-authority-data: is not base64",
        ),
        (config(cluster={"insecure-skip-tls-verify": "yes"}), "insecure-skip-tls-verify: Input should be a valid bool"),
        (config(user={"token": 123456}), "users[0].user.token: Input should be a valid string"),
        (config(user={"exec": {"apiVersion": "client.authentication.k8s.io/v1alpha1", "command": "x"}}), "apiVersion"),
        (config(user={"username": "secret-name", "password": "secret"}), "users[lab].user.username: Kubernetes 1.19"),
        (config(user={"token": "secret", "as": "admin"}), "users[lab].user.as: impersonation is not supported"),
        (config(user={"auth-provider": {"name": "gcp"}}), "auth-provider.name: 'gcp' is not supported, only oidc"),
        (config(user={"auth-provider": {"name": "oidc", "config": {}}}), "auth-provider.config.id-token is missing"),
        (config(user={"client-key-data": encoded("secret")}), "client-certificate (or client-certificate-data) is mis"),
        (
            config(cluster={"certificate-authority-data": encoded("x")}),
            "the certificate authority is not a certificate",
        ),
        (
            config(user={"client-certificate-data": encoded("secret"), "client-key-data": encoded("secret")}),
            "users[lab].user: client certificate and key cannot be used",
        ),
    ],
)
async def test_what_cannot_be_used_is_named_by_file_and_field_and_no_value_is_shown(
    tmp_path: Path, content: dict[str, Any] | str, why: str
) -> None:
    text = await refused(tmp_path / "config", content)
    assert why in text
    assert "secret" not in text
    assert "123456" not in text


async def test_files_are_read_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config"
    write(tmp_path / "token", "x" * 100)
    content = config(user={"tokenFile": "token"})
    monkeypatch.setattr(auth, "TOKEN_LIMIT", 99)
    assert "tokenFile" in (text := await refused(path, content))
    assert "larger than 99 bytes" in text
    monkeypatch.setattr(auth, "TOKEN_LIMIT", 100)
    assert (await auth.load(str(path))).token == "x" * 100
    monkeypatch.setattr(kubeconfig, "FILE_LIMIT", path.stat().st_size - 1)
    assert "larger than" in await refused(path, content)


# --- users --------------------------------------------------------------------------------------------------------


async def test_a_token_of_a_file_is_read_again_and_comes_before_the_one_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path / "config", config(user={"token": "beside", "tokenFile": "token"}))
    write(tmp_path / "token", "one\n")
    found = await auth.load(path)
    assert (found.token, found.renew_seconds) == ("one", auth.TOKEN_SECONDS)
    write(tmp_path / "token", "two\n")
    assert (await auth.load(path)).token == "two"
    (tmp_path / "token").unlink()
    assert (await auth.load(path)).token == "beside"
    alone = write(tmp_path / "alone", config(user={"tokenFile": "token"}))
    with pytest.raises(FileNotFoundError, match=r"/alone: users\[lab\].user.tokenFile: .*/token cannot be read"):
        await auth.load(alone)
    write(tmp_path / "token", " \n")
    with pytest.raises(ValueError, match=r"users\[lab\].user.tokenFile: .*/token is empty"):
        await auth.load(alone)


async def test_the_id_token_of_an_oidc_provider_is_the_token(tmp_path: Path) -> None:
    user = {"auth-provider": {"name": "oidc", "config": {"id-token": "id", "refresh-token": "never sent"}}}
    assert (await auth.load(write(tmp_path / "config", config(user=user)))).token == "id"


# --- TLS ----------------------------------------------------------------------------------------------------------


@dataclass
class Calls:
    port: int
    tokens: list[str | None]


@asynccontextmanager
async def api_server(pki: InstallationPKI, *, asks: bool = False) -> AsyncGenerator[Calls]:
    """An API server of one pod, over TLS; `asks` for a client certificate of the same authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = pki.pair(process("operator"))
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(pair.certificate + pair.key)
        file.flush()
        context.load_cert_chain(file.name)
    if asks:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=pki.trust)
    calls = Calls(0, [])

    async def answer(request: web.Request) -> web.Response:
        calls.tokens.append(request.headers.get("Authorization"))
        return web.json_response({"metadata": {"name": request.match_info["name"]}})

    app = web.Application()
    app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    calls.port = runner.addresses[0][1]
    try:
        yield calls
    finally:
        await runner.cleanup()


NAME = process("operator").dns


async def reached(path: str) -> bool:
    """Whether the API server of a kubeconfig answers over TLS."""
    async with await KubeClient.from_environment(kubeconfig=path) as client:
        try:
            return (await client.get(PODS, "a", "ns"))["metadata"]["name"] == "a"
        except APIServerUnavailable:
            return False


async def test_the_certificate_authority_of_the_cluster_is_what_is_trusted(tmp_path: Path) -> None:
    pki = InstallationPKI()
    async with api_server(pki) as calls:
        server = {"server": f"https://127.0.0.1:{calls.port}", "tls-server-name": NAME}
        data = {"certificate-authority-data": encoded(pki.trust)}
        path = tmp_path / "config"
        assert await reached(write(path, config(cluster=server | data, user={"token": "t"})))
        assert calls.tokens == ["Bearer t"]
        write(tmp_path / "folder" / "ca.crt", pki.trust)
        file = {"certificate-authority": "folder/ca.crt"}
        assert await reached(write(path, config(cluster=server | file)))
        # What stands in the kubeconfig comes before the file.
        assert await reached(write(path, config(cluster=server | data | {"certificate-authority": "/nowhere"})))
        assert await reached(write(path, config(cluster={**server, "insecure-skip-tls-verify": True})))
        assert len(calls.tokens) == 4
        # Companions: another name, another authority, the system's authorities.
        assert not await reached(write(path, config(cluster=server | data | {"tls-server-name": "other.example"})))
        stranger = {"certificate-authority-data": encoded(InstallationPKI().trust)}
        assert not await reached(write(path, config(cluster=server | stranger)))
        assert not await reached(write(path, config(cluster=server)))
        assert len(calls.tokens) == 4


async def test_a_client_certificate_is_shown_from_the_kubeconfig_or_from_files(tmp_path: Path) -> None:
    pki = InstallationPKI()
    pair = pki.pair(process("gateway"))
    path = tmp_path / "folder" / "config"
    write(tmp_path / "folder" / "me.crt", pair.certificate)
    write(tmp_path / "me.key", pair.key)
    async with api_server(pki, asks=True) as calls:
        cluster = {
            "server": f"https://127.0.0.1:{calls.port}",
            "tls-server-name": NAME,
            "certificate-authority-data": encoded(pki.trust),
        }
        data = {"client-certificate-data": encoded(pair.certificate), "client-key-data": encoded(pair.key)}
        assert await reached(write(path, config(cluster=cluster, user=data)))
        # Relative to the kubeconfig's folder, not to the current one.
        assert await reached(
            write(path, config(cluster=cluster, user={"client-certificate": "me.crt", "client-key": "../me.key"}))
        )
        found = await auth.load(str(path))
        assert (found.certificate, found.key) == (pair.certificate.encode(), pair.key.encode())
        # Companions: without one, and with one of another authority.
        assert not await reached(write(path, config(cluster=cluster)))
        other = InstallationPKI().pair(process("gateway"))
        data = {"client-certificate-data": encoded(other.certificate), "client-key-data": encoded(other.key)}
        assert not await reached(write(path, config(cluster=cluster, user=data)))
    # A key that is not the certificate's.
    mixed = {"client-certificate-data": encoded(pair.certificate), "client-key-data": encoded(other.key)}
    assert "KEY_VALUES_MISMATCH" in await refused(path, config(user=mixed))


async def test_no_private_key_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    pair = InstallationPKI().pair(process("gateway"))
    data = {"client-certificate-data": encoded(pair.certificate), "client-key-data": encoded(pair.key)}
    assert (await auth.load(write(tmp_path / "config", config(user=data)))).key == pair.key.encode()
    await refused(tmp_path / "config", config(user=data | {"client-key-data": encoded("x")}))
    assert list((tmp_path / "temporary").iterdir()) == []


# --- exec plugins -------------------------------------------------------------------------------------------------


def plugin(folder: Path, code: str, **fields: Any) -> dict[str, Any]:
    """A user with a plugin in `bin/` of the kubeconfig's folder, which runs this Python."""
    script = folder / "bin" / "plugin"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!{sys.executable} -S\nimport json, os, sys, time\n{code}")
    script.chmod(0o755)
    return {"exec": {"apiVersion": V1, "command": "./bin/plugin", "interactiveMode": "Never", **fields}}


def prints(status: dict[str, Any], version: str = V1) -> str:
    return f"print(json.dumps({{'kind': 'ExecCredential', 'apiVersion': '{version}', 'status': {status!r}}}))"


@pytest.mark.parametrize("version", [V1, V1BETA1])
async def test_a_plugin_prints_a_token(tmp_path: Path, version: str) -> None:
    user = plugin(tmp_path, prints({"token": "of-plugin"}, version), apiVersion=version)
    found = await auth.load(write(tmp_path / "config", config(user=user)))
    assert (found.token, found.renew_seconds) == ("of-plugin", None)
    other = V1BETA1 if version == V1 else V1
    user = plugin(tmp_path, prints({"token": "of-plugin"}, other), apiVersion=version)
    assert f"answers in another version than apiVersion, {version}" in await refused(tmp_path / "x", config(user=user))


async def test_a_plugins_certificate_is_used_and_wins_over_the_users(tmp_path: Path) -> None:
    pair, other = InstallationPKI().pair(process("gateway")), InstallationPKI().pair(process("gateway"))
    printed = prints({"clientCertificateData": pair.certificate, "clientKeyData": pair.key})
    user = plugin(tmp_path, printed) | {
        "client-certificate-data": encoded(other.certificate),
        "client-key-data": encoded(other.key),
        "token": "kept",
    }
    found = await auth.load(write(tmp_path / "config", config(user=user)))
    assert found.certificate == pair.certificate.encode()
    assert found.key == pair.key.encode()
    assert found.token == "kept"


async def test_a_plugin_gets_arguments_variables_and_what_it_asks_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    code = """
about = [sys.argv[1:], os.environ["INHERITED"], os.environ["REGION"], json.loads(os.environ["KUBERNETES_EXEC_INFO"])]
print(json.dumps({"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1",
    "status": {"token": json.dumps(about)}}))"""
    given: dict[str, Any] = {"args": ["get", "token"], "env": [{"name": "REGION", "value": "eu"}]}
    trust = InstallationPKI().trust
    cluster = {
        "certificate-authority-data": encoded(trust),
        "tls-server-name": "kube",
        "extensions": [{"name": execplugin.CONFIG_EXTENSION, "extension": {"audience": "a"}}, {"name": "other"}],
    }

    async def told(**fields: Any) -> Any:
        user = plugin(tmp_path, code, **given, **fields)
        found = await auth.load(write(tmp_path / "config", config(user=user, cluster=cluster)))
        arguments, inherited, region, info = json.loads(found.token or "")
        assert (arguments, inherited, region) == (["get", "token"], "yes", "eu")
        assert (info["kind"], info["apiVersion"], info["spec"]["interactive"]) == ("ExecCredential", V1, False)
        return info["spec"].get("cluster")

    assert await told(provideClusterInfo=True) == {
        "server": SERVER,
        "tls-server-name": "kube",
        "certificate-authority-data": encoded(trust),
        "config": {"audience": "a"},
    }
    assert await told() is None


async def test_a_plugins_credentials_are_loaded_again_when_they_run_out(tmp_path: Path) -> None:
    async def renewed(ahead: timedelta) -> float:
        until = (datetime.now(UTC) + ahead).isoformat()
        user = plugin(tmp_path, prints({"token": "t", "expirationTimestamp": until}))
        return (await auth.load(write(tmp_path / "config", config(user=user)))).renew_seconds or 0

    assert 3500 < await renewed(timedelta(hours=1)) <= 3600
    assert await renewed(timedelta(hours=-1)) == auth.LEAST_SECONDS


async def test_the_client_runs_the_plugin_again_after_the_expiry_and_not_before(tmp_path: Path) -> None:
    pki = InstallationPKI()
    count = tmp_path / "count"
    code = f"""
n = int(open({str(count)!r}).read()) + 1
open({str(count)!r}, "w").write(str(n))
soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600))
print(json.dumps({{"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1",
    "status": {{"token": f"t{{n}}", "expirationTimestamp": soon}}}}))"""
    count.write_text("0")
    async with api_server(pki) as calls:
        cluster = {"server": f"https://127.0.0.1:{calls.port}", "insecure-skip-tls-verify": True}
        path = write(tmp_path / "config", config(cluster=cluster, user=plugin(tmp_path, code)))
        async with await KubeClient.from_environment(kubeconfig=path) as client:
            await client.get(PODS, "a", "ns")
            await client.get(PODS, "a", "ns")
            client._loaded -= 3601
            await client.get(PODS, "a", "ns")
    assert calls.tokens == ["Bearer t1", "Bearer t1", "Bearer t2"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("sys.stderr.write('log in\\nfirst'); sys.exit(3)", "'./bin/plugin' ended with status 3: log in first"),
        ("print('secret')", "printed something else than JSON"),
        ("print('[\"secret\"]')", "printed no ExecCredential: fields with values are needed"),
        (prints({}), "status: has neither a token nor a client certificate"),
        (prints({"clientKeyData": "secret"}), "status: has only one of clientCertificateData and clientKeyData"),
        (prints({"token": "secret", "expirationTimestamp": "soon"}), "status.expirationTimestamp: Input should be"),
        ("print('x' * 300)", "printed more than 200 bytes"),
    ],
)
async def test_a_plugin_that_gives_nothing_usable_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    monkeypatch.setattr(execplugin, "OUTPUT_LIMIT", 200)
    text = await refused(tmp_path / "config", config(user=plugin(tmp_path, code)))
    assert "users[lab].user.exec" in text
    assert why in text
    assert "secret" not in text


async def test_a_plugin_that_is_not_installed_is_named_with_its_hint(tmp_path: Path) -> None:
    path = tmp_path / "config"
    user = plugin(tmp_path, "", command="no-such-plugin", installHint="Get it at https://plugin.example.")
    text = await refused(path, config(user=user))
    assert "there is no command 'no-such-plugin' in PATH. Get it at https://plugin.example." in text
    user = plugin(tmp_path, "", command="./bin/missing", installHint="Get it.")
    assert "bin/missing' cannot be run: No such file or directory. Get it." in await refused(path, config(user=user))
    assert "in PATH; install it" in await refused(path, config(user=plugin(tmp_path, "", command="no-such-plugin")))


async def test_a_name_is_looked_up_in_the_path_that_the_plugin_gets(tmp_path: Path) -> None:
    user = plugin(tmp_path, prints({"token": "t"}), command="plugin")
    user["exec"]["env"] = [{"name": "PATH", "value": str(tmp_path / "bin")}]
    assert (await auth.load(write(tmp_path / "config", config(user=user)))).token == "t"


async def test_a_plugin_that_hangs_is_killed_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execplugin, "SECONDS", 0.5)
    mark = tmp_path / "survived"
    # The child keeps the pipes open after the plugin has ended.
    user = plugin(tmp_path, f"os.fork() or (time.sleep(1.5), open({str(mark)!r}, 'w'))")
    with pytest.raises(TimeoutError, match=r"users\[lab\].user.exec: the command './bin/plugin' did not end within"):
        await auth.load(write(tmp_path / "config", config(user=user)))
    await asyncio.sleep(1.5)
    assert not mark.exists()


async def test_a_plugin_that_needs_a_terminal_says_so_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    user = plugin(tmp_path, prints({"token": "t"}), interactiveMode="Always")
    assert "needs a terminal (interactiveMode: Always)" in await refused(tmp_path / "config", config(user=user))
    user = plugin(tmp_path, prints({"token": "t"}), interactiveMode="IfAvailable")
    assert (await auth.load(write(tmp_path / "config", config(user=user)))).token == "t"


# --- in a pod -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "serviceaccount"
    write(folder / "token", "one\n")
    write(folder / "ca.crt", InstallationPKI().trust)
    write(folder / "namespace", "chat")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return folder


async def test_a_pod_has_its_service_account(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await auth.load()
    assert (found.server, found.token, found.namespace) == ("https://10.0.0.1:443", "one", "chat")
    assert found.renew_seconds == auth.TOKEN_SECONDS
    assert found.ca == (pod / "ca.crt").read_bytes()
    assert found.tls.verify_mode is ssl.CERT_REQUIRED
    write(pod / "token", "two")
    assert (await auth.load()).token == "two"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert (await auth.load()).server == "https://[fd00::1]:443"
    (pod / "namespace").unlink()
    assert (await auth.load()).namespace == "default"


async def test_a_kubeconfig_comes_before_the_pods_account_unless_it_has_no_cluster(pod: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "config", config(user={"token": "of-file"}))
    assert (await auth.load(path)).token == "of-file"
    path = write(tmp_path / "config", config(context={"cluster": "", "namespace": "other"}))
    found = await auth.load(path)
    assert (found.token, found.namespace) == ("one", "other")
    write(tmp_path / "config", {"apiVersion": "v1", "kind": "Config", "contexts": None})
    assert (await auth.load(path)).token == "one"


async def test_without_any_credentials_it_says_where_it_looked(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pod / "ca.crt").write_text("nothing")
    with pytest.raises(ValueError, match="the service account's CA: the certificate authority is not a certificate"):
        await auth.load()
    (pod / "token").unlink()
    with pytest.raises(ValueError, match=r"/\.kube/config does not exist, and this is no pod .*; set KUBECONFIG"):
        await auth.load()
    write(pod / "token", "one")
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT")
    with pytest.raises(ValueError, match="this is no pod"):
        await auth.load()


def test_credentials_show_nothing_of_themselves() -> None:
    context = ssl.create_default_context()
    found = auth.ClusterCredentials(
        SERVER, context, "secret", None, None, "ns", False, None, b"secret", b"secret", None
    )
    assert "secret" not in repr(found)
