"""Which backend is chosen and why; and every backend that is: the same interface, the same numbers."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from paged_case import TOLERANCE_FP32, PagedCase

from copyhold.kernels import cpu, reference_backend
from copyhold.kernels.choices import KVDtype, kv_dtype_for
from copyhold.kernels.dispatch import BACKENDS, Considered, backend_named, choose_kernels
from copyhold.kernels.errors import NoKernelBackend
from copyhold.kernels.interface import KV_DTYPES, KernelBackend, as_stored
from copyhold.kernels.pool import KVPool


def test_auto_takes_the_cpu_and_says_what_became_of_the_others() -> None:
    choice = choose_kernels("auto", "auto", 3, 64, 32)
    assert (choice.backend, choice.kv_dtype, choice.layout.tile) == ("cpu", "float32", 16)
    triton, *others = choice.considered
    assert triton.outcome in {"triton_not_installed", "no_cuda_device", "host_activations"} and triton.why
    assert others == [Considered("cpu", "selected"), Considered("reference", "not_needed")]
    assert choice.layout.row_bytes == 2 * 3 * 64 * 4


def test_the_reference_serves_only_by_name() -> None:
    choice = choose_kernels("reference", "bfloat16", 3, 64, 16)
    assert (choice.backend, choice.kv_dtype) == ("reference", "bfloat16")
    assert [each.outcome for each in choice.considered] == ["not_asked", "not_asked", "selected"]


@pytest.mark.parametrize(
    ("head_dim", "block_size", "outcome"),
    [(64, 24, "unsupported_kernel_block_size"), (20, 16, "kernel_contract_mismatch")],
)
def test_a_refusal_tells_why_and_falls_back_to_nothing(head_dim: int, block_size: int, outcome: str) -> None:
    with pytest.raises(NoKernelBackend) as refused:
        choose_kernels("cpu", "auto", 3, head_dim, block_size)
    assert str(24 if block_size == 24 else 20) in str(refused.value)
    with pytest.raises(NoKernelBackend, match=r"cpu: .*; reference: only_by_name"):
        choose_kernels("auto", "auto", 3, head_dim, block_size)


def test_a_backend_that_nobody_registered_is_refused() -> None:
    with pytest.raises(NoKernelBackend, match="known: triton, cpu, reference"):
        backend_named("fpga")


def test_auto_keeps_rows_as_they_were_computed() -> None:
    assert [kv_dtype_for(choice) for choice in ("auto", "float16")] == ["float32", "float16"]


@pytest.mark.parametrize("row", BACKENDS, ids=lambda row: row.name)
def test_every_backend_has_every_function_with_the_interfaces_parameters(row) -> None:
    backend = backend_named(row.name)
    assert row.name == backend.NAME
    for name, asked in inspect.getmembers(KernelBackend, inspect.isfunction):
        if name.startswith("_") or name == "NAME":
            continue
        offered = getattr(backend, name)
        parameters = list(inspect.signature(getattr(offered, "py_func", offered)).parameters)
        assert parameters == list(inspect.signature(asked).parameters)[1:], name


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_reference_backend_computes_what_the_cpu_does(kv_dtype: KVDtype) -> None:
    case = PagedCase([64, 63, 17, 1], [1, 20, 17, 1], kv_dtype=kv_dtype, block_size=32)
    for window, soft_cap in ((0, 0.0), (9, 0.0), (0, 3.0)):
        mine = case.run(window=window, soft_cap=soft_cap)
        other = case.run(reference_backend, window=window, soft_cap=soft_cap)
        np.testing.assert_allclose(mine, other, atol=TOLERANCE_FP32, rtol=TOLERANCE_FP32)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_both_backends_rotate_and_store_the_same_rows(kv_dtype: KVDtype) -> None:
    rng = np.random.default_rng(5)
    qkv = as_stored(rng.standard_normal((7, 15 * 16), dtype=np.float32), np.dtype(np.uint16))
    angles = rng.standard_normal((9, 8), dtype=np.float32)
    rows = np.arange(7, dtype=np.int64)
    pools = [KVPool(1, 3, 3, 16, kv_dtype=kv_dtype) for _ in range(2)]
    found = []
    for backend, pool in zip((cpu, reference_backend), pools, strict=True):
        q = np.empty((7, 9, 16), dtype=np.float32)
        backend.rotate_and_write(qkv, np.cos(angles), np.sin(angles), rows, rows, pool.k[0], pool.v[0], q)
        found.append((q, *pool.read_rows(0, np.zeros(7, dtype=np.int64), rows)))
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6, rtol=2**-7 if kv_dtype == "bfloat16" else 2**-9)
