"""Loops compile in the warm-up or never, and run as plain Python with the same digests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from copyhold.kvcore.warm_up import compile_counts, warm_up


def test_warm_up_reaches_every_loop() -> None:
    warm_up()
    counts = compile_counts()
    assert len(counts) > 20
    assert not [name for name, (signatures, _) in counts.items() if signatures == 0]


def test_nothing_compiles_after_warm_up() -> None:
    from_file = (Path(__file__).parent / "test_ledger_determinism.py").read_text()
    script = from_file.split('"""')[3]
    program = (
        "from copyhold.kvcore.warm_up import compile_counts, warm_up\n"
        "warm_up()\nbefore = compile_counts()\n" + script + "\nafter = compile_counts()\n"
        "assert before == after, [(name, before[name], after[name]) for name in after if before[name] != after[name]]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_reading_modules_do_not_load_the_compiler() -> None:
    program = (
        "import sys; import copyhold.kvcore.commands, copyhold.kvcore.receipts, copyhold.kvcore.errors; "
        "import copyhold.kvcore.identity, copyhold.kvcore.lengths; assert 'numba' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
