"""Step batches for tests: sequences over given block tables, prefilled in chunks or decoded, no scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from copyhold.kernels.batch import StepBatch


def make_batch(
    rows: Sequence[Sequence[int]], starts: Sequence[int], tables: npt.NDArray[np.int32], block_size: int = 16
) -> StepBatch:
    """One step: sequence `s` gets the tokens `rows[s]` at positions from `starts[s]`; logits of each last row."""
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    slots = [
        tables[s][p // block_size].astype(np.int64) * block_size + p % block_size
        for s, p in enumerate(positions)
    ]
    ends = np.cumsum(counts)
    return StepBatch(
        tokens=np.array([token for row in rows for token in row], dtype=np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        slots=np.concatenate(slots),
        seq_starts=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=(np.array(starts) + counts).astype(np.int32),
        block_tables=tables,
        logit_rows=ends[counts > 0] - 1,
    )
