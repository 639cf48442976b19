"""What is measured while serving, in Prometheus' form. `docs/metrics.md` explains every one."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onela.engine import AsyncEngine, Result
from onela.engine.async_engine import StepReport

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)
COUNTS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "onela_requests", "Requests by how they ended.", ["outcome"], registry=self.registry
        )
        self.stages = Histogram(
            "onela_request_seconds",
            "Time of answered requests by stage: queue, prefill, decode, total.",
            ["stage"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.prompt_tokens = Histogram(
            "onela_prompt_tokens",
            "Prompt lengths of answered requests.",
            buckets=COUNTS,
            registry=self.registry,
        )
        self.items = Counter("onela_items", "Items in answers.", registry=self.registry)
        self.step_seconds = Histogram(
            "onela_step_seconds", "Time of an engine step.", buckets=SECONDS, registry=self.registry
        )
        self.step_rows = Histogram(
            "onela_step_rows", "Beams decoded in an engine step.", buckets=COUNTS, registry=self.registry
        )
        self.step_prefill_tokens = Histogram(
            "onela_step_prefill_tokens",
            "Prompt tokens run in a step.",
            buckets=COUNTS,
            registry=self.registry,
        )

    def watch(self, engine: AsyncEngine) -> None:
        """Read an engine's state whenever the metrics are asked for."""
        self.registry.register(EngineCollector(engine))

    def step(self, report: StepReport) -> None:
        """Count one step; called on the engine's thread."""
        self.step_seconds.observe(report.seconds)
        self.step_rows.observe(report.decode_rows)
        self.step_prefill_tokens.observe(report.prefill_tokens)

    def ended(self, outcome: Result | str) -> None:
        """Count one request: its result, or the code of its error."""
        if isinstance(outcome, str):
            self.requests.labels(outcome).inc()
            return
        self.requests.labels(outcome.finish_reason).inc()
        self.items.inc(len(outcome.items))
        self.prompt_tokens.observe(outcome.usage.prompt_tokens)
        if outcome.timings is not None:
            for stage in ("queue", "prefill", "decode", "total"):
                self.stages.labels(stage).observe(getattr(outcome.timings, stage))

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Gauges and counters that the engine keeps anyway."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        running, engine = self.engine, self.engine.engine
        scheduler, prompts = engine.scheduler, engine.state.prompts
        yield _gauge("onela_up", "1 while the engine takes requests.", running.accepting)
        yield _gauge("onela_requests_waiting", "Requests in the queue.", running.num_waiting)
        yield _gauge("onela_requests_running", "Requests that hold places.", running.num_running)
        yield _gauge("onela_slots_used", "Record slots in use.", engine.state.records.slots.num_taken)
        yield _gauge("onela_beam_rows_used", "Places for beams in use.", scheduler.rows.num_taken)
        yield _gauge("onela_prompts_used", "Prompt places in use.", prompts.places.num_taken)
        yield _gauge(
            "onela_kv_pages_used", "KV pages in use, the prompt cache's too.", prompts.pages.num_taken
        )
        yield _counter(
            "onela_graph_captures",
            "Forwards and selections captured as CUDA graphs.",
            engine.runner.num_captures,
        )
        yield _counter(
            "onela_late_graph_captures",
            "Those that requests had to wait for, after a warm start.",
            engine.runner.num_late_captures,
        )
        yield _counter(
            "onela_device_wait_seconds", "Seconds that the engine waited for the device.", engine.waited_s
        )
        state = prompts.nbytes + engine.state.records.nbytes + engine.state.backend.nbytes
        yield _gauge("onela_state_bytes", "Bytes allocated for prompts, records and beams.", state)
        yield from self._catalog()
        yield from self._cache()

    def _catalog(self) -> Iterator[Metric]:
        catalogs = self.engine.engine.catalogs
        info = GaugeMetricFamily("onela_catalog_info", "The catalogue that is served.", labels=["version"])
        info.add_metric([catalogs.active.version or "none"], 1)
        yield info
        items = catalogs.active.catalog.num_items if catalogs.active.catalog is not None else 0
        yield _gauge("onela_catalog_items", "Items of the catalogue that is served.", items)
        yield _counter("onela_catalog_switches", "Switches and rollbacks.", catalogs.num_switches)

    def _cache(self) -> Iterator[Metric]:
        cache = self.engine.engine.cache
        if cache is None:
            return
        stats = cache.stats
        hits = CounterMetricFamily(
            "onela_prompt_cache_hits", "Prompts that began with a kept state.", labels=["tier"]
        )
        hits.add_metric(["device"], stats.hits - stats.host_hits)
        hits.add_metric(["host"], stats.host_hits)
        yield hits
        yield _counter(
            "onela_prompt_cache_misses", "Prompts that were run from their first token.", stats.misses
        )
        yield _counter(
            "onela_prompt_cache_hit_tokens", "Prompt tokens that need not be run.", stats.hit_tokens
        )
        yield _counter(
            "onela_prompt_cache_prompt_tokens", "Prompt tokens of all prompts.", stats.prompt_tokens
        )
        yield _counter("onela_prompt_cache_evictions", "States that left the device.", stats.evictions)
        yield _counter("onela_prompt_cache_dropped", "States that were given up.", stats.dropped)
        for name, text, values in (
            ("onela_prompt_cache_entries", "Kept states.", cache.num_entries),
            ("onela_prompt_cache_bytes", "Bytes of kept states.", cache.nbytes),
        ):
            family = GaugeMetricFamily(name, text, labels=["tier"])
            family.add_metric(["device"], values[0])
            family.add_metric(["host"], values[1])
            yield family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=float(value))
