"""The engine: a checkpoint, a catalogue, requests in, items out."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from onela.config import EngineConfig
from onela.decoding import BeamParams, HostBeams
from onela.engine.active import ActiveRequest
from onela.engine.catalogs import Catalogs
from onela.engine.flight import MAX_FLIGHTS, Flight
from onela.engine.interrupts import deferred_interrupts
from onela.engine.packing import SelectionShape
from onela.engine.prompt_cache import CacheStats, PromptCache
from onela.engine.prompting import PromptEncoder, PromptOptions
from onela.engine.request import Request, Result, prompt_field
from onela.engine.results import empty_result, make_result
from onela.engine.runner import Runner
from onela.engine.scheduler import Batch, Scheduler
from onela.engine.served import ServedCatalog
from onela.engine.tokenizer import load_tokenizer
from onela.engine.warm_up import capture, reserve_masks, selection_shapes, warm_up
from onela.errors import (
    CancelledError,
    ConfigError,
    DeadlineError,
    EngineError,
    NumericsError,
    OneLAError,
    RequestError,
    UnavailableError,
    shown,
)
from onela.items import ItemCatalog, SidVocabulary
from onela.models import LEAST, CausalLM, Rounding, load_model, read_model_config
from onela.state import (
    REPLAYING,
    DecodeState,
    PromptPool,
    Records,
    choose_backend,
    make_backend,
)

logger = logging.getLogger(__name__)


class Engine:
    """Decodes generative recommenders by exact wide-beam search.

    Build one with `from_pretrained`; the constructor takes the parts themselves.

    Args:
        model: the decoder.
        vocabulary: which tokens are the codes of which SID level.
        catalog: the items; None: every combination of codes is legal, and results carry no items.
        config: options.
        tokenizer: turns `Request.prompt` and `Request.messages` into tokens; None: only token prompts are taken.
        prompt_options: how it does.
    """

    def __init__(
        self,
        model: CausalLM,
        vocabulary: SidVocabulary,
        catalog: ItemCatalog | None = None,
        *,
        config: EngineConfig | None = None,
        tokenizer: Any = None,
        prompt_options: PromptOptions | None = None,
    ) -> None:
        self.model = model
        self.vocabulary = vocabulary
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        if self.config.quantization != getattr(model, "quantization", "none"):
            raise ConfigError(
                f"quantization: {self.config.quantization!r} was asked for, the model given is not; "
                "`load_model` and `CausalLM.quantize` make it so"
            )
        rounding: Rounding = getattr(model, "rounding", LEAST)
        if self.config.rounding != rounding.name:
            raise ConfigError(
                f"rounding: {self.config.rounding!r} was asked for, the model given has {rounding.name!r}; "
                "`load_model` makes it so"
            )
        self.device = model.lm_head.weight.device
        dtype = model.lm_head.weight.dtype
        if vocabulary.max_token_id >= model.config.vocab_size:
            raise ConfigError(
                f"vocabulary: token {vocabulary.max_token_id} lies outside the model's {model.config.vocab_size}"
            )
        self.prompt_encoder = PromptEncoder(tokenizer, vocabulary, model.config.vocab_size, prompt_options)
        record_dtype = (
            dtype if self.config.record_dtype == "auto" else getattr(torch, self.config.record_dtype)
        )
        geometry = model.config.geometry
        held = self.config
        if held.recurrent_backend == "auto":
            choice = choose_backend(
                geometry,
                num_levels=vocabulary.num_levels,
                beam_width=held.auto_beam_width,
                dtype=dtype,
                record_dtype=record_dtype,
            )
            held = dataclasses.replace(held, recurrent_backend=choice, full_state_mode="read_parent")
        prompts = PromptPool(
            geometry,
            dtype=dtype,
            device=self.device,
            page_size=self.config.page_size,
            max_prompts=self.config.max_prompts,
            max_pages=self.config.max_pages,
            # Tensor cores take a bf16 model's prompt states as two halves; only replay reads them so.
            split_states=self.device.type == "cuda"
            and dtype == torch.bfloat16
            and held.recurrent_backend in REPLAYING,
        )
        records = Records(
            geometry,
            dtype=dtype,
            record_dtype=record_dtype,
            device=self.device,
            transitions=held.recurrent_backend == "replay",
            conv_inputs=held.recurrent_backend != "records_moved",
            max_slots=self.config.max_slots,
        )
        backend = make_backend(
            held.recurrent_backend,
            geometry,
            prompts,
            records,
            dtype=dtype,
            record_dtype=record_dtype,
            full_state_mode=held.full_state_mode,
            replay_ssm_checkpoint=held.replay_ssm_checkpoint,
            fused_layer_step=held.fused_layer_step,
            round_steps=not rounding.least,
        )
        self.state = DecodeState(prompts, records, backend)
        if self.config.preallocate:
            self._preallocate()
        token_ids = [torch.as_tensor(vocabulary.token_ids(level)) for level in range(vocabulary.num_levels)]
        self.runner = Runner(
            model, self.state, token_ids, cuda_graphs=self.config.cuda_graphs, rounding=rounding
        )
        self.cache = PromptCache(self.config, prompts) if self.config.prompt_cache_bytes else None
        self.scheduler = Scheduler(self.config, prompts, records, cache=self.cache)
        self.catalogs = Catalogs(catalog, vocabulary, self.device)
        self._flights: deque[Flight] = deque()
        # Catalogues whose selections have been captured, and what is still to capture of one that came later.
        self._ready: weakref.WeakSet[ServedCatalog] = weakref.WeakSet([self.catalogs.active])
        self._to_capture: deque[SelectionShape] = deque()
        self.waited_s = 0.0
        self._generating = threading.RLock()
        if self.config.warm_up_tokens or self.config.warm_up_requests:
            warm_up(self.runner, self.config, vocabulary.num_levels, self.served)
            self.runner.seal(prefill=self.config.warm_up_tokens > 0, decode=self.config.warm_up_requests > 0)
            self._rehearse()

    @property
    def served(self) -> ServedCatalog:
        """The version of the catalogue that new requests begin with; `catalogs` loads and switches others."""
        return self.catalogs.active

    @property
    def catalog(self) -> ItemCatalog | None:
        """The catalogue that new requests are answered from."""
        return self.served.catalog

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        catalog: str | Path | ItemCatalog | None = None,
        vocabulary: SidVocabulary | None = None,
        sid_pattern: str | Sequence[str] | None = None,
        forced_prefix: str = "auto",
        chat_template: bool = False,
        enable_thinking: bool = False,
        **options: Any,
    ) -> Engine:
        """Load a Hugging Face directory.

        Args:
            path: directory with `config.json`, `*.safetensors` and, for text prompts and for finding the SID
                tokens, a tokenizer. Its `generation_config.json` is not read: nothing in it may cut beams.
            catalog: an `ItemCatalog`, or a file or directory that `ItemCatalog.load` reads.
            vocabulary: which tokens are SID codes; None: found in the tokenizer.
            sid_pattern: how SID tokens read, as in `SidVocabulary.from_vocab`; None: in a published way.
            forced_prefix, chat_template, enable_thinking: how text becomes tokens, see `PromptOptions`.
            options: fields of `EngineConfig` (`device`, `dtype`, `recurrent_backend`, ...).
        Raises:
            CheckpointError, ConfigError, VocabularyError, CatalogError: what cannot be loaded, and why.
        """
        config = EngineConfig.from_env(**options)
        for name, given, kinds, what in (
            ("path", path, (str, os.PathLike), "a checkpoint directory"),
            ("catalog", catalog, (str, os.PathLike, ItemCatalog, type(None)), "a path or an ItemCatalog"),
            ("vocabulary", vocabulary, (SidVocabulary, type(None)), "a SidVocabulary"),
        ):
            if not isinstance(given, kinds):
                raise ConfigError(f"{name}: {what} is expected, got {shown(given)}")
        device = resolve_device(config.device)
        # Whether the model can be run at all, before its words are looked at.
        read_model_config(path)
        tokenizer = load_tokenizer(path)
        if vocabulary is not None and sid_pattern is not None:
            raise ConfigError("sid_pattern: give it or a vocabulary, not both")
        if vocabulary is None:
            if tokenizer is None:
                raise ConfigError(
                    f"vocabulary: {path} has no tokenizer to find the SID tokens in; give a SidVocabulary"
                )
            vocabulary = SidVocabulary.from_tokenizer(tokenizer, sid_pattern)
        if catalog is not None and not isinstance(catalog, ItemCatalog):
            catalog = ItemCatalog.load(catalog, vocabulary=vocabulary)
        model = load_model(
            path,
            dtype=config.dtype,
            device=device,
            quantization=config.quantization,
            rounding=config.rounding,
        )
        prompt_options = PromptOptions(forced_prefix, chat_template, enable_thinking)
        return cls(
            model, vocabulary, catalog, config=config, tokenizer=tokenizer, prompt_options=prompt_options
        )

    def generate(self, requests: Sequence[Request], params: BeamParams | None = None) -> list[Result]:
        """Answer several requests together. Calls from several threads take turns.

        Args:
            requests: any number, of any lengths and widths.
            params: options of the requests that carry none of their own; None: the defaults.
        Returns:
            One result per request, in order.
        Raises:
            RequestError: a request is malformed; nothing has run then. It is named by its `request_id`, without one and
                among several by its place.
            CapacityError: a request can never fit.
            NumericsError: the model produced NaN for a request.
            DeadlineError: a request's `timeout_s` is over. EngineError: a step failed unexpectedly.
        The engine is usable after any of them, and after Ctrl-C, which ends these requests after the step that is being
        run; a second one interrupts the step itself.
        """
        with self._generating:
            return self._generate(requests, params)

    def _generate(self, requests: Sequence[Request], params: BeamParams | None) -> list[Result]:
        if isinstance(requests, Request) or not isinstance(requests, Iterable):
            raise RequestError("requests", "a list of Request is expected", value=requests)
        requests = list(requests)
        active = []
        for place, request in enumerate(requests):
            try:
                active.append(self.prepare(request, params))
            except RequestError as error:
                if not isinstance(request, Request):
                    raise
                name = request.request_id or (f"requests[{place}]" if len(requests) > 1 else None)
                if name is None:
                    raise
                raise error.in_request(name) from error
        queue = deque(member for member in active if member.outcome is None)
        for waiting in queue:
            self.scheduler.check(waiting)
        with deferred_interrupts() as let_interrupt:
            try:
                while any(member.outcome is None for member in active):
                    while queue and not self.scheduler.is_full:
                        self.scheduler.add(queue.popleft())
                    self.step()
                    let_interrupt()
                    for member in active:
                        if isinstance(member.outcome, OneLAError):
                            raise member.outcome
            finally:
                for member in active:
                    self.cancel(member)
        return [member.outcome for member in active if isinstance(member.outcome, Result)]

    def submit(self, request: Request, params: BeamParams | None = None) -> ActiveRequest:
        """Queue a request for the coming steps; its `outcome` is set when it has ended.

        Raises:
            RequestError: it is malformed. CapacityError: it can never fit. QueueFullError: too many wait already.
        """
        active = self.prepare(request, params)
        if active.outcome is None:
            self.scheduler.add(active)
        return active

    def cancel(self, request: ActiveRequest) -> bool:
        """End a request now and free all that it holds. False when it had ended already."""
        return self._end(request, CancelledError("the request was cancelled"))

    @torch.inference_mode()
    def step(self) -> list[ActiveRequest]:
        """One turn: schedule, run, select, advance, finish. Returns the requests that ended.

        What goes wrong ends requests, never the engine: a request past its deadline ends with `DeadlineError`, one
        whose logits are NaN with `NumericsError`, and when a step raises, all who took part with `EngineError`.
        """
        self.get_ready()
        ended = self._land(MAX_FLIGHTS - 1) + self._expire()
        # While prompts are being run, those whose turn would be next still come together.
        batch = self.scheduler.schedule(admit=not any(flight.batch.prefill for flight in self._flights))
        ended += self._refuse()
        if not batch.members:
            # Nothing can be done before the device has got further.
            return ended + (self._land(len(self._flights) - 1) if self._flights and not ended else [])
        try:
            self.runner.run(batch)
            self.scheduler.keep(batch)
            for request in batch.requests:
                request.advance()
            self._flights.append(Flight.begin(batch, self.device))
        except Exception as error:  # a bug, a fault of the device: whatever it is, the others go on
            return ended + self._fail(batch.members, error)
        # Whoever watches sees the beams as they are after this step.
        watched = any(request.observer is not None for request in batch.requests)
        return ended + self._land(0 if watched else MAX_FLIGHTS)

    def finish(self, batch: Batch) -> list[ActiveRequest]:
        """Wait for a batch that somebody else has run and advanced, and finish it. Returns the requests that ended."""
        flight = Flight.begin(batch, self.device)
        flight.wait()
        return self._arrive(flight)

    @torch.inference_mode()
    def get_ready(self) -> bool:
        """Capture a graph that a catalogue needs which has been loaded since a warm start, ahead of its requests.

        One takes some milliseconds, so a step does no more than that. Returns whether there was any to capture.
        """
        graphs, catalogs = self.runner.selection_graphs, self.catalogs
        if graphs is None or not graphs.warm:
            return False
        for served in (catalogs.active, catalogs.staged):
            if served is not None and served not in self._ready:
                self._ready.add(served)
                graphs.forget([c for c in (catalogs.active, catalogs.previous, served) if c is not None])
                reserve_masks(self.config, served)
                self._to_capture.extend(selection_shapes(self.config, self.vocabulary.num_levels, served))
        if not self._to_capture:
            return False
        return bool(capture(graphs, [self._to_capture.popleft()]))

    def prepare(self, request: Request, params: BeamParams | None = None) -> ActiveRequest:
        """Check a request and turn it into what the engine works on. Touches nothing that a step uses.

        Raises:
            RequestError: it is malformed.
        """
        arrived_at = self.scheduler.clock()
        if not isinstance(request, Request):
            raise RequestError("requests", "a list of Request is expected", value=request)
        if not isinstance(params, BeamParams | None):
            raise RequestError(
                "params", "a BeamParams is expected; BeamParams.parse takes a mapping", value=params
            )
        params = request.params or params or BeamParams()
        tokens = self.prompt_encoder.encode(request)
        asked_widths = params.widths(self.vocabulary.num_levels)
        limit = self.model.config.max_position_embeddings - len(asked_widths) + 1
        if len(tokens) > limit:
            raise RequestError(
                prompt_field(request), f"at most {limit} tokens for this model (got {len(tokens)})"
            )
        served = self.served
        eligibility = served.compile(request)
        num_nodes = None if eligibility is None else eligibility.num_nodes
        widths = served.search.limit_widths(asked_widths, self.vocabulary.codebook_sizes, num_nodes)
        active = ActiveRequest(
            request=request,
            params=params,
            prompt_token_ids=tokens,
            asked=params.num_return_sequences or asked_widths[-1],
            widths=widths,
            pool=self.runner.beams,
            served=served,
            eligibility=eligibility,
            arrived_at=arrived_at,
            deadline=None if request.timeout_s is None else arrived_at + request.timeout_s,
        )
        if eligibility is not None and eligibility.is_empty:
            active.outcome = empty_result(active)
        elif self.cache is not None:
            self.cache.prepare(active)
        return active

    def _rehearse(self) -> None:
        """Answer one to `warm_up_requests` requests together: compiles what lies between the captured forwards.

        The last ones may not get the catalogue's first item: masks are brought to the device then.
        """
        params = BeamParams(beam_width=self.config.warm_up_beams)
        request = Request(prompt_token_ids=[0, 0], params=params)
        try:
            for count in range(1, self.config.warm_up_requests + 1):
                self.generate([request] * count)
            if self.catalog is not None and self.catalog.num_items and self.config.warm_up_requests:
                filtered = dataclasses.replace(request, exclude_item_ids=[self.catalog.item_id(0)])
                self.generate([filtered] * self.config.warm_up_requests)
        except OneLAError as error:  # of this prompt's; others may be answered
            logger.warning("the rehearsal of a warm start failed: %s", error)
        if self.cache is not None:
            self.cache.stats = CacheStats()

    def _preallocate(self) -> None:
        """Take the memory of everything that has a limit. Raises `ConfigError` when a limit is missing."""
        config, prompts = self.config, self.state.prompts
        for name in ("max_slots", "max_prompts", *(("max_pages",) if prompts.has_pages else ())):
            if getattr(config, name) is None:
                raise ConfigError(f"preallocate: {name} must be set, there is no limit to allocate up to")
        prompts.prompt_tensors.reserve(config.max_prompts or 0)
        prompts.page_tensors.reserve(config.max_pages or 0)
        self.state.records.pool.reserve(config.max_slots or 0)

    def _land(self, most: int) -> list[ActiveRequest]:
        """Finish the steps that the device has done, and wait until at most so many are under way."""
        ended: list[ActiveRequest] = []
        while self._flights:
            flight = self._flights[0]
            members = [request for request in flight.batch.members if request.outcome is None]
            try:
                if len(self._flights) > most:
                    begun = self.scheduler.clock()
                    flight.wait()
                    self.waited_s += self.scheduler.clock() - begun
                elif not flight.is_done:
                    break
                self._flights.popleft()
                ended += self._arrive(flight)
            except Exception as error:  # of the device's, say
                if self._flights and self._flights[0] is flight:
                    self._flights.popleft()
                ended += self._fail(members, error)
        return ended

    def _arrive(self, flight: Flight) -> list[ActiveRequest]:
        """Turn finished requests into results and free what they hold, those left out that have ended otherwise."""
        now = self.scheduler.clock()
        for request in flight.batch.requests:
            request.chosen_at.append(now)
            if request.observer is not None:
                # Whoever only watches must not be able to hurt the batch.
                with contextlib.suppress(Exception):
                    request.observer(request)
        return [
            request
            for request, beams in zip(flight.finished, flight.answers.read())
            if request.outcome is None and self._end(request, self._outcome(request, beams))
        ]

    def _outcome(self, request: ActiveRequest, beams: HostBeams) -> Result | OneLAError:
        """What a finished request has come to."""
        if beams.invalid:
            name = request.request.request_id or "request"
            return NumericsError(f"logits: {name}: the model produced NaN or infinite logits")
        try:
            return make_result(request, beams, self.vocabulary, now=self.scheduler.clock())
        except Exception as error:  # one request's answer, say an unreadable title, is no one else's trouble
            return _engine_error(error)

    def _expire(self) -> list[ActiveRequest]:
        """End the requests whose time is up."""
        expired = self.scheduler.expired()
        for request in expired:
            stood = "waiting" if request.prompt is None else f"running, {request.level} tokens chosen"
            self._end(
                request, DeadlineError(f"timeout_s: {request.request.timeout_s:g} s are over ({stood})")
            )
        return expired

    def _refuse(self) -> list[ActiveRequest]:
        """End the requests that could not be given their places."""
        failed, self.scheduler.failed = self.scheduler.failed, []
        return [request for request, error in failed if self._end(request, _engine_error(error))]

    def _fail(self, requests: Sequence[ActiveRequest], error: Exception) -> list[ActiveRequest]:
        """End the requests that took part in a step that raised, those apart that the same step has ended before."""
        for request in requests:
            self._end(request, _engine_error(error))
        return list(requests)

    def _end(self, request: ActiveRequest, outcome: Result | OneLAError) -> bool:
        """The one place where a request ends: it frees everything and sets the outcome, once."""
        if request.outcome is not None:
            return False
        self.scheduler.release(request)
        if self.cache is not None and isinstance(outcome, (NumericsError, EngineError)):
            self.cache.discard(request)
        if request.mask_row is not None and request.served.masks is not None:
            request.served.masks.release(request.mask_row)
        request.outcome = outcome
        return True


def _engine_error(error: Exception) -> EngineError:
    wrapped = EngineError(f"a step of the engine failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def resolve_device(name: str) -> torch.device:
    """`auto` is a GPU when there is one. Raises `ConfigError`, or `UnavailableError` for a GPU that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: {name!r} is none of auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r} is none of auto, cpu, cuda, cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            seen = f"none after cuda:{count - 1}" if count else "no GPU"
            raise UnavailableError(f"device: {name!r} was asked for, and torch sees {seen} here")
    return device
