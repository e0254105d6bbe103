"""Reuse receipts in the session store: written by the replica, read by the gateway, gone with their generation.

Owns the record's name. The MAC key comes from K(ns, g), which both sides hold only for a grant's life; a receipt of another
namespace or of a revoked generation is not found, for whatever cause (K180).
"""

from __future__ import annotations

from copyhold.namespace.errors import NotFound, RecordNameRefused, SessionTampered
from copyhold.namespace.grants import Grant
from copyhold.namespace.sessions import RecordName, SessionStore

from .messages import ReuseReceipt

_KIND = "receipt"


def keep_receipt(
    sessions: SessionStore, grant: Grant, secret: bytes, receipt: ReuseReceipt, ttl_s: float
) -> None:
    """Store or replace a receipt under the grant's generation. Raises: what ``SessionStore.put`` raises."""
    name = RecordName(grant.namespace, grant.generation, _KIND, receipt.receipt_id)
    sessions.put(secret, name, receipt, ttl_s)


def load_receipt(sessions: SessionStore, grant: Grant, secret: bytes, receipt_id: str) -> ReuseReceipt:
    """The receipt, if it is the caller's own. Raises: ``NotFound``, ``StoreUnavailable``."""
    name = RecordName(grant.namespace, grant.generation, _KIND, receipt_id)
    try:
        receipt = sessions.get(secret, name, ReuseReceipt)
    except (SessionTampered, RecordNameRefused) as error:
        raise NotFound() from error
    if receipt is None:
        raise NotFound()
    return receipt
