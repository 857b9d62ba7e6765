"""The node cache as namespaces see it: fetched once, verified, resumed, and private models stay private."""

import asyncio
import hashlib
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from shoal.api import reasons
from shoal.api.cache import FetchLine
from shoal.artifacts import ArtifactError
from shoal.artifacts.folders import digest_of
from shoal.cache import sharedfetches
from tests.support.cache import Shop, running, shop_with, short_folder
from tests.support.sources import model_files
from tests.support.waiting import until_async

URI = "hf://team/tiny"
OTHER = "hf://team/other"


@pytest.fixture
def root() -> Generator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture
def shop() -> Shop:
    return shop_with({URI: model_files(5000), OTHER: model_files(7000)})


async def refused(awaitable) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        await awaitable
    assert caught.value.reason in reasons.STAGE_REASONS
    return caught.value


async def test_a_model_is_fetched_once_per_node(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a", "b") as cache:
        first = await cache.fetch("a", URI)
        second = await cache.fetch("a", URI)
        elsewhere = await cache.fetch("b", URI)

        assert sorted(shop.downloads) == sorted(model_files())
        assert first.fetched_bytes == first.bytes == sum(map(len, model_files(5000).values()))
        assert (second.fetched_bytes, elsewhere.fetched_bytes) == (0, 0)
        assert cache.content("a", second) == cache.content("b", elsewhere) == model_files(5000)
        blobs = [p for p in (root / "blobs").rglob("*") if p.is_file()]
        assert {os.stat(p).st_nlink for p in blobs} == {3}, "one copy on the disk, two names in namespaces"


async def test_two_pods_that_ask_at_once_share_one_fetch_and_see_the_same_progress(root: Path, shop: Shop) -> None:
    shop.gate = asyncio.Event()
    async with running(root, shop, "a", "b") as cache:
        lines: tuple[list[FetchLine], list[FetchLine]] = ([], [])
        both = [
            asyncio.create_task(cache.fetch("a", URI, lines=lines[0])),
            asyncio.create_task(cache.fetch("b", URI, lines=lines[1])),
        ]
        for seen in lines:
            await until_async(lambda seen=seen: bool(seen) and seen[-1].state == "fetching" and seen[-1].bytes_done > 0)
        halves = {seen[-1].bytes_done for seen in lines}
        shop.gate.set()
        done = await asyncio.gather(*both)

        assert len(halves) == 1
        assert lines[0][-1].bytes_total == done[0].bytes
        assert sorted(shop.downloads) == sorted(model_files())
        assert shop.arrived == done[0].bytes
        assert cache.content("a", done[0]) == cache.content("b", done[1]) == model_files(5000)


async def test_a_private_model_is_for_namespaces_whose_own_credentials_the_source_takes(root: Path, shop: Shop) -> None:
    shop.tokens[URI] = "right"
    async with running(root, shop, "a", "b") as cache:
        done = await cache.fetch("a", URI, token="right")
        manifest = cache.index.get(done.model)
        assert manifest is not None

        for token in ("", "wrong"):
            for pinned in (None, manifest.manifest):
                error = await refused(cache.fetch("b", URI, token=token, manifest=pinned))
                assert error.reason == reasons.GATED
        assert list((cache.folder("b") / "models").iterdir()) == []
        assert (await cache.fetch("b", URI, token="right")).fetched_bytes == 0


async def test_a_model_that_the_namespace_has_needs_no_source(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a", "b") as cache:
        done = await cache.fetch("a", URI)
        model = cache.index.get(done.model)
        assert model is not None
        shop.models.clear()  # the hub is gone

        again = await cache.fetch("a", URI, manifest=model.manifest)
        assert (again.model, again.fetched_bytes, shop.asked) == (done.model, 0, 1)
        error = await refused(cache.fetch("b", URI, manifest=model.manifest))
        assert error.reason == reasons.SOURCE_NOT_FOUND


async def test_a_source_that_changed_is_refused_to_a_pinned_model(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a") as cache:
        done = await cache.fetch("a", URI)
        model = cache.index.get(done.model)
        assert model is not None
        shop.models[URI] = model_files(9000)

        error = await refused(cache.fetch("a", "hf://team/tiny", manifest="sha256:" + "0" * 64))
        assert error.reason == reasons.SOURCE_CHANGED
        assert "sha256:" + "0" * 64 in str(error)
        assert cache.content("a", await cache.fetch("a", URI)) == model_files(9000)


async def test_validators_of_another_origin_prove_nothing(root: Path, shop: Shop) -> None:
    # Whoever runs a server may claim any entity tag: it gets what it serves itself.
    shop.hashed = False
    async with running(root, shop, "a", "b") as cache:
        await cache.fetch("a", URI)
        shop.models["https://evil.example/x"] = model_files(5000)
        shop.downloads.clear()
        done = await cache.fetch("b", "https://evil.example/x")

        assert sorted(shop.downloads) == sorted(model_files())
        assert done.fetched_bytes == done.bytes
        assert cache.index.bytes == done.bytes, "what turned out to be the same lies on the disk once"


async def test_files_that_a_new_revision_shares_with_the_old_one_are_not_fetched_again(root: Path, shop: Shop) -> None:
    shop.models["hf://team/tiny@v2"] = model_files(5000) | {"config.json": b'{"model_type": "other"}'}
    async with running(root, shop, "a") as cache:
        await cache.fetch("a", URI)
        shop.downloads.clear()
        done = await cache.fetch("a", "hf://team/tiny@v2")

        assert shop.downloads == ["config.json"]
        assert cache.content("a", done) == shop.models["hf://team/tiny@v2"]


@pytest.mark.parametrize("vouched", [True, False])
async def test_what_nothing_vouches_for_is_fetched_anew(root: Path, shop: Shop, vouched: bool) -> None:
    shop.vouched = vouched
    async with running(root, shop, "a") as cache:
        await cache.fetch("a", URI)
        before = model_files(5000)["model.safetensors"]
        if not vouched:  # the same size: nothing of the manifest tells
            shop.models[URI]["model.safetensors"] = before[:-1] + b"!"
        shop.downloads.clear()
        done = await cache.fetch("a", URI)

        assert cache.content("a", done) == shop.models[URI]
        assert bool(shop.downloads) is not vouched


# --- damage and restarts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
async def test_a_corrupt_file_is_fetched_again(root: Path, shop: Shop, damage: str) -> None:
    async with running(root, shop, "a", "b") as cache:
        done = await cache.fetch("a", URI)
        sha = hashlib.sha256(model_files(5000)["model.safetensors"]).hexdigest()
        blob = cache.disk.blob(sha)
        blob.chmod(0o600)
        match damage:
            case "cut":
                os.truncate(blob, 100)
            case "changed":
                blob.write_bytes(bytes(blob.stat().st_size))
            case _:
                blob.unlink()
        shop.downloads.clear()
        model = cache.index.get(done.model)
        assert model is not None

        for namespace in ("a", "b"):
            again = await cache.fetch(namespace, URI, manifest=model.manifest)
            assert cache.content(namespace, again) == model_files(5000)
        assert shop.downloads == ["model.safetensors"]


async def test_a_file_that_was_only_touched_stays(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a") as cache:
        await cache.fetch("a", URI)
        os.utime(cache.disk.blob(hashlib.sha256(b"{}").hexdigest()))
        shop.downloads.clear()
        await cache.fetch("a", URI)
        assert shop.downloads == []


async def test_a_restarted_cache_has_what_it_had(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a") as cache:
        await cache.fetch("a", URI)
    shop.downloads.clear()
    async with running(root, shop, "a") as cache:
        done = await cache.fetch("a", URI)
        assert (shop.downloads, done.fetched_bytes) == ([], 0)
        assert cache.index.bytes == done.bytes


async def test_a_fetch_that_was_cut_off_goes_on_where_it_was(root: Path, shop: Shop) -> None:
    shop.gate = asyncio.Event()
    lines: list[FetchLine] = []
    async with running(root, shop, "a") as cache:
        task = asyncio.create_task(cache.fetch("a", URI, lines=lines))
        await until_async(lambda: bool(lines) and lines[-1].bytes_done > 0)
    await asyncio.gather(task, return_exceptions=True)
    arrived = shop.arrived
    shop.gate.set()
    async with running(root, shop, "a") as cache:
        done = await cache.fetch("a", URI)
        assert arrived > 0
        assert shop.arrived == done.bytes, "no byte was sent twice"
        assert cache.content("a", done) == model_files(5000)
        assert list((root / "partial").iterdir()) == []


async def test_garbage_of_a_killed_run_is_swept(root: Path, shop: Shop) -> None:
    async with running(root, shop, "a") as cache:
        done = await cache.fetch("a", URI)
        (root / "blobs/sha256/ff").mkdir()
        (root / "blobs/sha256/ff" / ("f" * 64)).write_bytes(b"x")
        (root / "work" / "half").mkdir()
        (cache.folder("a") / "models" / "unknown").mkdir()
        (root / "models" / "bad.json").write_text("{")
    async with running(root, shop, "a") as cache:
        assert not (root / "blobs/sha256/ff" / ("f" * 64)).exists()
        assert list((root / "work").iterdir()) == []
        assert [p.name for p in (cache.folder("a") / "models").iterdir()] == [done.model]
        assert cache.index.models == 1


# --- who waits ------------------------------------------------------------------------------------------------------


async def test_a_fetch_goes_on_while_anybody_waits_and_ends_with_the_last(root: Path, shop: Shop) -> None:
    shop.gate = asyncio.Event()
    async with running(root, shop, "a", "b") as cache:
        lines: list[FetchLine] = []
        first = asyncio.create_task(cache.fetch("a", URI))
        await until_async(lambda: shop.arrived > 0)
        second = asyncio.create_task(cache.fetch("b", URI, lines=lines))
        await until_async(lambda: bool(lines) and lines[-1].state == "fetching")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        shop.gate.set()
        done = await second
        assert shop.arrived == done.bytes

        shop.gate = asyncio.Event()
        third = asyncio.create_task(cache.fetch("a", OTHER))
        await until_async(lambda: shop.arrived > done.bytes)
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        shop.gate.set()
        await asyncio.sleep(0.05)
        assert len(shop.downloads) == 3, "nobody waits for the other model"


async def test_files_come_in_the_order_in_which_pods_asked(root: Path, shop: Shop) -> None:
    for uri, letter in ((URI, "a"), (OTHER, "b")):
        shop.models[uri] |= {f"{letter}{n}.bin": f"{uri} {n}".encode() for n in range(40)}
    shop.gate = asyncio.Event()
    async with running(root, shop, "a") as cache:
        first = asyncio.create_task(cache.fetch("a", URI))
        await until_async(lambda: shop.arrived > 0)
        second = asyncio.create_task(cache.fetch("a", OTHER))
        await until_async(lambda: cache.fetcher.under_way == 2)
        shop.gate.set()
        done = [await first, await second]
        letters = [n[0] for n in shop.downloads if n.endswith(".bin")]
        # As many as are under way at one time may overtake each other.
        assert letters[:20] == ["a"] * 20
        assert letters[-20:] == ["b"] * 20
        assert [cache.content("a", each) for each in done] == [shop.models[URI], shop.models[OTHER]]


async def test_an_adapter_does_not_wait_for_the_models_that_were_asked_for_before_it(
    root: Path, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharedfetches, "SMALL_BYTES", sum(map(len, shop.models[URI].values())))
    shop.models[OTHER] |= {f"{n}.bin": b"x" * 1000 for n in range(2 * sharedfetches.PARALLEL)}
    held = shop.gate = asyncio.Event()
    async with running(root, shop, "a") as cache:
        model = asyncio.create_task(cache.fetch("a", OTHER))
        await until_async(lambda: shop.arrived > 0)
        shop.gate = None
        adapter = await cache.fetch("a", URI)
        assert cache.content("a", adapter) == shop.models[URI]
        assert not model.done()
        held.set()
        assert cache.content("a", await model) == shop.models[OTHER]


async def test_adapters_whose_source_hangs_leave_their_turns_to_others(
    root: Path, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharedfetches, "SLOW_SECONDS", 0.05)
    shop.models[OTHER] |= {f"{n}.bin": b"x" * 1000 for n in range(2 * sharedfetches.PARALLEL)}
    held = shop.gate = asyncio.Event()
    async with running(root, shop, "a") as cache:
        hung = asyncio.create_task(cache.fetch("a", OTHER))
        await until_async(lambda: shop.arrived > 0)
        shop.gate = None
        assert cache.content("a", await cache.fetch("a", URI)) == shop.models[URI]
        assert not hung.done()
        held.set()
        assert cache.content("a", await hung) == shop.models[OTHER]


async def test_the_failure_of_a_fetch_that_another_pod_began_is_not_mine(root: Path, shop: Shop) -> None:
    shop.gate = asyncio.Event()
    shop.broken = True
    async with running(root, shop, "a", "b") as cache:
        lines: list[FetchLine] = []
        first = asyncio.create_task(cache.fetch("a", URI))
        await until_async(lambda: shop.arrived > 0)
        second = asyncio.create_task(cache.fetch("b", URI, lines=lines))
        await until_async(lambda: bool(lines) and lines[-1].state == "fetching")
        gate, shop.gate = shop.gate, None
        loop = asyncio.get_running_loop()
        first.add_done_callback(lambda _: loop.call_soon(setattr, shop, "broken", False))
        gate.set()

        error = await refused(first)
        assert error.reason == reasons.SOURCE_UNREACHABLE
        assert cache.content("b", await second) == model_files(5000)


async def test_names_that_lead_out_of_the_folder_are_refused(root: Path, shop: Shop) -> None:
    shop.models["hf://team/evil"] = {"../../b/models/x": b"1", "config.json": b"{}"}
    async with running(root, shop, "a") as cache:
        error = await refused(cache.fetch("a", "hf://team/evil"))
        assert error.reason == reasons.SOURCE_INVALID
        assert "leads out" in str(error)


async def test_a_source_that_nobody_thought_of_is_told(root: Path, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reason, whoever asked would ask again for ever."""

    def broken(*_: object, **_more: object) -> None:
        raise ValueError("invalid literal")

    monkeypatch.setattr(shop, "open", broken)
    async with running(root, shop, "a") as cache:
        error = await refused(cache.fetch("a", URI))
        assert (error.reason, str(error)) == (reasons.SOURCE_UNREACHABLE, f"{URI} cannot be fetched: ValueError")


@pytest.mark.parametrize("uri", ["file:///etc", "pvc://claim/x", "oci://r/i"])
async def test_only_what_comes_over_a_network_is_cached(root: Path, shop: Shop, uri: str) -> None:
    # The daemon's own files are none of a pod's business.
    shop.models[uri] = model_files()
    async with running(root, shop, "a") as cache:
        error = await refused(cache.fetch("a", uri))
        assert error.reason == reasons.SOURCE_INVALID
        assert shop.asked == 0


async def test_the_digest_is_that_of_the_folder(root: Path, shop: Shop) -> None:
    shop.models[URI]["sub/more.json"] = b"{}"
    shop.hashed = False
    async with running(root, shop, "a") as cache:
        done = await cache.fetch("a", URI)
        assert done.digest == digest_of(cache.folder("a") / done.path)
