"""Watches, lists and answers to writes overtake each other; the store never goes back."""

from typing import Any

from shoal.kube.store import Table


def obj(name: str, version: str, *, uid: str = "u1", generation: int = 1, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "uid": uid, "resourceVersion": version, "generation": generation},
        "spec": spec,
    }


def table() -> Table[dict[str, Any]]:
    return Table(lambda raw: raw["spec"] or None, indexes={"color": lambda spec: [spec["color"]]})


def test_an_answer_to_a_write_is_seen_before_its_watch_event() -> None:
    t = table()
    t.upsert(obj("a", "1", color="red"))
    mark = t.mark()
    t.upsert(obj("a", "2", generation=2, color="blue"), since=mark)
    assert t.get("a") == {"color": "blue"}
    t.upsert(obj("a", "1b", generation=1, color="red"))  # the watch runs behind
    assert t.get("a") == {"color": "blue"}


def test_what_a_watch_said_after_a_call_began_wins() -> None:
    t = table()
    t.upsert(obj("a", "1", color="red"))
    mark = t.mark()
    t.upsert(obj("a", "3", color="green"))
    t.upsert(obj("a", "2", color="blue"), since=mark)
    assert t.get("a") == {"color": "green"}


def test_a_list_finds_missed_deletions_and_does_not_take_what_came_meanwhile() -> None:
    t = table()
    heard: list[tuple[str, Any, Any]] = []
    t.upsert(obj("old", "1", uid="u1", color="red"))
    t.listeners.append(lambda key, before, after: heard.append((key, before, after)))
    mark = t.mark()
    t.upsert(obj("new", "9", uid="u2", color="blue"))  # made after the list was read
    assert t.absent(set(), since=mark) == 1
    assert list(t.items()) == [("new", {"color": "blue"})]
    assert heard[-1] == ("old", {"color": "red"}, None)


def test_a_deleted_object_does_not_come_back_by_a_late_answer() -> None:
    t = table()
    t.upsert(obj("a", "1", color="red"))
    mark = t.mark()
    t.remove("a", "u1")
    t.upsert(obj("a", "1", color="red"), since=mark)
    t.upsert(obj("a", "2", color="red"))
    assert t.get("a") is None
    t.upsert(obj("a", "3", uid="u2", color="blue"))
    assert t.get("a") == {"color": "blue"}
    t.remove("a", "u1")  # a late deletion of the namesake
    assert t.get("a") == {"color": "blue"}


def test_indexes_follow_the_values() -> None:
    t = table()
    t.upsert(obj("a", "1", color="red"))
    t.upsert(obj("b", "1", uid="u2", color="red"))
    assert len(t.by("color", "red")) == 2
    t.upsert(obj("a", "2", color="blue"))
    assert t.by("color", "red") == ({"color": "red"},)
    t.remove("b")
    assert t.by("color", "red") == ()
    assert t.by("color", "blue") == ({"color": "blue"},)


def test_one_object_that_cannot_be_read_does_not_hide_the_others() -> None:
    t: Table[int] = Table(lambda raw: int(raw["spec"]["n"]))
    t.upsert(obj("bad", "1", n="x"))
    t.upsert(obj("good", "1", uid="u2", n="7"))
    assert dict(t.items()) == {"good": 7}
