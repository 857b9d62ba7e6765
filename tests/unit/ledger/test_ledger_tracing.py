"""What a collector gets of a ledger: its calls, one span for a batch however many records it has."""

from tests.support.ledger import record, served
from tests.support.traces import collecting, environment_of


async def test_a_batch_is_one_span_and_a_refusal_says_so(tmp_path, monkeypatch):
    async with collecting() as collector:
        for name, value in environment_of(collector).items():
            monkeypatch.setenv(name, value)
        async with served(f"sqlite:///{tmp_path}/ledger.sqlite", tmp_path) as ledger:
            assert (await ledger.send(*(record(f"request-{n}") for n in range(20))))[0] == 200
            assert (await ledger.call("POST", "/v1/records", b"no records"))[0] == 400
            assert (await ledger.call("POST", "/v1/records", b"[]", Authorization="Bearer wrong"))[0] == 401
            async with ledger.totals():
                pass
    spans = [
        (span.name, span.kind, span.attributes["http.response.status_code"], span.attributes["shoal.caller"])
        for span in sorted(collector.spans, key=lambda span: span.began)
    ]
    assert spans == [
        ("POST /v1/records", "SERVER", 200, "gateway"),
        ("POST /v1/records", "SERVER", 400, "gateway"),
        ("GET /v1/totals", "SERVER", 200, "gateway"),
    ]
    assert {span.service for span in collector.spans} == {"shoal-ledger"}


async def test_a_database_that_is_away_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "no").write_text("a file, where a folder would have to be")
    async with collecting() as collector:
        for name, value in environment_of(collector).items():
            monkeypatch.setenv(name, value)
        async with served(f"sqlite:///{tmp_path}/no/such/folder/x.sqlite", tmp_path, ready=False) as ledger:
            await ledger.send(record("request-1"))
    statuses = {(span.attributes["http.response.status_code"], span.error is not None) for span in collector.spans}
    assert statuses == {(503, True)}
