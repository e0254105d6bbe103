"""A trace of 10,000 requests, victims included, gives one machine digest in two processes with different hash seeds."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
from copyhold.cluster.bench_churn import Replica
from copyhold.cluster.bench_prefix_load import make_churn
churn = make_churn(10_000, seed=3)
replica, tenants, prompts = Replica(50, "cost", 6_000), churn.tenants.tolist(), churn.prompts()
for at in range(0, len(prompts), 8):
    replica.serve(tenants[at : at + 8], prompts[at : at + 8])
assert replica.evictor.report().evicted_blocks > 100_000
print(replica.ledger.machine_digest.hex(), replica.ledger.log_index, replica.hit_tokens)
"""


def test_ten_thousand_requests_give_the_same_digest_under_two_hash_seeds() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    told = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert told[0] == told[1] and len(told[0].split()[0]) == 32
