"""The world of a replica: everything that must be equal on all ranks for K/V to be exchangeable.

Owns the projection from a converted checkpoint to the ledger's ``WorldManifest`` (LEDGER, "Two identities"). The digest of
the result keys every prefix root and names no rank's own layout.
"""

from __future__ import annotations

from copyhold.kvcore.identity import WorldManifest, world_digest
from copyhold.models.manifest import ConvertedCheckpoint


def world_of(checkpoint: ConvertedCheckpoint, block_size: int) -> bytes:
    """SHA-256 of the world this checkpoint serves under."""
    raise AssertionError((WorldManifest, world_digest, checkpoint, block_size))
