"""Every reason that is classified as runtime is raised here, or by a ledger's case, through a public function.

A new refusal without a case, a runtime reason without a class, or a class without a row in the table of reasons
makes a test fail.
"""

from __future__ import annotations

import ast
import importlib
import pickle
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from copyhold.actors.cache_settings import refuse_lossy
from copyhold.kernels.shared_schedule import chunk_attention, hydragen
from copyhold.kvcore import (
    address_errors,
    byte_errors,
    contract_errors,
    errors,
    execution_errors,
    manifest_errors,
    reasons,
)
from copyhold.kvcore.addresses import Coordinate, View, require_address, translate
from copyhold.kvcore.axes import BASE_AXES, tensor_layout
from copyhold.kvcore.byte_ledger import (
    GroupRow,
    check_local_heads,
    check_row_bytes,
    check_tail_claim,
    check_unique_blocks,
    model_row_bytes,
    rank_row_bytes,
    rectangular_ledger,
    request_view_ledger,
    tail_view,
    unique_physical_ledger,
)
from copyhold.kvcore.commands import (
    Admit,
    Complete,
    Dispatch,
    Genesis,
    GroupSpec,
    Publish,
    RequestHandle,
    RowSpan,
    Scope,
)
from copyhold.kvcore.compatibility import Candidate, Compatibility, require_compatible, validate
from copyhold.kvcore.contract_errors import ContractRefusal
from copyhold.kvcore.descriptors import DescriptorTable
from copyhold.kvcore.execution import (
    END_ROW,
    ExecutionSnapshot,
    check_chunks,
    check_counts,
    coverage_of,
    take_snapshot,
)
from copyhold.kvcore.fragmentation import arena, copy_cost, expected_tail, external_ratio
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.manifests import (
    CacheGroupManifest,
    check_layer_coverage,
    require_same_layout,
    require_same_reading,
    require_same_world,
    successor,
    world_digest,
)
from copyhold.kvcore.placement import place
from copyhold.kvcore.pool_bytes import metadata_ledger, pool_ledger
from copyhold.kvcore.quantities import (
    AvoidedCapacityBytes,
    BlockReferences,
    HeldBytes,
    MetadataBytes,
    PhysicalBytes,
    RequestBytes,
    RowBytes,
    SavedPayloadBytes,
    SlotId,
    UniqueBlocks,
)
from copyhold.kvcore.reasons import Reason, ReasonRegistry, kvcore_reasons, markdown_table
from copyhold.kvcore.sizing import GroupDemand, RankMemory, kv_budget_bytes, size_pools
from copyhold.kvcore.snapshots import RequestSnapshot, check_growth, snapshot

Case = Callable[[Any], object]
KVCORE = Path(errors.__file__).parent
TESTS = Path(__file__).parents[1]
replace = msgspec.structs.replace
ROW = RowBytes(64)
FULL = GroupDemand("full", 16, 1024)
ALL = {"full": Fraction(1)}
DIMS = {"layer": 2, "slot": 3, "token": 16, "kv_head": 3, "lane": 8}
FACTS = Compatibility(b"abi", b"l", 1, b"", "none", "p", b"", (), "a", 1, b"s", 1)


def _of_blocks(tables: list[list[int]]) -> Any:
    return unique_physical_ledger(tables, [100, 101], [16, 4], 16, ROW)


class _SharedStep:
    """Two requests of one prompt, dispatched over what follows their common hit of 8 rows."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.ledger.apply(Genesis(b"w", (GroupSpec("full", 4, 16),), 4, 64, "p"))
        first = self._admit(9)
        self.ledger.apply(Dispatch(1, (RowSpan(first, 0, 9),)))
        self.ledger.apply(Complete(1, ((0, 5),)))
        self.ledger.apply(Publish((first,)))
        self.handles = [self._admit(10 + more) for more in range(2)]
        self.ledger.apply(
            Dispatch(2, tuple([RowSpan(h, 8, 2 + more) for more, h in enumerate(self.handles)]))
        )
        self.taken = take_snapshot(self.ledger, self.handles, "c")

    def _admit(self, count: int) -> RequestHandle:
        tokens = np.arange(1, count + 1, dtype="<i4").tobytes()
        return self.ledger.apply(Admit(self.ledger.log_index, Scope("a", 1, b"w"), tokens)).request

    def completed(self) -> Ledger:
        self.ledger.apply(Complete(2))
        return self.ledger

    def later(self) -> ExecutionSnapshot:
        self.completed()
        return self.taken

    def with_chunk(self, end_row: int) -> ExecutionSnapshot:
        chunks = self.taken.chunks.copy()
        chunks[0, END_ROW] = end_row
        return replace(self.taken, chunks=chunks)


def _step(attempt: Callable[[_SharedStep], object]) -> Case:
    return lambda s: attempt(_SharedStep())


def _uneven() -> ExecutionSnapshot:
    """Four sequences, of which three share a chunk and all four the one above it."""
    chunks = np.array([[0, 4, 0, 4, 0], [4, 8, 0, 3, 1]], dtype=np.int64)
    four = np.arange(4, dtype=np.int64)
    handles = tuple([RequestHandle(slot, 1) for slot in range(4)])
    return ExecutionSnapshot(0, b"", "c", handles, four, four + 9, chunks, np.zeros(2, dtype=np.uint64))


def _chunks(*rows: list[int]) -> Case:
    return lambda s: check_chunks(np.array(rows, dtype=np.int64), 4)


def _with(first: Any, second: Any) -> Case:
    return lambda s: first + second


def _facts(field: str, value: Any) -> Case:
    return lambda s: require_compatible(FACTS, replace(FACTS, **{field: value}))


def _world(**changes: Any) -> Case:
    return lambda s: require_same_world(s.world, replace(s.world, **changes))


def _layout(**changes: Any) -> Case:
    return lambda s: require_same_layout(
        s.layout, replace(s.layout, groups=(s.layout.groups[0], s.make_group(**changes)))
    )


def _address(**changes: Any) -> Case:
    def attempt(s: Any) -> object:
        view, at = s.example.view(33), Coordinate(16, 24, "K", 1, 5)
        fields = {name: value for name, value in changes.items() if name in at.__struct_fields__}
        return translate(
            replace(view, **{k: v for k, v in changes.items() if k not in fields}), replace(at, **fields)
        )

    return attempt


def _moved(**changes: Any) -> Case:
    """One group, block 51 in slot 2 of 4; `changes` damage what translation reads."""

    def attempt(s: Any) -> object:
        group = s.make_group("g", (0,), 16, 4, 2, 8)
        manifest = place([group], [(0, group.keys.total_bytes)])
        generation, rows = changes.get("generation", 3), changes.get("rows", 16)
        described = (DescriptorTable("g", 3, 16, [51], [changes.get("slot", 2)], [rows]),)
        held = RequestSnapshot(16, 1, (np.array(changes.get("table", [51]), dtype=np.int64),), (generation,))
        return translate(View(manifest, described, held, 1), Coordinate(5, 0, "K", 0, 0))

    return attempt


def _growth(s: Any) -> object:
    manifest, described = s.example.manifest, s.example.descriptors()
    before = snapshot(manifest, 16, [[1000], [2000]], [2, 2], [7, 7])
    after = snapshot(manifest, 17, [[1000, 1003], [2003, 2001]], [3, 3], [7, 7])
    return check_growth(manifest, (before, described), (after, described))


GROUP = CacheGroupManifest("g", (0,), 16, 1, 8, 0)
CASES: dict[type[ContractRefusal], Case] = {
    contract_errors.WrongDtype: lambda s: request_view_ledger(np.array([1.0]), 16, ROW),
    contract_errors.NegativeCount: lambda s: request_view_ledger([4, -1], 16, ROW),
    contract_errors.EmptyInput: lambda s: rank_row_bytes([]),
    contract_errors.LengthMismatch: lambda s: rectangular_ledger([1, 2], [3], ROW),
    contract_errors.IdOutOfRange: lambda s: s.example.manifest.require_group("g0", 2),
    contract_errors.SlotIdOverflow: lambda s: pool_ledger(2**27 + 1, 0, 16, ROW),
    byte_errors.RowBytesMismatch: lambda s: check_row_bytes(GroupRow("g", 2, 4, 8, 2, 1), 2 * 2 * 4 * 8 * 2),
    byte_errors.GlobalHeadsOnRank: lambda s: check_local_heads(GroupRow("g", 2, 3, 8, 4, 4), 1, (2, 1)),
    byte_errors.UndeclaredShardMultiplication: lambda s: model_row_bytes(ROW, "disjoint", (2, 1)),
    byte_errors.RowsExceedReservation: lambda s: rectangular_ledger([9, 17], [16, 16], ROW),
    byte_errors.BlockCountMismatch: lambda s: request_view_ledger([33], 16, ROW, [2]),
    byte_errors.ReferencesCountedAsBlocks: lambda s: check_unique_blocks(
        3, _of_blocks([[100, 101], [100]]), request_view_ledger([20, 16], 16, ROW)
    ),
    byte_errors.SharedRowsCountedAsTail: lambda s: check_tail_claim(
        21, _of_blocks([[100, 101], [100]]), tail_view([20, 7], [[100, 101], [100]], [100, 101], [16, 4], 16)
    ),
    byte_errors.RowsDisagree: lambda s: tail_view([20], [[100, 101]], [100, 101], [16, 3], 16),
    byte_errors.SavingsLedgersConflated: _with(SavedPayloadBytes(1), AvoidedCapacityBytes(1)),
    byte_errors.PoolDoesNotReconcile: lambda s: pool_ledger(8, 3, 16, ROW, idle_blocks=4),
    byte_errors.ReservedReportedAsLive: _with(HeldBytes(8), PhysicalBytes(3)),
    byte_errors.MetadataRecordMissing: lambda s: metadata_ledger({"map": 1}, {"map": 4}, {"map": "host"}),
    byte_errors.MetadataMixedWithPayload: _with(PhysicalBytes(8), MetadataBytes(8)),
    byte_errors.ExternalRatioAddedToSlack: lambda s: RequestBytes(8) + external_ratio([1, 2]),  # type: ignore[operator]
    byte_errors.RatioWithoutFreeBytes: lambda s: external_ratio([]).fraction,
    byte_errors.ExtentsExceedArena: lambda s: arena(12, 9, [1, 1], 1),
    byte_errors.ExpectationReportedAsObservation: lambda s: expected_tail(16, ROW).bytes < PhysicalBytes(9),  # type: ignore[operator]
    byte_errors.CapacityReportedAsTraffic: lambda s: (
        copy_cost(2, 16, ROW).traffic + copy_cost(2, 16, ROW).destination  # type: ignore[operator]
    ),
    byte_errors.QuantitiesMixed: _with(RequestBytes(1), PhysicalBytes(1)),
    byte_errors.SplitNotWhole: lambda s: size_pools([2**20], [[FULL]], {"full": Fraction(1, 2)}),
    byte_errors.RanksDisagree: lambda s: size_pools([2**20], [[FULL], [FULL]], ALL),
    byte_errors.PoolBelowMinimum: lambda s: size_pools([2**20], [[FULL]], ALL, required_rows=1025),
    byte_errors.NegativeAvailableMemory: lambda s: kv_budget_bytes(
        0, RankMemory(100, Fraction(1, 2), 51, 49)
    ),
    byte_errors.MemoryNotFree: lambda s: kv_budget_bytes(0, RankMemory(100, Fraction(1, 2), 10, 39)),
    address_errors.TokenOutsideContext: _address(token=33),
    address_errors.LayerOutsideGroups: _address(layer=32),
    address_errors.StaleTableVersion: _address(current_version=6),
    address_errors.OutsideBlockTable: _moved(table=[]),
    address_errors.UnknownPhysicalId: _moved(table=[52]),
    address_errors.PoolRebuilt: _moved(generation=2),
    address_errors.GroupOfAnotherPool: lambda s: s.example.manifest.require_group("g0", 1),
    address_errors.RowNotMaterialised: _moved(rows=5),
    address_errors.HeadOutOfRange: _address(head=4),
    address_errors.LaneOutOfRange: _address(lane=128),
    address_errors.AddressOutsideTensor: _moved(slot=4),
    address_errors.SlotIdUsedAsAddress: lambda s: require_address(
        s.example.manifest.groups[1].keys,
        SlotId(96),  # type: ignore[arg-type]
    ),
    address_errors.TableLengthDrift: lambda s: snapshot(s.example.manifest, 17, [[1], [2]], [1, 1], [7, 7]),
    address_errors.CrossGroupBundleMismatch: lambda s: snapshot(
        s.example.manifest, 16, [[1], [2]], [1, 2], [7, 7]
    ),
    address_errors.OverlappingTensorRanges: lambda s: place([s.make_group("g", (0,))], [(0, 8)]),
    address_errors.SlotReuse: lambda s: DescriptorTable("g", 1, 16, [4, 5, 6], [2, 1, 2], [1, 1, 1]),
    address_errors.FrozenAddressChanged: _growth,
    address_errors.AddressRangeOverflow: lambda s: place([s.make_group("g", (0,))], [(0, 2**63 - 8)]),
    manifest_errors.LayerGap: lambda s: check_layer_coverage((GROUP,), 2),
    manifest_errors.LayerInTwoGroups: lambda s: check_layer_coverage((GROUP, replace(GROUP, name="h")), 1),
    manifest_errors.DuplicateGroup: lambda s: check_layer_coverage((GROUP, replace(GROUP, layers=(1,))), 2),
    manifest_errors.DuplicateAxis: lambda s: tensor_layout("float32", (*BASE_AXES, "lane"), DIMS),
    manifest_errors.MissingAxis: lambda s: tensor_layout("float32", BASE_AXES[1:], DIMS),
    manifest_errors.UnknownAxis: lambda s: tensor_layout("float32", (*BASE_AXES, "page"), DIMS),
    manifest_errors.UnknownDtype: lambda s: tensor_layout("complex64", BASE_AXES, DIMS),
    manifest_errors.StridesDoNotFollowAxes: lambda s: s.make_group().keys.check("k", DIMS),
    manifest_errors.MissingLogicalAbi: lambda s: replace(s.world, cache_abi=""),
    manifest_errors.PartitionContradiction: lambda s: replace(s.world, kv_head_partition=(8, 0)),
    manifest_errors.ManifestUnchanged: lambda s: successor(s.world),
    manifest_errors.BlockReinterpreted: lambda s: require_same_reading(
        world_digest(s.world), successor(s.world, quantization="int8").digest
    ),
    manifest_errors.HashCollisionWitness: lambda s: validate(
        Candidate(b"k", 0, np.arange(4, dtype="<i4").tobytes(), FACTS), FACTS, np.arange(5)
    ),
    manifest_errors.CacheAbiMismatch: _world(cache_abi="other"),
    manifest_errors.LayoutMismatch: _facts("layout", b"other"),
    manifest_errors.CacheGroupsMismatch: _layout(block_size=32),
    manifest_errors.TpRankMismatch: _world(kv_head_partition=(5, 3)),
    manifest_errors.StorageRepresentationMismatch: _layout(dtypes=("float16", "bfloat16")),
    manifest_errors.StrideLayoutMismatch: _layout(num_slots=9),
    manifest_errors.ModelGenerationMismatch: _world(model_revision="r2"),
    manifest_errors.AdapterMismatch: _world(adapter_digest=b"lora"),
    manifest_errors.WeightTransformMismatch: _world(weight_transform="hadamard"),
    manifest_errors.PositionContractMismatch: _world(position_contract="rope.1e6"),
    manifest_errors.TokenMismatch: _facts("tokens", b"\x01\x00\x00\x00"),
    manifest_errors.SideInputMismatch: _facts("side_inputs", (1,)),
    manifest_errors.NamespaceMismatch: _facts("namespace", "b"),
    manifest_errors.NamespaceGenerationDiffers: _facts("namespace_generation", 2),
    manifest_errors.SaltMismatch: _facts("salt", b"t"),
    manifest_errors.PublicationGenerationMismatch: _facts("publication_generation", 2),
    execution_errors.StaleSnapshot: _step(lambda step: step.later().require_current(step.ledger)),
    execution_errors.SequenceOrderChanged: _step(
        lambda step: step.taken.require_step(step.handles[::-1], "c")
    ),
    execution_errors.TensorContractMismatch: _step(lambda step: step.taken.require_step(step.handles, "d")),
    execution_errors.ChunkDigestMismatch: _step(
        lambda step: replace(step.taken, digests=step.taken.digests + np.uint64(1)).require_same_blocks(
            step.ledger
        )
    ),
    execution_errors.GroupMembersDoNotSharePrefix: _step(
        lambda step: step.with_chunk(end_row=12).require_same_blocks(step.ledger)
    ),
    execution_errors.UnprotectedPath: _step(
        lambda step: take_snapshot(step.ledger, [*step.handles, *step.handles], "c")
    ),
    execution_errors.ExecutionWithoutReceipt: _step(
        lambda step: take_snapshot(step.completed(), step.handles, "c")
    ),
    execution_errors.CoverageOutOfRange: _chunks([0, 4, 0, 5, 0]),
    execution_errors.ChildOutsideParentCoverage: _chunks([0, 4, 0, 2, 0], [4, 8, 1, 3, 1]),
    execution_errors.KeyCoveredTwice: _chunks([0, 4, 0, 4, 0], [3, 8, 0, 2, 1]),
    execution_errors.ChunkGap: _chunks([0, 4, 0, 4, 0], [5, 8, 0, 2, 1]),
    execution_errors.CoverageNotContiguous: lambda s: coverage_of([["C0"], ["C1"], ["C0"]]),
    execution_errors.KeyNotCovered: lambda s: check_counts([(0, 4), (5, 8)], 0, 8),
    execution_errors.ValidCountMismatch: lambda s: check_counts([(0, 4), (4, 9)], 0, 8),
    execution_errors.GroupSizeNotDivisible: lambda s: hydragen(_uneven(), np.ones(4, dtype=np.int64)),
    execution_errors.PartialBufferTooSmall: lambda s: chunk_attention(
        _uneven(), np.ones(4, dtype=np.int64), buffer_rows=3
    ),
    contract_errors.LossyEvictionInExactMode: lambda s: refuse_lossy("h2o"),
    reasons.DropWithoutReason: lambda s: kvcore_reasons()["no_such_reason"],
    reasons.ReasonInTwoStages: lambda s: ReasonRegistry(
        [Reason("a", "docs", "lease"), Reason("a", "docs", "claims")]
    ),
}


class _Samples:
    def __init__(self, world: Any, layout: Any, example: Any, make_group: Any) -> None:
        self.world, self.layout, self.example, self.make_group = world, layout, example, make_group


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_refusal_is_raised_and_survives_a_process_border(
    kind: type[ContractRefusal], world: Any, layout: Any, example: Any, make_group: Any
) -> None:
    with pytest.raises(ContractRefusal) as caught:
        CASES[kind](_Samples(world, layout, example, make_group))
    assert type(caught.value) is kind, caught.value
    assert str(caught.value).startswith(f"{kind.reason}: ")
    twin = pickle.loads(pickle.dumps(caught.value))
    assert type(twin) is kind and str(twin) == str(caught.value)


def _refusals() -> Iterator[type[Exception]]:
    """Every class of kvcore that states a reason, the bases aside."""
    for path in sorted(KVCORE.glob("*.py")):
        if "reason: ClassVar" not in path.read_text("utf-8"):
            continue
        for kind in vars(importlib.import_module(f"copyhold.kvcore.{path.stem}")).values():
            if isinstance(kind, type) and issubclass(kind, Exception) and getattr(kind, "reason", ""):
                yield kind


def _ledger_cases() -> set[str]:
    """Reasons with a registered case, `@case("reason")`, in the tests of the ledger."""
    found: set[str] = set()
    for path in TESTS.glob("kvcore*/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "case":
                found |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def test_every_refusal_of_pure_functions_has_a_case() -> None:
    assert {kind for kind in _refusals() if issubclass(kind, ContractRefusal)} == set(CASES)


def test_runtime_reasons_are_exactly_those_with_a_class_and_a_case() -> None:
    runtime = {row.name for row in kvcore_reasons().of_kind("runtime")}
    classes = {str(vars(kind).get("reason", "")) for kind in _refusals()}
    assert runtime == classes, f"without a class {runtime - classes}, not in the table {classes - runtime}"
    cases = {kind.reason for kind in CASES} | _ledger_cases()
    assert runtime <= cases, f"without a case {runtime - cases}"


def test_auditor_reasons_are_names_that_the_audit_reports() -> None:
    text = "".join(path.read_text("utf-8") for path in KVCORE.glob("audit*.py"))
    assert [row.name for row in kvcore_reasons().of_kind("auditor") if row.name not in text] == []


def test_docs_reasons_say_why_and_no_class_raises_them() -> None:
    for row in kvcore_reasons().all():
        assert bool(row.why) == (row.kind == "docs"), row.name
        assert row.stage in reasons.STAGES and row.kind in ("runtime", "auditor", "docs")
        if row.kind == "docs":
            assert len(row.why.split()) >= 6 and row.why.endswith(".")


def test_the_table_covers_its_contracts() -> None:
    """Every reason of these sections is classified; a contract without one states a rule of structure."""
    named = {contract for row in kvcore_reasons().all() for contract in row.contracts}
    ledger = [*range(1, 12), *range(18, 78), *range(207, 220), *range(237, 246)]
    reuse = [*range(92, 130), *range(148, 160), *range(193, 202)]
    without = {f"K{number:03}" for number in (*ledger, *reuse)} - named
    assert without == {"K116", "K217", "K218"}, "these refer to other contracts' reasons"
    assert len(markdown_table(kvcore_reasons().all()).splitlines()) == len(kvcore_reasons().all()) + 2


def test_unequal_kinds_are_not_equal_and_zero_starts_a_sum() -> None:
    assert RequestBytes(4) != PhysicalBytes(4) and UniqueBlocks(4) != BlockReferences(4)
    assert sum([PhysicalBytes(4), PhysicalBytes(5)], PhysicalBytes(0)) == PhysicalBytes(9)
    with pytest.raises(byte_errors.QuantitiesMixed):
        _ = 4 + PhysicalBytes(5)
    with pytest.raises(AttributeError):
        PhysicalBytes(4).value = 5
