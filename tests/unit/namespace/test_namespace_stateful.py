"""A rule machine drives the authority on a real store and a model that fits a screen; both must agree."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from copyhold.namespace import errors
from copyhold.namespace.certificate import verify_certificate
from copyhold.namespace.revocation import Revoker

TENANTS = ("acme", "other", "third")


class Machine(RuleBasedStateMachine):
    """Model: generation and switch per namespace, switch per key, highest generation ever granted."""

    make_house: Any
    new_fleet: Any
    revocations = 0

    def __init__(self) -> None:
        super().__init__()
        self.house = self.make_house()
        self.authority = self.house.open()
        self.fleet = self.new_fleet(self.house.clock)
        self.fleet.add(self.authority, "r0")
        self.incarnations = 1
        self.generations: dict[str, int] = {}
        self.disabled: set[str] = set()
        self.keys: dict[str, tuple[str, bool]] = {}
        self.granted: dict[str, int] = {}
        self.create("acme")

    @rule(name=st.sampled_from(TENANTS))
    def create_tenant(self, name: str) -> None:
        self.create(name)

    def create(self, name: str) -> None:
        if name in self.generations:
            with pytest.raises(errors.NameTaken):
                self.authority.create_tenant(name)
            return
        self.authority.create_tenant(name)
        self.generations[name] = 1
        self.keys[self.authority.create_key(name)] = (name, True)

    @precondition(lambda self: self.keys)
    @rule(choice=st.integers(0, 10), enabled=st.booleans())
    def switch_key(self, choice: int, enabled: bool) -> None:
        credential = sorted(self.keys)[choice % len(self.keys)]
        key_id = credential.split("_")[1]
        (self.authority.enable_key if enabled else self.authority.disable_key)(key_id)
        self.keys[credential] = (self.keys[credential][0], enabled)

    @rule(name=st.sampled_from(TENANTS), enabled=st.booleans())
    def switch_namespace(self, name: str, enabled: bool) -> None:
        switch = self.authority.enable_namespace if enabled else self.authority.disable_namespace
        if name not in self.generations:
            with pytest.raises(errors.NamespaceUnknown):
                switch(name)
            return
        switch(name)
        (self.disabled.discard if enabled else self.disabled.add)(name)

    @rule(name=st.sampled_from(TENANTS))
    def revoke(self, name: str) -> None:
        revocation = Revoker(self.authority, self.fleet, sleep=self.house.clock.sleep).revoke(name, 0.0)
        if name not in self.generations:
            with pytest.raises(errors.NamespaceUnknown):
                asyncio.run(revocation)
            return
        certificate = asyncio.run(revocation)
        document = self.authority.certificate(name, certificate.generation_from)
        assert verify_certificate(document, self.house.secrets.certificate_public_key).ok
        assert certificate.generation_from == self.generations[name]
        self.generations[name] += 1
        type(self).revocations += 1

    @precondition(lambda self: self.keys)
    @rule(choice=st.integers(0, 10), namespace=st.sampled_from([None, *TENANTS]))
    def authorize(self, choice: int, namespace: str | None) -> None:
        credential = sorted(self.keys)[choice % len(self.keys)]
        owner, enabled = self.keys[credential]
        target = owner if namespace is None else namespace
        if not enabled:
            expected: type[Exception] | None = errors.Unauthenticated
        elif target != owner or target in self.disabled:
            expected = errors.NotFound
        else:
            expected = None
        if expected is not None:
            with pytest.raises(expected):
                self.authority.authorize(credential, namespace, "r")
            return
        grant = self.authority.authorize(credential, namespace, "r").grant
        assert grant.generation == self.generations[owner] >= self.granted.get(owner, 1)
        self.granted[owner] = grant.generation
        self.authority.identity.verifier().verify(grant, self.house.clock.now_s(), self.authority.floors)

    @rule()
    def restart_authority(self) -> None:
        self.authority = self.house.open()

    @rule()
    def replace_replica(self) -> None:
        old = next(iter(self.fleet.replicas))
        self.authority.end_incarnation(old, "stopped")
        del self.fleet.replicas[old]
        self.fleet.add(self.authority, f"r{self.incarnations}")
        self.incarnations += 1

    @rule()
    def renew(self) -> None:
        (replica,) = self.fleet.replicas.values()
        replica.renew(self.authority, self.house.clock)
        assert replica.holder.floors == self.authority.floors

    @invariant()
    def floors_agree(self) -> None:
        floors = self.authority.floors
        assert {name: floors.generation(name) for name in self.generations} == self.generations
        assert floors.disabled_namespaces == self.disabled
        assert floors.disabled_keys == {
            text.split("_")[1] for text, (_, enabled) in self.keys.items() if not enabled
        }


def test_the_authority_agrees_with_its_model(make_house: Any, new_fleet: Any) -> None:
    class Bound(Machine):
        pass

    Bound.make_house = staticmethod(make_house)
    Bound.new_fleet = staticmethod(new_fleet)
    chosen = settings(
        max_examples=25,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(Bound, settings=chosen)
    assert Bound.revocations >= 10, "the machine never got to revoke"
