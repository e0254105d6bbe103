"""Revocation: order of acts, outcomes per incarnation, and a crash before and after every durable step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from copyhold.namespace import errors
from copyhold.namespace.audit_trail import decode_head, verify_trail
from copyhold.namespace.authority import Authority
from copyhold.namespace.certificate import Certificate, parse_certificate, verify_certificate
from copyhold.namespace.records import namespace_key
from copyhold.namespace.recovery import confirm_restore
from copyhold.namespace.revocation import Revoker
from copyhold.namespace.revocation_book import RevocationBook


class Crash(BaseException):
    """The process dies here."""


def revoker(house: Any, authority: Authority, fleet: Any) -> Revoker:
    return Revoker(authority, fleet, sleep=house.clock.sleep)


def revoke(house: Any, authority: Authority, fleet: Any, namespace: str = "acme") -> Certificate:
    return asyncio.run(revoker(house, authority, fleet).revoke(namespace, 5.0))


def checked(house: Any, authority: Authority, certificate: Certificate) -> Certificate:
    """The certificate, after verifying the document the authority keeps."""
    document = authority.certificate(certificate.namespace, certificate.generation_from)
    report = verify_certificate(document, house.secrets.certificate_public_key)
    assert report.ok, [check for check in report.checks if not check.ok]
    assert parse_certificate(document) == certificate
    return certificate


@pytest.fixture
def authority(house: Any) -> Authority:
    authority = house.open()
    authority.create_tenant("acme")
    authority.create_tenant("other")
    return authority


def outcomes(certificate: Certificate) -> dict[str, str]:
    return {entry.incarnation: entry.outcome for entry in certificate.outcomes}


def test_a_revocation_is_confirmed_by_every_rank(house: Any, authority: Authority, fleet: Any) -> None:
    credential, foreign = authority.create_key("acme"), authority.create_key("other")
    before = authority.authorize(credential, None, "r")
    untouched = authority.authorize(foreign, None, "r")
    first, second = fleet.add(authority, "r1"), fleet.add(authority, "r2", ranks=1)
    fleet.add(authority, "r3", leased=False)
    certificate = checked(house, authority, revoke(house, authority, fleet))
    assert certificate.outcome == "complete"
    assert outcomes(certificate) == {"r1": "confirmed", "r2": "confirmed"}
    assert [len(entry.evidence) for entry in certificate.outcomes] == [2, 1]
    assert (certificate.generation_from, certificate.generation_to) == (1, 2)
    after = authority.authorize(credential, None, "r")
    assert after.grant.generation == 2 and after.secret != before.secret
    verifier, now_s = authority.identity.verifier(), house.clock.now_s()
    for floors in (first.holder.floors, second.holder.floors, authority.floors):
        with pytest.raises(errors.GrantBelowFloor):
            verifier.verify(before.grant, now_s, floors)
        verifier.verify(after.grant, now_s, floors)
        verifier.verify(untouched.grant, now_s, floors)


def test_acts_come_in_their_order_and_admission_is_closed_throughout(
    house: Any, authority: Authority, fleet: Any
) -> None:
    credential = authority.create_key("acme")
    fleet.add(authority, "r1")
    refused: list[str] = []

    def try_to_enter(call: str) -> None:
        with pytest.raises(errors.NotFound):
            authority.authorize(credential, None, "r")
        refused.append(call)

    fleet.on_call = try_to_enter
    certificate = revoke(house, authority, fleet)
    order = [
        "advance_floor",
        "drop_routes",
        "end_requests",
        "close_streams",
        "purge_evidence",
        "erase_logs",
        "delete_session_state",
    ]
    assert fleet.names() == order == refused
    assert certificate.streams_closed_at <= certificate.issued_at
    actions = [
        record.action for record in authority.audit_records() if record.action.startswith("revocation")
    ]
    states = ["stopped", "advanced", "floored", "drained", "settled", "evidenced", "erased", "certified"]
    assert actions == [f"revocation_{state}" for state in states]


def test_deleted_logs_are_counted_and_logs_that_stay_fence_their_replica(
    house: Any, authority: Authority, fleet: Any
) -> None:
    fleet.add(authority, "r1").recorded_files = 2
    unable = fleet.add(authority, "r2")

    def lose_r2(call: str) -> None:
        if call == "erase_logs":
            unable.reachable = False

    fleet.on_call = lose_r2
    certificate = checked(house, authority, revoke(house, authority, fleet))
    assert outcomes(certificate) == {"r1": "confirmed", "r2": "fenced"}
    details = {entry.incarnation: entry.detail for entry in certificate.outcomes}
    assert details["r1"] == "every rank gave evidence; recorded logs deleted: 2"


def test_a_second_revocation_goes_one_generation_further(
    house: Any, authority: Authority, fleet: Any
) -> None:
    fleet.add(authority, "r1")
    first = revoke(house, authority, fleet)
    second = checked(house, authority, revoke(house, authority, fleet))
    assert (second.generation_from, second.generation_to) == (2, 3)
    assert second.nonce != first.nonce
    checked(house, authority, first)


def test_callers_of_a_running_revocation_share_its_certificate(
    house: Any, authority: Authority, fleet: Any
) -> None:
    fleet.add(authority, "r1")

    async def both() -> list[Certificate]:
        running = revoker(house, authority, fleet)
        return list(await asyncio.gather(running.revoke("acme", 5.0), running.revoke("acme", 5.0)))

    left, right = asyncio.run(both())
    assert left == right
    assert fleet.names().count("purge_evidence") == 1


def test_two_namespaces_can_be_revoked_at_once(house: Any, authority: Authority, fleet: Any) -> None:
    fleet.add(authority, "r1")

    async def both() -> list[Certificate]:
        running = revoker(house, authority, fleet)
        return list(await asyncio.gather(running.revoke("acme", 5.0), running.revoke("other", 5.0)))

    for certificate in asyncio.run(both()):
        assert checked(house, authority, certificate).outcome == "complete"
    assert authority.floors.generations == {"acme": 2, "other": 2}


def test_an_unknown_namespace_is_refused_and_nothing_happens(
    house: Any, authority: Authority, fleet: Any
) -> None:
    with pytest.raises(errors.NamespaceUnknown):
        revoke(house, authority, fleet, "absent")
    assert fleet.calls == []
    with pytest.raises(errors.CertificateUnknown):
        authority.certificate("acme", 1)


# --- outcomes ------------------------------------------------------------------------------------------------


def test_members_are_exactly_those_that_held_a_lease_during_the_generation(
    house: Any, authority: Authority, fleet: Any
) -> None:
    fleet.add(authority, "r1")
    revoke(house, authority, fleet)
    fleet.add(authority, "r2")
    authority.end_incarnation("r1", "exit status seen")
    del fleet.replicas["r1"]
    fleet.add(authority, "r3", leased=False)
    certificate = checked(house, authority, revoke(house, authority, fleet))
    assert outcomes(certificate) == {"r1": "ended", "r2": "confirmed"}
    assert certificate.outcome == "complete"
    third = checked(house, authority, revoke(house, authority, fleet))
    assert outcomes(third) == {"r2": "confirmed"}


def test_an_unreachable_replica_is_fenced_only_after_its_lease_and_skew(
    house: Any, authority: Authority, fleet: Any
) -> None:
    fleet.add(authority, "r1")
    lost = fleet.add(authority, "r2")
    lost.reachable = False
    asked_at = house.clock.monotonic_s()
    certificate = checked(house, authority, revoke(house, authority, fleet))
    assert outcomes(certificate) == {"r1": "confirmed", "r2": "fenced"}
    assert certificate.outcome == "fenced-incomplete"
    assert house.clock.monotonic_s() >= asked_at + 15.0
    assert not lost.holder.holds(house.clock.monotonic_s())
    with pytest.raises(errors.IncarnationFenced):
        lost.renew(authority, house.clock)
    again = checked(house, authority, revoke(house, authority, fleet))
    assert outcomes(again) == {"r1": "confirmed", "r2": "fenced"}
    last = checked(house, authority, revoke(house, authority, fleet))
    assert outcomes(last) == {"r1": "confirmed"}


def test_a_replica_proven_gone_while_waiting_counts_as_ended(
    house: Any, authority: Authority, fleet: Any
) -> None:
    fleet.add(authority, "r1").reachable = False

    async def sleep(seconds: float) -> None:
        authority.end_incarnation("r1", "its parent reaped it")

    certificate = asyncio.run(Revoker(authority, fleet, sleep=sleep).revoke("acme", 5.0))
    assert outcomes(checked(house, authority, certificate)) == {"r1": "ended"}
    assert certificate.outcome == "complete"


def test_evidence_that_does_not_hold_confirms_nothing(house: Any, authority: Authority, fleet: Any) -> None:
    fleet.add(authority, "r1").nonzero_bytes = 5
    certificate = checked(house, authority, revoke(house, authority, fleet))
    assert outcomes(certificate) == {"r1": "fenced"}
    assert "5 nonzero bytes" in certificate.outcomes[0].detail
    assert certificate.outcome == "fenced-incomplete"


def test_a_replica_that_never_answers_is_timed_out(house: Any, authority: Authority, fleet: Any) -> None:
    fleet.add(authority, "r1")

    async def never(*_: object) -> list[Any]:
        await asyncio.Event().wait()
        return []

    fleet.purge_evidence = never
    running = Revoker(authority, fleet, sleep=house.clock.sleep, call_timeout_s=0.05)
    certificate = asyncio.run(running.revoke("acme", 0.0))
    assert outcomes(checked(house, authority, certificate)) == {"r1": "fenced"}


def test_a_gateway_that_does_not_acknowledge_stalls_the_revocation(
    house: Any, authority: Authority, fleet: Any
) -> None:
    credential = authority.create_key("acme")
    fleet.add(authority, "r1")
    fleet.gateway_reachable = False
    with pytest.raises(errors.RevocationStalled) as caught:
        revoke(house, authority, fleet)
    assert caught.value.state == "floored"
    with pytest.raises(errors.NotFound):
        authority.authorize(credential, None, "r")
    fleet.gateway_reachable = True
    house.clock.advance(30.0)
    certificate = checked(house, authority, revoke(house, authority, fleet))
    assert certificate.generation_to == 2
    assert certificate.streams_closed_at >= certificate.requested_at + 30.0


def test_a_store_that_accepts_loss_is_stated_in_the_certificate(
    start_server: Callable[..., Any], house: Any, new_fleet: Callable[..., Any]
) -> None:
    house.server = start_server("--appendonly", "no")
    with pytest.raises(errors.StoreNotDurable):
        house.open()
    house.store = lambda: type(house).store(house, accept_generation_loss=True)
    authority = house.open()
    authority.create_tenant("acme")
    certificate = revoke(house, authority, new_fleet(house.clock))
    assert any("may lose a generation" in line for line in certificate.not_covered)


def test_the_generation_is_raised_by_compare_and_set(house: Any, authority: Authority) -> None:
    book = RevocationBook(authority)
    record = book.begin("acme", 5.0, "operator")
    stored = authority.registry.known_namespace("acme")
    moved = msgspec.structs.replace(stored.value, generation=5)
    authority.journal.commit("test", "moved", "acme", {}, {namespace_key("acme"): moved})
    with pytest.raises(errors.RevocationStalled):
        book.advance(record)
    assert authority.registry.known_namespace("acme").value == moved


# --- crashes -------------------------------------------------------------------------------------------------


def crash_at_commit(authority: Authority, number: int, *, after: bool) -> None:
    """Make the authority die before or after its ``number``-th commit from now."""
    commit = authority.journal.store.commit
    count = iter(range(1, 1000))

    def crashing(*arguments: Any) -> None:
        crash = next(count) == number
        if crash and not after:
            raise Crash
        commit(*arguments)
        if crash:
            raise Crash

    setattr(authority.journal.store, "commit", crashing)  # noqa: B010


def run_until_crash(house: Any, authority: Authority, fleet: Any) -> bool:
    """Whether the process died. The event loop dies with it, as its tasks would."""

    async def attempt() -> None:
        running = revoker(house, authority, fleet)
        record = running._book.begin("acme", 5.0, "operator")
        await running._run(record)

    try:
        asyncio.run(attempt())
    except Crash:
        return True
    return False


def finish(house: Any, fleet: Any, credential: str) -> None:
    """Restart, resume, and check that the end is the same as without a crash."""
    fleet.on_call = lambda call: None
    restarted = house.open()
    known = {record.action for record in restarted.audit_records()}
    certificates = asyncio.run(revoker(house, restarted, fleet).resume_revocations())
    if "revocation_certified" in known or "revocation_stopped" not in known:
        assert certificates == []
    if "revocation_stopped" not in known:
        assert restarted.authorize(credential, None, "r").grant.generation == 1
        return
    certificate = parse_certificate(restarted.certificate("acme", 1))
    checked(house, restarted, certificate)
    assert certificates in ([], [certificate])
    assert certificate.outcome == "complete" and outcomes(certificate) == {
        "r1": "confirmed",
        "r2": "confirmed",
    }
    assert restarted.authorize(credential, None, "r").grant.generation == 2
    assert restarted.floors.generation("acme") == 2
    assert asyncio.run(revoker(house, restarted, fleet).resume_revocations()) == []
    restarted.close()
    head = decode_head(house.files.audit_head.read_bytes())
    assert verify_trail(house.open().audit_records(), head, house.secrets.certificate_public_key) > 0


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(1, 10))
def test_a_crash_at_any_commit_is_resumed(
    house: Any, authority: Authority, fleet: Any, number: int, after: bool
) -> None:
    credential = authority.create_key("acme")
    fleet.add(authority, "r1")
    fleet.add(authority, "r2")
    crash_at_commit(authority, number, after=after)
    assert run_until_crash(house, authority, fleet), "the revocation has fewer commits than this test thinks"
    finish(house, fleet, credential)


def test_nine_commits_are_all_there_are(house: Any, authority: Authority, fleet: Any) -> None:
    fleet.add(authority, "r1")
    fleet.add(authority, "r2")
    crash_at_commit(authority, 10, after=False)
    assert not run_until_crash(house, authority, fleet)


@pytest.mark.parametrize(
    "call",
    [
        "advance_floor",
        "drop_routes",
        "end_requests",
        "close_streams",
        "purge_evidence",
        "erase_logs",
        "delete_session_state",
    ],
)
def test_a_crash_in_any_act_is_resumed(house: Any, authority: Authority, fleet: Any, call: str) -> None:
    credential = authority.create_key("acme")
    fleet.add(authority, "r1")
    fleet.add(authority, "r2")

    def die(name: str) -> None:
        if name == call:
            raise Crash

    fleet.on_call = die
    assert run_until_crash(house, authority, fleet)
    finish(house, fleet, credential)


@pytest.mark.parametrize("error", [errors.StoreUnavailable("gone"), errors.CommitNotDurable("slow")])
@pytest.mark.parametrize("number", range(1, 10))
def test_a_lost_answer_of_the_store_is_taken_up_by_the_next_call(
    house: Any, authority: Authority, fleet: Any, number: int, error: errors.NamespaceError
) -> None:
    credential = authority.create_key("acme")
    fleet.add(authority, "r1")
    fleet.add(authority, "r2")
    commit = authority.journal.store.commit
    count = iter(range(1, 1000))

    def answering(*arguments: Any) -> None:
        commit(*arguments)
        if next(count) == number:
            raise error

    setattr(authority.journal.store, "commit", answering)  # noqa: B010
    with pytest.raises(type(error)):
        revoke(house, authority, fleet)
    calls_before = len(fleet.calls)
    confirmed_at: list[str] = []

    def acts_only_on_what_is_durable(call: str) -> None:
        if not confirmed_at:
            confirmed_at.extend(record.action for record in authority.audit_records())

    fleet.on_call = acts_only_on_what_is_durable
    running = revoker(house, authority, fleet)
    asyncio.run(running.resume_revocations())
    checked(house, authority, parse_certificate(authority.certificate("acme", 1)))
    assert authority.authorize(credential, None, "r").grant.generation == 2
    assert authority.floors.generation("acme") == 2
    assert "commit_confirmed" in [record.action for record in authority.audit_records()]
    assert len(fleet.calls) == calls_before or "commit_confirmed" in confirmed_at


@pytest.mark.parametrize("state_commits", [1, 2, 5])
def test_a_restore_during_a_revocation_still_ends_in_a_certificate(
    house: Any, authority: Authority, fleet: Any, state_commits: int
) -> None:
    credential = authority.create_key("acme")
    fleet.add(authority, "r1")
    crash_at_commit(authority, state_commits, after=True)
    assert run_until_crash(house, authority, fleet)
    confirm_restore(house.store(), house.secrets, house.clock, house.files, token_source=house.tokens)
    restarted = house.open()
    with pytest.raises(errors.NotFound):
        restarted.authorize(credential, None, "r")
    (certificate,) = asyncio.run(revoker(house, restarted, fleet).resume_revocations())
    checked(house, restarted, certificate)
    grant = restarted.authorize(credential, None, "r").grant
    assert grant.generation >= certificate.generation_to


def test_another_evidence_key_cannot_speak_for_a_rank(house: Any, authority: Authority, fleet: Any) -> None:
    replica = fleet.add(authority, "r1")
    genuine = replica.evidence("acme", 2, "ab")
    assert genuine[0].signature != genuine[1].signature
    replica.signers.reverse()
    certificate = checked(house, authority, revoke(house, authority, fleet))
    assert outcomes(certificate) == {"r1": "fenced"}
    assert msgspec.json.decode(authority.certificate("acme", 1))["outcome"] == "fenced-incomplete"
