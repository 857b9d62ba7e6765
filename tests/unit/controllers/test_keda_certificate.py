"""The certificate by which KEDA knows the operator: over real TLS, from files that change."""

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from shoal.controllers.keda import server as server_module
from shoal.controllers.keda.tls import CertificateFiles
from tests.support.kedaclient import REF, Leadership, Said, keda, leading, scaler, wants, write_certificate
from tests.support.waiting import until_async

SECRET = "shoal-scaler-tls"


def said() -> Said:
    book = Said()
    book.say(wants(2))
    return book


async def test_keda_knows_the_operator_by_the_ca(tmp_path: Path) -> None:
    ca = write_certificate(tmp_path)
    files = CertificateFiles(tmp_path, SECRET)
    server = scaler(said(), Leadership(), certificate=files)
    async with leading(server):
        async with keda(server.port, ca) as stub:
            assert (await stub.IsActive(REF, timeout=10)).result
        assert files.certificate is not None
        assert files.certificate.ca == ca
        stranger = write_certificate(tmp_path / "stranger")
        async with keda(server.port, stranger) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.IsActive(REF, timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with keda(server.port) as stub:  # without TLS
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.IsActive(REF, timeout=10)


async def test_a_new_certificate_is_used_for_the_next_connection(tmp_path: Path) -> None:
    before = write_certificate(tmp_path)
    files = CertificateFiles(tmp_path, SECRET)
    heard: list[str | None] = []
    files.changed.append(lambda: heard.append(files.certificate.ca if files.certificate else None))
    server = scaler(said(), Leadership(), certificate=files)
    async with leading(server), keda(server.port, before) as old:
        assert (await old.IsActive(REF, timeout=10)).result
        after = write_certificate(tmp_path)
        await files.refresh()
        async with keda(server.port, after) as new:
            assert (await new.IsActive(REF, timeout=10)).result
        assert (await old.IsActive(REF, timeout=10)).result  # its connection goes on
    assert heard == [before, after]


async def test_it_waits_for_the_secret_and_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "RETRY_SECONDS", 0.1)
    server = scaler(said(), Leadership(), certificate=CertificateFiles(tmp_path, SECRET))
    task = asyncio.ensure_future(server.run())
    await until_async(lambda: server.problem is not None)
    assert server.problem == (
        "Secret shoal-scaler-tls is not mounted, so KEDA cannot be answered. The kubelet mounts it within about a "
        "minute of its creation: the operator creates shoal-scaler-tls, and one that you name in "
        "operator.scaling.keda.tlsSecretName is yours to create"
    )
    assert server.port is None
    ca = write_certificate(tmp_path)
    await until_async(lambda: server.port is not None)
    assert server.problem is None
    async with keda(server.port, ca) as stub:
        assert (await stub.IsActive(REF, timeout=10)).result
    task.cancel()
    await asyncio.wait([task])


async def test_a_pair_that_does_not_fit_leaves_the_last_one_in_use(tmp_path: Path) -> None:
    write_certificate(tmp_path)
    files = CertificateFiles(tmp_path, SECRET)
    first = await files.refresh()
    assert first is not None
    write_certificate(tmp_path / "other")
    (tmp_path / "tls.key").write_bytes((tmp_path / "other" / "tls.key").read_bytes())

    assert await files.refresh() is first
    assert files.problem is not None
    assert files.problem.startswith(
        "the certificate in Secret shoal-scaler-tls cannot be used: tls.crt and tls.key do not go together"
    )
    (tmp_path / "tls.crt").write_bytes((tmp_path / "other" / "tls.crt").read_bytes())
    assert await files.refresh() is not first
    assert files.problem is None


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: write_certificate(folder, days=-1), r"it ended on \d{4}-\d\d-\d\d; renew it$"),
        (lambda folder: (folder / "tls.crt").write_text("not PEM"), "do not go together"),
        (lambda folder: (folder / "ca.crt").write_bytes(b"\xff\xfe"), "ca.crt is not text"),
    ],
    ids=["ended", "no certificate", "no text"],
)
async def test_what_cannot_be_used_is_told(tmp_path: Path, spoil, told: str) -> None:
    write_certificate(tmp_path)
    spoil(tmp_path)
    files = CertificateFiles(tmp_path, SECRET)
    assert await files.refresh() is None
    assert files.problem is not None
    with pytest.raises(ValueError, match=told):
        raise ValueError(files.problem)


async def test_one_of_a_public_authority_needs_no_ca(tmp_path: Path) -> None:
    write_certificate(tmp_path, with_ca=False)
    found = await CertificateFiles(tmp_path, SECRET).refresh()
    assert found is not None
    assert found.ca is None


async def test_no_key_in_what_is_printed(tmp_path: Path) -> None:
    write_certificate(tmp_path)
    found = await CertificateFiles(tmp_path, SECRET).refresh()
    assert found is not None
    assert "PRIVATE" not in repr(found)
    assert "key" not in repr(found)
