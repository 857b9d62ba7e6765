"""A namespace's share in the node cache: what is applied, what is kept waiting, what goes."""

from shoal.api import names
from shoal.api.config import Cache
from shoal.cache.volumes import namespace_of
from shoal.core.cachevolumes import ClaimSeen, Share, VolumeSeen, decide
from shoal.manifests import cache as manifests

CONFIG = Cache(enabled=True)
TEAM = manifests.share("team", CONFIG)
BOUND = VolumeSeen("Bound", "u1")
CLAIM = ClaimSeen("u1", "Bound")


def test_the_volume_is_read_only_for_one_claim_and_its_pods() -> None:
    volume, claim = manifests.volume("team", CONFIG), manifests.claim("team", CONFIG)
    assert volume["spec"]["mountOptions"] == ["ro"]
    assert volume["spec"]["local"] == {"path": "/var/lib/shoal/cache/namespaces/team"}
    assert volume["spec"]["claimRef"]["namespace"] == claim["metadata"]["namespace"] == "team"
    assert volume["spec"]["claimRef"]["name"] == claim["metadata"]["name"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == ""
    assert manifests.pod_volume(CONFIG)["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert manifests.POD_MOUNT["readOnly"] is True


def test_the_volume_is_where_the_cache_runs() -> None:
    def terms(config: Cache) -> list[dict]:
        (term,) = manifests.volume("team", config)["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
        return term["matchExpressions"]

    assert terms(CONFIG) == [{"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}]
    own = Cache(node_selector={"pool": "gpu"})
    assert terms(own) == [{"key": "pool", "operator": "In", "values": ["gpu"]}]


def test_what_cannot_be_changed_in_a_volume_makes_another_pair() -> None:
    moved, chosen = Cache(host_path="/mnt/nvme"), Cache(node_selector={"pool": "gpu"})
    assert len({manifests.share("team", config) for config in (CONFIG, moved, chosen)}) == 3
    assert manifests.share("team", Cache(size="1Ti")) == TEAM, "the size can"


def test_sizes_are_written_as_the_api_server_writes_them() -> None:
    sizes = {"500Gi": "500Gi", "1024Gi": "1Ti", "2048Mi": "2Gi", "1000G": "1T", "500G": "500G", "1": "1"}
    for given, stored in sizes.items():
        assert manifests.volume("team", Cache(size=given))["spec"]["capacity"]["storage"] == stored


def test_the_daemon_knows_its_own_volumes_by_name_and_claim() -> None:
    assert namespace_of(manifests.volume("team", CONFIG)) == "team"
    foreign = manifests.volume("team", CONFIG)
    foreign["spec"]["claimRef"]["namespace"] = "other"
    assert namespace_of(foreign) is None
    climbing = manifests.volume("../x", CONFIG)
    assert namespace_of(climbing) is None
    unclaimed = manifests.volume("team", CONFIG)
    del unclaimed["spec"]["claimRef"]
    assert namespace_of(unclaimed) is None
    longest = "n" * 63
    assert namespace_of(manifests.volume(longest, CONFIG)) == longest
    # The daemon has the folder at /cache; a socket's path has at most 107 bytes.
    assert len(f"/cache/{manifests.NAMESPACES}/{longest}/{names.CACHE_SOCKET}") <= 107


def test_a_namespace_with_a_cached_model_gets_its_share() -> None:
    plan = decide([TEAM], [], {}, {})
    assert (plan.keep, plan.release, plan.remove_claim, plan.remove_volume) == ((TEAM,), (), (), ())
    plan = decide([TEAM], [TEAM], {TEAM: BOUND}, {TEAM: CLAIM})
    assert (plan.release, plan.remove_claim, plan.remove_volume) == ((), (), ())


def test_a_claim_that_was_deleted_and_made_again_binds_again() -> None:
    for volume, claim in (
        (VolumeSeen("Released", "u1"), None),
        (VolumeSeen("Released", "u1"), ClaimSeen("u2", "Pending")),
        (VolumeSeen("Bound", "u1"), ClaimSeen("u2", "Pending")),
    ):
        plan = decide([TEAM], [], {TEAM: volume}, {TEAM: claim} if claim else {})
        assert plan.release == (TEAM,)
    assert decide([TEAM], [], {TEAM: VolumeSeen("Available")}, {TEAM: ClaimSeen("u2", "Pending")}).release == ()


def test_an_unused_share_goes_claim_first_and_not_below_a_pod() -> None:
    plan = decide([], [TEAM], {TEAM: BOUND}, {TEAM: CLAIM})
    assert (plan.remove_claim, plan.remove_volume) == ((), ())
    plan = decide([], [], {TEAM: BOUND}, {TEAM: CLAIM})
    assert (plan.remove_claim, plan.remove_volume) == ((TEAM,), ())
    going = ClaimSeen("u1", "Bound", deleting=True)
    plan = decide([], [], {TEAM: BOUND}, {TEAM: going})
    assert (plan.remove_claim, plan.remove_volume) == ((), ())
    plan = decide([], [], {TEAM: VolumeSeen("Released", "u1")}, {})
    assert (plan.remove_claim, plan.remove_volume) == ((), (TEAM,))


def test_a_share_of_an_earlier_configuration_goes_when_its_pods_are_gone() -> None:
    old = Share("team", "shoal-cache-000000")
    volumes, claims = {old: BOUND, TEAM: BOUND}, {old: CLAIM, TEAM: CLAIM}
    assert decide([TEAM], [old, TEAM], volumes, claims).remove_claim == ()
    assert decide([TEAM], [TEAM], volumes, claims).remove_claim == (old,)


def test_a_claim_that_lost_its_volume_is_made_anew_once_no_pod_has_it() -> None:
    lost = {TEAM: ClaimSeen("u1", "Lost")}
    assert decide([TEAM], [TEAM], {}, lost).remove_claim == ()
    assert decide([TEAM], [], {}, lost).remove_claim == (TEAM,)
