"""What a replica refuses before its ledger hears of a request: grants, routes, leases (K013, SECURITY)."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from copyhold.actors.messages import Failed, GenerateRequest, RouteReceipt, StreamItem
from copyhold.actors.replica import Replica, ReplicaSpec
from copyhold.namespace.authority import ClusterIdentity
from copyhold.namespace.floors import Floors
from copyhold.namespace.grants import Grant, sign_grant
from copyhold.namespace.leases import LeaseRenewal
from copyhold.namespace.store_target import StoreTarget

KEY = Ed25519PrivateKey.generate()
CLUSTER = ClusterIdentity("cluster", "epoch", 1, "replica", KEY.public_key().public_bytes_raw(), b"")


@pytest.fixture
def replica() -> Iterator[Replica]:
    with tempfile.TemporaryDirectory(prefix="cht-", dir="/tmp") as folder:
        spec = ReplicaSpec(
            name="replica-0",
            incarnation="replica-0-now",
            ranks=1,
            world=bytes(32),
            model="tiny",
            block_size=16,
            num_blocks=8,
            max_requests=2,
            max_model_len=64,
            vocab_size=100,
            step_tokens=64,
            prefill_chunk_tokens=32,
            channel_path=str(Path(folder) / "step.sock"),
            step_timeout_s=1.0,
            cluster=CLUSTER,
            sessions_store=StoreTarget(f"unix://{folder}/absent.sock"),
            receipt_ttl_s=60,
            request_lifetime_s=60.0,
        )
        found = Replica(spec)
        yield found
        asyncio.run(found.stop())


def grant(**changes: Any) -> Grant:
    now_s = time.time()
    fields: dict[str, Any] = {
        "grant_id": "g",
        "key_id": "k",
        "principal": "acme",
        "namespace": "acme",
        "generation": 1,
        "rights": ("reuse", "publish"),
        "cluster_id": "cluster",
        "store_epoch": "epoch",
        "audience": "replica",
        "term": 1,
        "issued_at": now_s,
        "expires_at": now_s + 60,
    }
    return sign_grant(KEY, Grant(**(fields | changes)))


def request(held: Grant, **route: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "replica": "replica-0",
        "incarnation": "replica-0-now",
        "index_version": 1,
        "expected_hit_tokens": 0,
        "expires_at": time.time() + 10,
    }
    return GenerateRequest(
        request_id="r",
        grant=held,
        secret=bytes(32),
        route=RouteReceipt(**(fields | route)),
        tokens=bytes(8),
        max_new_tokens=1,
        stop_token_ids=(),
    )


def answer(replica: Replica, asked: GenerateRequest) -> StreamItem:
    async def first() -> StreamItem:
        async for items in replica.generate(asked):
            return items[0]
        raise AssertionError("no item")

    return asyncio.run(first())


def kind(replica: Replica, asked: GenerateRequest) -> str:
    found = answer(replica, asked)
    assert isinstance(found, Failed)
    return found.kind


def test_a_stale_route_is_refused_by_name(replica: Replica) -> None:
    assert kind(replica, request(grant(), incarnation="replica-0-before")) == "stale_route"
    assert kind(replica, request(grant(), expires_at=time.time() - 1)) == "stale_route"


def test_without_a_lease_nothing_is_admitted(replica: Replica) -> None:
    assert kind(replica, request(grant())) == "service_unavailable"


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster_id": "another"},
        {"store_epoch": "earlier"},
        {"audience": "gateway"},
        {"expires_at": -60.0},
        {"issued_at": 600.0},
    ],
)
def test_a_grant_that_does_not_hold_is_refused_first(replica: Replica, changes: dict[str, Any]) -> None:
    now_s = time.time()
    fields = {name: now_s + value if isinstance(value, float) else value for name, value in changes.items()}
    assert kind(replica, request(grant(**fields), incarnation="replica-0-before")) == "not_authorized"


def test_an_edited_grant_is_refused(replica: Replica) -> None:
    edited = msgspec.structs.replace(grant(), namespace="bravo")
    assert kind(replica, request(edited)) == "not_authorized"


def test_a_grant_below_the_floor_is_refused_as_revoked(replica: Replica) -> None:
    sequence = replica._lease.begin_renewal(time.monotonic())
    floors = Floors(sequence=5, generations={"acme": 2})
    replica._lease.accept(LeaseRenewal("replica-0-now", sequence, 10.0, floors, 1, "epoch"))
    assert kind(replica, request(grant())) == "namespace_revoked"
    assert kind(replica, request(grant(generation=2), incarnation="replica-0-before")) == "stale_route"
