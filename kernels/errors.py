"""Refusals of the kernels room: every one is raised before a byte of K/V memory is touched.

Reasons are contract names (K140, K141, K143, K145, K232).
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of the family; the pool is unchanged when one is raised."""

    reason = "kernel_error"


class UnsupportedKernelBlockSize(KernelError):
    """The backend cannot split this block size into whole tiles; no pool was made (K143, K145)."""

    reason = "unsupported_kernel_block_size"

    def __init__(self, block_size: int, tile: int) -> None:
        self.block_size = block_size
        self.tile = tile
        super().__init__(
            f"block size {block_size} is not a positive multiple of the cpu backend's tile of {tile}"
        )


class KernelContractMismatch(KernelError):
    """Dtype, head layout or geometry is not what the kernel was told; nothing was read or written (K232)."""

    reason = "kernel_contract_mismatch"


class KernelInputRefused(KernelError):
    """A step batch is inconsistent (shape, length or range); nothing was read or written (K140, K141)."""

    reason = "kernel_input_missing"

    def __init__(self, field: str, detail: str) -> None:
        self.field = field
        super().__init__(f"step batch refused: {field}: {detail}")


class BlockOutOfRange(KernelError):
    """A block id lies outside the pool; the pool is unchanged."""

    reason = "block_out_of_range"

    def __init__(self, block_id: int, num_blocks: int) -> None:
        self.block_id = block_id
        self.num_blocks = num_blocks
        super().__init__(f"block {block_id} is outside the pool of {num_blocks} blocks")


class PartitionNotWholeTiles(KernelError):
    """A reduction partition is not a multiple of the kernel's block; nothing was written (K144)."""

    reason = "partition_not_multiple_of_block"

    def __init__(self, partition: int, tile: int) -> None:
        self.partition = partition
        super().__init__(f"partition of {partition} tokens is not a positive multiple of the kernel's {tile}")


class NoKernelBackend(KernelError):
    """No backend can serve what was asked for; nothing was allocated (K145, K232)."""

    reason = "kernel_contract_mismatch"

    def __init__(self, asked: str, refusals: list[str]) -> None:
        self.asked = asked
        super().__init__(f"no kernel backend for {asked!r}: {'; '.join(refusals)}")
