"""Grants, floors and leases: what verifies, what is refused and by which name."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from copyhold.namespace import errors
from copyhold.namespace.floors import Floors
from copyhold.namespace.grants import Grant, GrantVerifier, decode_grant, encode_grant, sign_grant
from copyhold.namespace.leases import LEASE_S, LeaseHolder, LeaseRenewal

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NOW_S = 1000.0
BASE = Grant(
    grant_id="g1",
    key_id="k1",
    principal="acme",
    namespace="acme",
    generation=2,
    rights=("reuse", "publish"),
    cluster_id="cluster",
    store_epoch="epoch",
    audience="replica",
    term=1,
    issued_at=NOW_S,
    expires_at=NOW_S + 60.0,
)
SIGNED = sign_grant(KEY, BASE)
OPEN = Floors()


def verifier(capacity: int = 4) -> GrantVerifier:
    return GrantVerifier(KEY.public_key().public_bytes_raw(), "cluster", "epoch", "replica", capacity)


def test_a_signed_grant_verifies_and_survives_the_wire() -> None:
    assert verifier().verify(SIGNED, NOW_S, OPEN) == SIGNED
    assert decode_grant(encode_grant(SIGNED)) == SIGNED
    assert SIGNED.allows("reuse") and not SIGNED.allows("administer")


@pytest.mark.parametrize("field", [name for name in Grant.__struct_fields__ if name != "signature"])
def test_changing_any_field_makes_the_grant_forged(field: str) -> None:
    value = getattr(SIGNED, field)
    changed = {str: "other", int: 9, float: 1001.0, tuple: ("reuse",)}[type(value)]
    forged = msgspec.structs.replace(SIGNED, **{field: changed})
    checks = verifier()
    checks.verify(SIGNED, NOW_S, OPEN)
    with pytest.raises(errors.GrantForged):
        checks.verify(forged, NOW_S, OPEN)
    assert checks.cached_grants == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cluster_id": "other"}, errors.GrantWrongCluster),
        ({"store_epoch": "other"}, errors.GrantWrongEpoch),
        ({"audience": "gateway"}, errors.GrantWrongAudience),
        ({"expires_at": NOW_S - 5.0}, errors.GrantExpired),
        ({"issued_at": NOW_S + 5.1}, errors.GrantNotYetValid),
    ],
)
def test_a_genuine_grant_for_something_else_is_refused_by_name(
    change: dict[str, object], error: type[errors.GrantRefused]
) -> None:
    grant = sign_grant(KEY, msgspec.structs.replace(BASE, **change))
    with pytest.raises(error):
        verifier().verify(grant, NOW_S, OPEN)


def test_expiry_is_checked_also_for_a_cached_grant() -> None:
    checks = verifier()
    checks.verify(SIGNED, NOW_S, OPEN)
    checks.verify(SIGNED, NOW_S + 64.9, OPEN)
    with pytest.raises(errors.GrantExpired):
        checks.verify(SIGNED, NOW_S + 65.0, OPEN)


def test_floors_are_checked_also_for_a_cached_grant() -> None:
    checks = verifier()
    checks.verify(SIGNED, NOW_S, OPEN.raised("acme", 2))
    with pytest.raises(errors.GrantBelowFloor) as caught:
        checks.verify(SIGNED, NOW_S, OPEN.raised("acme", 3))
    assert (caught.value.generation, caught.value.floor) == (2, 3)
    with pytest.raises(errors.GrantKeyDisabled):
        checks.verify(SIGNED, NOW_S, Floors(disabled_keys=frozenset({"k1"})))
    with pytest.raises(errors.GrantNamespaceDisabled):
        checks.verify(SIGNED, NOW_S, Floors(disabled_namespaces=frozenset({"acme"})))


def test_the_cache_of_verified_grants_is_bounded() -> None:
    checks = verifier(capacity=4)
    for number in range(10):
        checks.verify(sign_grant(KEY, msgspec.structs.replace(BASE, grant_id=f"g{number}")), NOW_S, OPEN)
    assert checks.cached_grants == 4


@given(st.binary(max_size=200))
def test_bytes_that_are_no_grant_are_forged(encoded: bytes) -> None:
    with pytest.raises(errors.GrantForged):
        verifier().verify(decode_grant(encoded), NOW_S, OPEN)


@given(st.integers(0, 63), st.integers(1, 255))
def test_any_change_of_the_signature_is_forged(position: int, flip: int) -> None:
    signature = bytearray(SIGNED.signature)
    signature[position] ^= flip
    with pytest.raises(errors.GrantForged):
        verifier().verify(msgspec.structs.replace(SIGNED, signature=bytes(signature)), NOW_S, OPEN)


def test_every_error_survives_pickling() -> None:
    samples: list[errors.NamespaceError] = [
        errors.Unauthenticated(),
        errors.NotFound(),
        errors.GrantBelowFloor("acme", 1, 2),
        errors.StoreBehindHighWater(9, 3, "records are missing"),
        errors.FleetUnreachable("r1", "no answer"),
        errors.NameRefused("A"),
    ]
    for sample in samples:
        again = pickle.loads(pickle.dumps(sample))
        assert (type(again), str(again), again.reason) == (type(sample), str(sample), sample.reason)


floors_values = st.builds(
    Floors,
    st.integers(0, 9),
    st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 9)),
    st.frozensets(st.sampled_from(["k1", "k2"])),
)


@given(floors_values, floors_values)
def test_merging_never_lowers_a_generation(left: Floors, right: Floors) -> None:
    both = left.merged(right)
    for name in "abc":
        assert both.generation(name) == max(left.generation(name), right.generation(name))
    assert both.sequence == max(left.sequence, right.sequence)
    if left.sequence != right.sequence:
        assert both == msgspec.structs.replace(right.merged(left), generations=both.generations)


def renewal(sequence: int, floors: Floors = OPEN, incarnation: str = "r1") -> LeaseRenewal:
    return LeaseRenewal(incarnation, sequence, LEASE_S, floors, 1, "epoch")


def test_a_lease_counts_from_before_it_was_asked_for() -> None:
    holder = LeaseHolder("r1")
    assert not holder.holds(0.0)
    sequence = holder.begin_renewal(100.0)
    holder.accept(renewal(sequence))
    assert holder.holds(109.9)
    assert not holder.holds(110.0)
    assert holder.remaining_s(104.0) == 6.0


def test_a_late_answer_neither_shortens_nor_stretches_a_lease() -> None:
    holder = LeaseHolder("r1")
    early, late = holder.begin_renewal(100.0), holder.begin_renewal(103.0)
    holder.accept(renewal(late, Floors(5, {"a": 4})))
    holder.accept(renewal(early, Floors(4, {"a": 3})))
    assert holder.holds(112.9) and not holder.holds(113.0)
    assert holder.floors == Floors(5, {"a": 4})


def test_an_answer_to_nothing_is_refused() -> None:
    holder = LeaseHolder("r1")
    sequence = holder.begin_renewal(100.0)
    for answer in (renewal(sequence + 1), renewal(sequence, incarnation="r2")):
        with pytest.raises(errors.RenewalUnexpected):
            holder.accept(answer)
    assert not holder.holds(100.0)
