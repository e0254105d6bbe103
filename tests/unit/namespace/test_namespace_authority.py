"""The authority on a real store: refusals that look alike, disabling, terms, leases, restarts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from copyhold.namespace import errors
from copyhold.namespace.authority import Authority
from copyhold.namespace.records import IncarnationRecord, NamespaceRecord, namespace_key
from copyhold.namespace.secrets import Secrets


@pytest.fixture
def authority(house: Any) -> Authority:
    return house.open()


def outcome(
    call: Callable[[], object],
) -> tuple[type[BaseException], str, tuple[object, ...], dict[str, Any]]:
    """Everything a caller can see of a refusal."""
    with pytest.raises(errors.NamespaceError) as caught:
        call()
    return type(caught.value), str(caught.value), caught.value.args, dict(vars(caught.value))


def test_a_credential_becomes_a_grant_that_verifies(authority: Authority, house: Any) -> None:
    authority.create_tenant("acme")
    credential = authority.create_key("acme")
    authorization = authority.authorize(credential, None, "req-1")
    grant = authorization.grant
    authority.identity.verifier().verify(grant, house.clock.now_s(), authority.floors)
    assert (grant.principal, grant.namespace, grant.generation) == ("acme", "acme", 1)
    assert grant.rights == ("reuse", "publish")
    assert authorization.secret == authority.namespace_secret("acme", 1)
    assert authorization.secret.hex() not in repr(authorization)
    assert credential.split("_")[2] not in repr(authorization)


def test_rights_of_the_key_are_the_rights_of_the_grant(authority: Authority) -> None:
    authority.create_tenant("acme")
    reader = authority.create_key("acme", rights=())
    assert authority.authorize(reader, "acme", "r").grant.rights == ()
    for rights in (("own",), ("reuse", "reuse")):
        with pytest.raises(errors.RightsRefused):
            authority.create_key("acme", rights=rights)


def test_all_bad_credentials_are_refused_alike(authority: Authority, house: Any) -> None:
    authority.create_tenant("acme")
    good, short_lived, disabled = (
        authority.create_key("acme"),
        authority.create_key("acme", lifetime_s=10.0),
        authority.create_key("acme"),
    )
    authority.disable_key(disabled.split("_")[1])
    house.clock.advance(10.0)
    unknown = "ch_" + "1" * 16 + "_" + "2" * 64
    wrong = good[:-64] + "0" * 64
    swapped = "_".join(["ch", good.split("_")[1], disabled.split("_")[2]])
    bad = ["", "x", "ch_", unknown, wrong, swapped, short_lived, disabled, good + " ", good.upper()]
    seen = [
        outcome(lambda text=text, name=name: authority.authorize(text, name, "r"))
        for text in bad
        for name in (None, "acme", "nope")
    ]
    assert {entry[0] for entry in seen} == {errors.Unauthenticated}
    assert all(entry == seen[0] for entry in seen)
    authority.authorize(good, "acme", "r")


def test_absent_foreign_revoking_and_disabled_namespaces_are_refused_alike(authority: Authority) -> None:
    authority.create_tenant("acme", ["one", "two", "three"])
    authority.create_tenant("other")
    credential = authority.create_key("acme")
    authority.disable_namespace("two")
    stored = authority.registry.known_namespace("three")
    closing = msgspec.structs.replace(stored.value, state="revoking")
    authority.journal.commit("test", "closed", "three", {}, {namespace_key("three"): closing})
    names = ["absent", "other", "two", "three", "", "-", "A", "x" * 1000, "one\n"]
    seen = [outcome(lambda name=name: authority.authorize(credential, name, "r")) for name in names]
    assert {entry[0] for entry in seen} == {errors.NotFound}
    assert all(entry == seen[0] for entry in seen)
    assert authority.authorize(credential, None, "r").grant.namespace == "one"
    authority.enable_namespace("two")
    authority.authorize(credential, "two", "r")


def test_a_disabled_key_reaches_the_floors_and_can_be_enabled_again(authority: Authority) -> None:
    authority.create_tenant("acme")
    credential = authority.create_key("acme")
    key_id = credential.split("_")[1]
    before = authority.floors
    authority.disable_key(key_id)
    authority.disable_key(key_id)
    after = authority.floors
    assert after.disabled_keys == {key_id} and after.sequence == before.sequence + 1
    authority.enable_key(key_id)
    assert authority.floors.disabled_keys == frozenset()
    authority.authorize(credential, None, "r")


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a" * 64, "a:b", "ä", "a\n", "*"])
def test_bad_names_are_refused(authority: Authority, name: str) -> None:
    with pytest.raises(errors.NameRefused):
        authority.create_tenant(name)
    with pytest.raises(errors.NameRefused):
        authority.create_tenant("good", [name])
    assert authority.list_tenants() == []
    with pytest.raises(errors.TenantUnknown):
        authority.create_key(name)
    with pytest.raises(errors.NamespaceUnknown):
        authority.disable_namespace(name)


def test_a_namespace_has_exactly_one_principal(authority: Authority) -> None:
    authority.create_tenant("acme", ["shared"])
    for tenant, namespaces in (("acme", None), ("other", ["shared"]), ("other", ["x", "x"]), ("other", [])):
        with pytest.raises(errors.NameTaken):
            authority.create_tenant(tenant, namespaces)
    assert [tenant.name for tenant in authority.list_tenants()] == ["acme"]
    with pytest.raises(errors.KeyUnknown):
        authority.disable_key("0" * 16)


def test_a_newer_authority_supersedes_the_older(house: Any) -> None:
    older = house.open()
    older.create_tenant("acme")
    credential = older.create_key("acme")
    newer = house.open()
    assert newer.identity.term == older.identity.term + 1
    for call in (
        lambda: older.authorize(credential, None, "r"),
        lambda: older.create_tenant("late"),
        lambda: older.disable_key(credential.split("_")[1]),
    ):
        with pytest.raises(errors.TermSuperseded):
            call()
    assert newer.authorize(credential, None, "r").grant.term == newer.identity.term


def test_state_survives_a_killed_store_and_a_new_authority(
    start_server: Callable[..., Any], house: Any
) -> None:
    house.server = start_server("--appendonly", "yes", "--appendfsync", "always")
    first = house.open()
    first.create_tenant("acme")
    credential, other = first.create_key("acme"), first.create_key("acme")
    first.disable_key(other.split("_")[1])
    house.server.stop(signal.SIGKILL)
    with pytest.raises(errors.StoreUnavailable):
        first.authorize(credential, None, "r")
    house.server.start()
    second = house.open()
    assert second.authorize(credential, None, "r").secret == first.namespace_secret("acme", 1)
    assert second.floors.disabled_keys == {other.split("_")[1]}
    assert second.identity.cluster_id == first.identity.cluster_id


def test_credentials_and_secrets_never_reach_the_store(house: Any) -> None:
    authority = house.open()
    authority.create_tenant("acme")
    credential = authority.create_key("acme")
    secret = authority.authorize(credential, None, "r").secret
    half = credential.split("_")[2]
    client = house.server.client()
    content = b"".join(client.get(key) for key in client.keys("*"))
    for needle in (
        half.encode(),
        bytes.fromhex(half),
        secret,
        secret.hex().encode(),
        house.secrets.store_mac_key,
    ):
        assert needle not in content


def test_other_secrets_cannot_open_the_store(house: Any, tmp_path: Path) -> None:
    house.open()
    house.secrets = Secrets.load_or_create(tmp_path / "others")
    house.files = msgspec.structs.replace(house.files, high_water=tmp_path / "other.mark")
    with pytest.raises(errors.StoreTampered):
        house.open()


def test_a_generation_put_back_is_noticed_at_once(house: Any) -> None:
    authority = house.open()
    authority.create_tenant("acme")
    credential = authority.create_key("acme")
    client = house.server.client()
    old = client.get("ch:namespace:acme")
    stored = authority.registry.known_namespace("acme")
    raised: NamespaceRecord = msgspec.structs.replace(stored.value, generation=2)
    detail = {"generation_to": 2}
    authority.journal.commit("test", "revocation_advanced", "acme", detail, {namespace_key("acme"): raised})
    authority.registry.raise_floor("acme", 2)
    client.set("ch:namespace:acme", old)
    with pytest.raises(errors.StoreTampered):
        authority.authorize(credential, None, "r")
    with pytest.raises(errors.StoreTampered):
        house.open()


@pytest.mark.parametrize(
    "key", ["tenant:acme", "namespace:acme", "membership:r1", "cluster", "audit:000000000002"]
)
def test_a_deleted_record_is_noticed(house: Any, fleet: Any, key: str) -> None:
    authority = house.open()
    authority.create_tenant("acme")
    fleet.add(authority, "r1")
    assert house.server.client().delete(f"ch:{key}") == 1
    with pytest.raises((errors.StoreTampered, errors.StoreBehindHighWater)):
        reopened = house.open()
        reopened.membership.all()


# --- leases --------------------------------------------------------------------------------------------------


def test_membership_is_durable_before_the_first_lease(authority: Authority, house: Any, fleet: Any) -> None:
    replica = fleet.add(authority, "r1", leased=False)
    registered = authority.membership.get("r1")
    assert registered.leased_sequence is None
    replica.renew(authority, house.clock)
    leased = authority.membership.get("r1")
    assert leased.leased_sequence is not None and leased.leased_sequence > registered.registered_sequence
    position = authority.journal.position
    replica.renew(authority, house.clock)
    assert authority.journal.position == position
    assert replica.holder.holds(house.clock.monotonic_s() + 9.9)


def test_a_lease_is_refused_to_the_unknown_the_ended_and_the_fenced(
    authority: Authority, house: Any, fleet: Any
) -> None:
    ended, fenced = fleet.add(authority, "r1"), fleet.add(authority, "r2")
    with pytest.raises(errors.IncarnationUnknown):
        authority.renew_lease("r9", 1)
    authority.end_incarnation("r1", "exit status seen by its parent")
    authority.end_incarnation("r1", "another proof")
    assert authority.membership.get("r1").ended_proof == "exit status seen by its parent"
    authority.membership.fence("r2")
    with pytest.raises(errors.IncarnationEnded):
        ended.renew(authority, house.clock)
    with pytest.raises(errors.IncarnationFenced):
        fenced.renew(authority, house.clock)
    for replica in (ended, fenced):
        with pytest.raises(errors.IncarnationRefused):
            authority.register_incarnation(replica.member())


def test_a_malformed_membership_is_refused(authority: Authority) -> None:
    key = "ab" * 32
    for record in (
        IncarnationRecord("", "r", 1, (key,)),
        IncarnationRecord("a b", "r", 1, (key,)),
        IncarnationRecord("r1", "r", 0, ()),
        IncarnationRecord("r1", "r", 2, (key,)),
        IncarnationRecord("r1", "r", 1, (key.upper(),)),
    ):
        with pytest.raises(errors.IncarnationRefused):
            authority.register_incarnation(record)
    good = IncarnationRecord("r1", "r", 1, (key,))
    assert authority.register_incarnation(good) == authority.register_incarnation(good)
    with pytest.raises(errors.IncarnationRefused):
        authority.register_incarnation(IncarnationRecord("r1", "other", 1, (key,)))


def test_a_replica_that_has_seen_more_than_the_store_stops_the_authority(
    authority: Authority, fleet: Any
) -> None:
    fleet.add(authority, "r1")
    with pytest.raises(errors.StoreBehindHighWater):
        authority.renew_lease("r1", 2, seen_floor_sequence=10_000)


def test_renewals_carry_the_floors(authority: Authority, house: Any, fleet: Any) -> None:
    authority.create_tenant("acme")
    key_id = authority.create_key("acme").split("_")[1]
    replica = fleet.add(authority, "r1")
    authority.disable_key(key_id)
    authority.disable_namespace("acme")
    replica.renew(authority, house.clock)
    assert replica.holder.floors == authority.floors
    assert replica.holder.floors.disabled_keys == {key_id}
    assert not replica.holder.floors.admits("acme", 1)
