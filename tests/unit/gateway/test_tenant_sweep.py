"""What is counted of tenants under routes with limits: it is dropped when no limit needs it, a tenant that comes again
has its right share, and no message has more than another gateway takes."""

import orjson
import pytest
from structlog.testing import capture_logs

from shoal.api.demand import TenantUse
from shoal.core.quota.account import Account
from shoal.core.quota.limits import Cost, Limit, Limits
from shoal.core.quota.peerusage import GatewayPeer
from shoal.gateway import tenantdemand
from shoal.gateway.demand import DemandState
from shoal.gateway.tenantdemand import TenantUsageState, route_account
from shoal.net.stream import LONGEST_MESSAGE, ListenerIdentity, StreamPeer
from shoal.signals.demand import DemandStream, Uses

NAME = route_account("acme", "uid-front")
COST = Cost(40)


class Two:
    """Two gateways, of which each hears what the other publishes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.books = [TenantUsageState(boot=boot, clock=lambda: self.now) for boot in "ab"]
        self.tell_all()  # both run for long, and know each other
        self.wait(70)

    def wait(self, seconds: float) -> None:
        """Both publish and drop as every second."""
        for _ in range(int(seconds)):
            self.now += 1
            self.tell()
            for book in self.books:
                book.sweep()

    def tell(self) -> None:
        for which, book in enumerate(self.books):
            if (said := book.take()) is not None:
                self._hear(which, said, full=False)

    def tell_all(self) -> None:
        """As after a stream that broke."""
        for which, book in enumerate(self.books):
            self._hear(which, book.full(), full=True)

    def _hear(self, which: int, said: bytes, *, full: bool) -> None:
        uses = {n: None if row is None else TenantUse.model_validate(row) for n, row in orjson.loads(said).items()}
        self.books[1 - which].peer_reported("ab"[which], "ab"[which], uses, full)

    def ask(self, which: int, times: int = 1) -> None:
        for _ in range(times):
            assert self.books[which].of(NAME).reserve(self.now, COST, lambda: ()) is None
            self.books[which].note(NAME)

    def end(self, which: int, tokens: int = 30) -> None:
        self.books[which].accounts[NAME].settle(self.now, COST, tokens)
        self.books[which].ended(NAME)

    def left(self, which: int, most: int) -> int:
        """Of a limit on requests per minute, at a gateway that hears the other."""
        account = self.books[which].of(NAME)
        others, _ = account.peer_usage.used("requests", most, self.now, [GatewayPeer("ba"[which], self.now)])
        return most - account._requests.sum(self.now) - others

    def takes(self, which: int, most: int) -> int:
        """How many further requests of a limit on requests per minute a gateway lets pass at once."""
        account = self.books[which].of(NAME)
        account.change(Limits(requests=most))
        peers = [GatewayPeer("ba"[which], self.now)]
        return sum(account.reserve(self.now, Cost(1), lambda: peers) is None for _ in range(most))


def test_what_no_limit_needs_is_dropped_at_all_gateways_and_tenants_stay():
    two = Two()
    two.ask(0, 7)
    two.books[0].of("acme")
    for _ in range(7):
        two.end(0)
    two.wait(50)
    assert all(NAME in book.accounts for book in two.books)
    assert two.left(1, 20) == 13
    two.wait(20)
    assert [list(book.accounts) for book in two.books] == [["acme"], []]
    assert [orjson.loads(book.full()) for book in two.books] == [{}, {}]


def test_what_runs_stays_and_is_told_as_ended_in_the_end():
    two = Two()
    two.ask(0)
    two.wait(200)
    assert two.books[1].accounts[NAME].peer_usage.used("concurrent", 0, two.now, ())[0] == 1
    two.end(0, tokens=0)
    two.wait(5)
    assert not any(book.accounts for book in two.books)


@pytest.mark.parametrize("also", [0, 1])
def test_a_tenant_that_comes_again_has_its_right_share_everywhere(also: int):
    """Also where the other gateway has counted something meanwhile."""
    two = Two()
    two.ask(0, 7)
    for _ in range(7):
        two.end(0)
    two.wait(58)
    two.ask(1, also)
    two.wait(40)
    assert NAME not in two.books[0].accounts or also
    two.ask(0, 9)
    two.tell()
    assert (two.left(0, 20), two.left(1, 20)) == (20 - 9 - also, 20 - 9 - also)
    two.ask(1, 2)
    two.tell()
    assert (two.left(0, 20), two.left(1, 20)) == (20 - 11 - also, 20 - 11 - also)
    assert two.takes(1, 20) == (9 - also) // 2


def test_a_request_just_before_others_are_told_that_there_is_nothing_counts_once():
    two = Two()
    two.ask(0, 2)
    two.end(0)
    two.end(0)
    two.tell()
    two.now += 62
    two.books[0].sweep()
    two.ask(0, 5)  # the sweep's message is not out yet
    two.tell()
    assert two.left(1, 20) == 15


def test_a_gateway_that_missed_the_end_learns_of_it_from_the_full_state():
    two = Two()
    two.ask(0, 3)
    two.tell()
    for _ in range(3):
        two.end(0)
    two.now += 62
    for _ in range(3):
        two.books[0].sweep()
        two.books[0].take()  # the stream is broken
    assert NAME not in two.books[0].accounts
    two.tell_all()
    two.ask(0, 5)
    two.tell()
    assert two.left(1, 20) == 15
    account = two.books[1].accounts[NAME]
    assert account.peer_usage.used("concurrent", 0, two.now, ())[0] == 5


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(("before", "after"), [((40, 30), (50, 30)), ((40, 10), (3, 300)), ((3, 300), (40, 10))])
def test_all_counts_that_came_after_an_end_that_was_missed(
    before: tuple[int, int], after: tuple[int, int], *, dropped: bool
):
    """The counters began at zero again, and both or one of them are larger than before when they are heard again."""
    two = Two()

    def use(requests: int, tokens: int) -> None:
        two.ask(0, requests)
        for _ in range(requests):
            two.end(0, tokens)

    use(*before)
    two.tell()
    two.now += 65
    for _ in range(3 if dropped else 1):
        two.books[0].sweep()
        two.books[0].take()  # the stream is broken
    assert (NAME in two.books[0].accounts) is not dropped
    use(*after)
    two.tell_all()
    of_others = two.books[1].accounts[NAME].peer_usage
    used = of_others.used("requests", 0, two.now, ())[0], of_others.used("tokens", 0, two.now, ())[0]
    assert used == (after[0], after[0] * after[1])
    two.tell_all()
    assert two.left(1, 100) == 100 - after[0], "said again, it counts once"


def test_a_gateway_of_an_older_version_is_noticed_by_smaller_counters():
    two = Two()
    for use in (TenantUse(requests=40, tokens=400), TenantUse(requests=3, tokens=900)):
        two.now += 65
        two.books[1].peer_reported("a", "a", {NAME: use})
    of_others = two.books[1].accounts[NAME].peer_usage
    assert [of_others.used(limit, 0, two.now, ())[0] for limit in ("requests", "tokens")] == [3, 900]


def test_use_of_unknown_time_is_not_dropped_before_it_counts_no_more():
    book = TenantUsageState(clock=lambda: 1000.0)
    book.peer_reported("b", "b", {NAME: TenantUse(requests=9)}, True)
    book.peer_reported("b", "b", {NAME: None})
    book.sweep()
    assert NAME in book.accounts


def test_a_sweep_takes_a_part_of_very_many():
    now = 1000.0
    book = TenantUsageState(clock=lambda: now)
    for number in range(3 * tenantdemand.SWEPT):
        book.of(route_account(f"tenant-{number}", "uid-front"))
    for left in (2, 1, 0):
        book.sweep()
        assert len(book.accounts) == left * tenantdemand.SWEPT


# --- messages ---------------------------------------------------------------------------------------------------------


def many(book: TenantUsageState, count: int) -> None:
    for number in range(count):
        name = route_account(f"tenant-{number}", "00000000-0000-0000-0000-000000000000")
        assert book.of(name).reserve(book._clock(), COST, lambda: ()) is None
        book.note(name)


def heard_by(uses: Uses) -> DemandStream:
    nobody = StreamPeer("g", "g", "h", "k")
    return DemandStream(nobody, None, lambda *_: None, ListenerIdentity(), uses)  # pyright: ignore[reportArgumentType]


def test_a_full_message_leaves_out_routes_rather_than_to_break_the_stream(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tenantdemand, "MOST_BYTES", 10_000)
    book = TenantUsageState()
    many(book, 200)
    book.of("acme").reserve(1.0, COST, lambda: ())
    book.note("acme")
    with capture_logs() as logs:
        said = book.full()
    assert len(said) <= 10_000
    assert "acme" in orjson.loads(said)
    assert [line["log_level"] for line in logs] == ["warning"]
    assert logs[0]["left_out"] == 201 - len(orjson.loads(said))
    monkeypatch.setattr(tenantdemand, "MOST_NAMED", 10)
    monkeypatch.setattr(tenantdemand, "MOST_BYTES", LONGEST_MESSAGE)
    assert len(orjson.loads(book.full())) == 10


def test_of_more_accounts_than_a_full_message_names_the_others_cost_nothing(monkeypatch: pytest.MonkeyPatch):
    """All were encoded, and some twice, before most of them were left out: that delayed requests and streams."""
    monkeypatch.setattr(tenantdemand, "MOST_BYTES", 100_000)
    monkeypatch.setattr(tenantdemand, "MOST_RECENT", 100_000)
    book = TenantUsageState()
    many(book, 5_000)
    encoded: list[Account] = []
    counts = Account.counts
    monkeypatch.setattr(Account, "counts", lambda account: encoded.append(account) or counts(account))
    for recent in (False, True):
        encoded.clear()
        named = len(orjson.loads(book.full(recent=recent)))
        assert 0 < named < 2_000
        assert len(encoded) < 5_000


@pytest.mark.parametrize("most", [300, 10_000, 60_000, 10**6])
def test_a_full_message_names_as_much_as_fits(monkeypatch: pytest.MonkeyPatch, most: int):
    book = TenantUsageState()
    many(book, 1_200)
    whole = orjson.loads(book.full())
    assert len(whole) == 1_200
    monkeypatch.setattr(tenantdemand, "MOST_BYTES", most)
    said = book.full()
    rows = orjson.loads(said)
    assert rows == {name: whole[name] for name in rows}
    longest = max(len(orjson.dumps({name: row})) for name, row in whole.items())
    assert len(said) <= most
    assert len(rows) == len(whole) or len(said) > most - longest
    assert book.left_out == len(whole) - len(rows)
    with_recent = book.full(recent=True)
    assert orjson.loads(with_recent).keys() == (whole if most == 10**6 else rows).keys()
    assert (b"recent" in with_recent) == (most == 10**6)


def test_what_a_full_message_leaves_out_stays_known(monkeypatch: pytest.MonkeyPatch):
    """A halted canary causes a full message at all other gateways."""
    sender, reader = DemandState(), TenantUsageState(clock=lambda: 1000.0)
    stream = heard_by(reader.peer_reported)

    def restate() -> None:
        stream.take(b'{"boot":"b","seq":0,"full":true,"models":' + sender.full() + b"}")

    def known(limit: Limit) -> set[int]:
        return {account.peer_usage.used(limit, 0, 1000.0, ())[0] for account in reader.accounts.values()}

    restate()
    for _ in range(5):
        many(sender.tenants, 200)
    restate()
    assert known("requests") == known("concurrent") == {5}
    monkeypatch.setattr(tenantdemand, "MOST_BYTES", 10_000)
    restate()
    assert known("concurrent") == {5}
    monkeypatch.setattr(tenantdemand, "MOST_BYTES", LONGEST_MESSAGE)
    many(sender.tenants, 200)
    restate()
    assert known("requests") == known("concurrent") == {6}
    sender.tenants.accounts.clear()
    restate()
    assert known("concurrent") == {0}, "a whole message names all"


def test_what_ended_while_the_stream_was_broken_does_not_run_for_ever(monkeypatch: pytest.MonkeyPatch):
    """Its end was not heard, and its counts are left out of the full message, or dropped."""
    now = 1000.0
    sender, reader = DemandState(), TenantUsageState(clock=lambda: now)
    sender.tenants._clock = lambda: now
    stream = heard_by(reader.peer_reported)

    def restate() -> None:
        stream.take(b'{"boot":"b","seq":0,"full":true,"models":' + sender.full() + b"}")

    restate()
    many(sender.tenants, 200)
    restate()
    ended = list(sender.tenants.accounts)[50:]
    for name in ended:
        sender.tenants.accounts[name].settle(now, COST, 0)
        sender.tenants.ended(name)
    monkeypatch.setattr(tenantdemand, "MOST_BYTES", 10_000)
    restate()
    assert 0 < sender.tenants.left_out < len(ended)
    use = {name: account.peer_usage for name, account in reader.accounts.items()}
    assert {name for name in use if not use[name].used("concurrent", 0, now, ())[0]} == set(ended)
    assert {use[name].used("requests", 0, now, ())[0] for name in use} == {1}
    now += 62
    assert not any(use[name].used("tokens", 0, now, ())[0] for name in ended)


def test_very_many_changes_are_told_in_several_messages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tenantdemand, "MOST_CHANGED", 50)
    due: list[None] = []
    book = TenantUsageState(lambda: due.append(None))
    many(book, 120)
    due.clear()
    told = [orjson.loads(said) for said in iter(book.take, None)]
    assert [len(each) for each in told] == [50, 50, 20]
    assert len({name for each in told for name in each}) == 120
    assert len(due) == 2


def test_a_stream_says_which_message_is_the_full_one():
    said: list[tuple[object, ...]] = []
    stream = heard_by(lambda *uses: said.append(uses))
    stream.take(b'{"boot":"b","seq":0,"full":true,"models":{},"tenants":{}}')
    stream.take(orjson.dumps({"boot": "b", "seq": 1, "models": {}, "tenants": {NAME: None}}))
    assert said == [("g", "b", {}, True, False, {}), ("g", "b", {NAME: None}, False, False, {})]
