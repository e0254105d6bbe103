"""What the server counts, in Prometheus's text format.

Owns the names, labels and words of the metrics (docs/operations.md shows the same table). Invariant: the only labels are the
replica's number, a rank and a kind from a fixed list of words; no prompt, token, key, digest, incarnation or tenant name can
become part of an exposition (K183). Figures are read from the server at each scrape and kept nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
_REPLICA = ("replica",)
_KIND = ("replica", "kind")
_RANK = ("replica", "rank")
_RANK_KIND = ("replica", "rank", "kind")

Labels = tuple[str, ...]
Sample = tuple[Labels, float]


class MetricSpec(msgspec.Struct, frozen=True):
    """One metric: a counter's exposed name ends in ``_total``."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: Labels
    doc: str


class GatewayFigures(msgspec.Struct, frozen=True):
    """What the gateway knows by itself."""

    open_streams: int
    draining: bool
    refused: dict[str, int]


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("copyhold_authority_up", "gauge", (), "1 when the authority answered this scrape."),
    MetricSpec("copyhold_authority_store_up", "gauge", (), "1 when the authority's store answered it."),
    MetricSpec("copyhold_draining", "gauge", (), "1 when the server takes no new requests."),
    MetricSpec("copyhold_open_streams", "gauge", (), "Answers in progress on the tenant port."),
    MetricSpec(
        "copyhold_authorizations_refused_total",
        "counter",
        ("kind",),
        "Calls turned away: unauthenticated, rate_limited, not_found or unavailable.",
    ),
    MetricSpec(
        "copyhold_revocations_total",
        "counter",
        ("kind",),
        "Revocations by outcome of the certificate, or refused.",
    ),
    MetricSpec("copyhold_recoveries_total", "counter", (), "Replicas that were replaced after a loss."),
    MetricSpec("copyhold_leases", "gauge", (), "Replicas that hold a serving lease."),
    MetricSpec("copyhold_replica_serving", "gauge", _REPLICA, "1 when the replica admits and computes."),
    MetricSpec("copyhold_lease_remaining_seconds", "gauge", _REPLICA, "Time left of the serving lease."),
    MetricSpec(
        "copyhold_requests_admitted_total", "counter", _REPLICA, "Requests whose blocks were reserved."
    ),
    MetricSpec(
        "copyhold_requests_finished_total", "counter", _KIND, "Requests by finish reason: stop, length."
    ),
    MetricSpec(
        "copyhold_requests_failed_total", "counter", _KIND, "Requests that ended with an error, by kind."
    ),
    MetricSpec("copyhold_requests_running", "gauge", _REPLICA, "Requests in the batch."),
    MetricSpec("copyhold_requests_waiting", "gauge", _REPLICA, "Requests that wait for blocks or a place."),
    MetricSpec("copyhold_prompt_tokens_total", "counter", _REPLICA, "Prompt tokens of admitted requests."),
    MetricSpec("copyhold_cached_tokens_total", "counter", _REPLICA, "Prompt tokens served from cached K/V."),
    MetricSpec("copyhold_generated_tokens_total", "counter", _REPLICA, "Tokens released to callers."),
    MetricSpec(
        "copyhold_unproved_routes_total",
        "counter",
        _REPLICA,
        "Requests of which the ledger proved less than their route expected.",
    ),
    MetricSpec("copyhold_preemptions_total", "counter", _REPLICA, "Requests put back to free blocks."),
    MetricSpec("copyhold_receipts_lost_total", "counter", _REPLICA, "Receipts that no store took."),
    MetricSpec("copyhold_steps_total", "counter", _REPLICA, "Engine steps."),
    MetricSpec("copyhold_step_seconds_total", "counter", _REPLICA, "Wall time of all steps."),
    MetricSpec(
        "copyhold_execution_seconds_total", "counter", _REPLICA, "Time of the slowest rank in each step."
    ),
    MetricSpec("copyhold_pool_blocks", "gauge", _KIND, "K/V blocks: free, evictable, live or reserved."),
    MetricSpec(
        "copyhold_compared_log_indices_total",
        "counter",
        _REPLICA,
        "Log indices at which all ledgers were compared.",
    ),
    MetricSpec("copyhold_differing_log_indices_total", "counter", _REPLICA, "Comparisons that failed."),
    MetricSpec(
        "copyhold_kernel_backends",
        "gauge",
        _KIND,
        "Kernel backends asked at start, by what became of each: cpu_selected, reference_not_needed, ...",
    ),
    MetricSpec("copyhold_rank_steps_total", "counter", _RANK, "Steps a rank has executed."),
    MetricSpec("copyhold_rank_log_index", "gauge", _RANK, "Next log index of the rank's ledger."),
    MetricSpec(
        "copyhold_attention_steps_total",
        "counter",
        _RANK_KIND,
        "Steps by how shared K/V was read: plain, hydragen or chunk.",
    ),
    MetricSpec(
        "copyhold_shared_rows_saved_total",
        "counter",
        _RANK,
        "K/V rows of a layer that shared steps did not read again; no measure of time.",
    ),
    MetricSpec(
        "copyhold_shared_gain",
        "gauge",
        _RANK,
        "Mean measured speed-up of attention over the sampled shared steps.",
    ),
)

_POOL_KINDS = ("free", "evictable", "live", "reserved")
_PATHS: dict[str, tuple[str, ...]] = {
    "copyhold_requests_admitted_total": ("requests", "admitted"),
    "copyhold_requests_running": ("running",),
    "copyhold_requests_waiting": ("waiting",),
    "copyhold_prompt_tokens_total": ("requests", "prompt_tokens"),
    "copyhold_cached_tokens_total": ("requests", "cached_tokens"),
    "copyhold_generated_tokens_total": ("requests", "generated_tokens"),
    "copyhold_unproved_routes_total": ("requests", "unproved_routes"),
    "copyhold_preemptions_total": ("preemptions",),
    "copyhold_receipts_lost_total": ("receipts_lost",),
    "copyhold_steps_total": ("times", "steps"),
    "copyhold_step_seconds_total": ("times", "step_s"),
    "copyhold_execution_seconds_total": ("times", "execution_s"),
    "copyhold_compared_log_indices_total": ("agreement", "compared_log_indices"),
    "copyhold_differing_log_indices_total": ("agreement", "differing"),
    "copyhold_replica_serving": ("serving",),
    "copyhold_lease_remaining_seconds": ("lease_remaining_s",),
}


def exposition(fleet: Mapping[str, Any] | None, gateway: GatewayFigures) -> bytes:
    """The text of one scrape; ``fleet`` is the authority's ``metrics()``, ``None`` when it did not answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(_samples(fleet, gateway)))
    return generate_latest(registry)


class _Snapshot(Collector):
    """Figures that were read already."""

    def __init__(self, samples: Mapping[str, Iterable[Sample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        for spec in METRICS:
            if spec.name not in self._samples:
                continue
            if spec.kind == "counter":
                family = CounterMetricFamily(spec.name.removesuffix("_total"), spec.doc, labels=spec.labels)
            else:
                family = GaugeMetricFamily(spec.name, spec.doc, labels=spec.labels)
            for labels, value in self._samples[spec.name]:
                family.add_metric(labels, value)
            yield family


def _samples(fleet: Mapping[str, Any] | None, gateway: GatewayFigures) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {
        "copyhold_authority_up": [((), float(fleet is not None))],
        "copyhold_draining": [((), float(gateway.draining))],
        "copyhold_open_streams": [((), gateway.open_streams)],
        "copyhold_authorizations_refused_total": _by_kind((), gateway.refused),
    }
    if fleet is None:
        return found
    replicas = [(_number(figures["replica"]), figures) for figures in fleet["replicas"]]
    found |= {
        "copyhold_authority_store_up": [((), float(fleet["store_up"]))],
        "copyhold_revocations_total": _by_kind((), fleet["revocations"]),
        "copyhold_recoveries_total": [((), fleet["recoveries"])],
        "copyhold_leases": [((), sum(figures.get("lease_remaining_s", 0.0) > 0 for _, figures in replicas))],
    }
    for number, figures in replicas:
        for name, sample in _replica_samples((number,), figures):
            found.setdefault(name, []).append(sample)
    return found


def _replica_samples(replica: Labels, figures: Mapping[str, Any]) -> Iterator[tuple[str, Sample]]:
    """A replica that is lost or starting has few figures; those it lacks are left out."""
    for name, path in _PATHS.items():
        value: Any = figures
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float):
            yield name, (replica, float(value))
    requests = figures.get("requests", {})
    for ending in ("finished", "failed"):
        for sample in _by_kind(replica, requests.get(ending, {})):
            yield f"copyhold_requests_{ending}_total", sample
    pool = figures.get("pool", {})
    for sample in _by_kind(replica, {kind: pool[kind] for kind in _POOL_KINDS if kind in pool}):
        yield "copyhold_pool_blocks", sample
    asked = figures.get("kernels", {}).get("considered", ())
    for sample in _by_kind(replica, {f"{each['backend']}_{each['outcome']}": 1 for each in asked}):
        yield "copyhold_kernel_backends", sample
    for rank, position in enumerate(figures.get("ranks", ())):
        for name, key in (("copyhold_rank_steps_total", "steps"), ("copyhold_rank_log_index", "log_index")):
            if key in position:
                yield name, ((*replica, str(rank)), position[key])
        yield from _shared_reads((*replica, str(rank)), position.get("shared_reads", {}))


def _shared_reads(rank: Labels, report: Mapping[str, Any]) -> Iterator[tuple[str, Sample]]:
    for sample in _by_kind(rank, report.get("steps", {})):
        yield "copyhold_attention_steps_total", sample
    if report:
        saved = report["logical_rows"] - report["physical_rows"]
        yield "copyhold_shared_rows_saved_total", (rank, float(saved))
    if report.get("samples"):
        yield "copyhold_shared_gain", (rank, report["measured_gain"])


def _by_kind(labels: Labels, counts: Mapping[str, float]) -> list[Sample]:
    return [((*labels, kind), counts[kind]) for kind in sorted(counts)]


def _number(replica: str) -> str:
    return replica.rpartition("-")[2]
