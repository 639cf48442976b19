"""Decode forwards of a whole model: the steps of a batch one by one, by CUDA graph, and what their kernels are for.

Prompts are not run: their states are random numbers, written once. A decode step takes the same time whatever they are,
and every arm gets the same ones.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onela.bench.timing import time_events
from onela.decoding import BeamParams
from onela.engine import Engine, Request, Result
from onela.engine.active import ActiveRequest
from onela.engine.scheduler import Batch, PrefillChunk
from onela.errors import CapacityError
from onela.state import AttentionGeometry, PromptPool

PARTS: tuple[tuple[str, str], ...] = (
    ("reorder", r"copy_rows|reorder"),
    ("attention", r"attention|flash|fmha"),
    ("matrix_products", r"nvjet|gemm|cutlass|cublas|xmma|splitK|ampere_|sm90_|product|linear_"),
    ("gdn", r"gated|delta|replay|full_state|short_conv|conv_|gates|split_state|layer_step"),
)
"""What a kernel is for, by its name; the first that matches. All others are the `rest`: the norms, rotations and sums
that no matrix product has taken in."""


@dataclass(frozen=True)
class StepTimes:
    """What was measured of one arm.

    Attributes:
        results: of every request. samples: microseconds of each decode step, several per step.
        sizes: bytes of `beam_state` (what the backend holds for the beams), `prompt_state` (the prompts' recurrent
            states), `records` (all append-only rows) and `state` (everything together).
        failure: why there are no CUDA graphs; None: there are. captured: whether the samples are replays of graphs.
    """

    results: list[Result]
    samples: list[list[float]]
    sizes: dict[str, int]
    failure: str | None
    captured: bool


def fill_prompts(engine: Engine, chunks: Sequence[PrefillChunk], seed: int = 0) -> None:
    """Give prompts random states instead of running them; of the size that a trained model's have."""
    prompts = engine.state.prompts
    generator = torch.Generator(engine.device).manual_seed(seed)
    for name, tensor in sorted(
        [*prompts.prompt_tensors.tensors.items(), *prompts.page_tensors.tensors.items()]
    ):
        if name.endswith("recurrent_state"):
            continue
        tensor.normal_(generator=generator)
    for i, layer in enumerate(engine.model.config.geometry):
        if isinstance(layer, AttentionGeometry):
            continue
        shape = (layer.num_value_heads, layer.value_dim, layer.key_dim)
        for chunk in chunks:
            state = torch.empty(1, *shape, device=engine.device).normal_(0, 0.1, generator=generator)
            prompts.write_recurrent_states(i, _places(prompts, chunk), state)
    for chunk in chunks:
        assert chunk.request.prompt is not None
        prompts.extend(chunk.request.prompt, chunk.end - chunk.start)


def _places(prompts: PromptPool, chunk: PrefillChunk) -> torch.Tensor:
    assert chunk.request.prompt is not None
    return torch.tensor([chunk.request.prompt.index], device=prompts.device)


def choose(engine: Engine, batch: Batch, hidden: Sequence[torch.Tensor] | None = None) -> None:
    """Choose the next token of a batch's requests: from these hidden rows, or as the forwards have left them."""
    engine.runner.select(batch.requests, hidden)
    for request in batch.requests:
        request.advance()


@torch.inference_mode()
def start(
    engine: Engine, num_requests: int, prompt_tokens: int, params: BeamParams, seed: int = 0
) -> list[ActiveRequest]:
    """Requests whose prompts are in place and whose first token is chosen."""
    active = [
        engine.prepare(Request(prompt_token_ids=[0] * prompt_tokens), params) for _ in range(num_requests)
    ]
    for request in active:
        engine.scheduler.add(request)
    batch = engine.scheduler.schedule()
    if len(batch.prefill) < num_requests:
        raise CapacityError(
            f"{num_requests} requests are to start together, there is room for {len(batch.prefill)}"
        )
    fill_prompts(engine, batch.prefill, seed)
    generator = torch.Generator(engine.device).manual_seed(seed)
    size, dtype = engine.model.config.hidden_size, engine.model.lm_head.weight.dtype
    hidden = torch.randn(num_requests, size, generator=generator, device=engine.device).to(dtype)
    choose(engine, batch, list(hidden.split(1)))
    engine.finish(batch)
    return active


@dataclass(frozen=True)
class Step:
    """One decode step as it was run, so that it can be run again.

    Attributes:
        taken: microseconds of its forward by the host's clock. graph: its `torch.cuda.CUDAGraph`; None: it had none.
        made_for: what the graph has pointers to. table, beams: what it read of the step and of its beams.
        engine: whose they are.
    """

    taken: float
    graph: Any
    made_for: object
    table: torch.Tensor
    beams: torch.Tensor
    engine: Engine

    @property
    def has_graph(self) -> bool:
        """Whether there is a graph whose pointers are still good."""
        graphs = self.engine.runner.graphs
        return self.graph is not None and graphs is not None and graphs.generation() == self.made_for

    @torch.inference_mode()
    def restore(self) -> None:
        """Put the step's table and beams back, which later ones have written over."""
        runner = self.engine.runner
        runner.table.flat.copy_(self.table)
        runner.beams.rows.copy_(self.beams)


@torch.inference_mode()
def run_steps(engine: Engine, active: Sequence[ActiveRequest]) -> list[Step]:
    """Decode to the end."""
    steps = []
    runner = engine.runner
    while any(request.outcome is None for request in active):
        batch = engine.scheduler.schedule()
        _wait(engine.device)
        begin = time.perf_counter()
        runner.decode(batch.decode)
        _wait(engine.device)
        taken = (time.perf_counter() - begin) * 1e6
        graph = made_for = None
        if runner.graphs is not None and (latest := runner.graphs.latest) is not None:
            graph, made_for = latest.graph, runner.graphs.generation()
        steps.append(
            Step(taken, graph, made_for, runner.table.flat.clone(), runner.beams.rows.clone(), engine)
        )
        choose(engine, batch)
        engine.finish(batch)
    return steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def measure_steps(
    engine: Engine, num_requests: int, prompt_tokens: int, beam_width: int, *, samples: int = 5, seed: int = 0
) -> StepTimes:
    """Answer a batch, then time every decode step as the replay of its CUDA graph, over the inputs it had.

    A replay may find states and records that later steps have written, other numbers in the same places; it takes as
    long.
    """
    params = BeamParams(beam_width=beam_width)
    active = start(engine, num_requests, prompt_tokens, params, seed)
    steps = run_steps(engine, active)
    results = [request.outcome for request in active if isinstance(request.outcome, Result)]
    timed: list[list[float]] = []
    for step in steps:
        if not step.has_graph:
            break
        step.restore()
        [once] = time_events(step.graph.replay, samples=1, warm=1)
        per_sample = max(1, min(3, int(6000 / once)))
        timed.append(time_events(step.graph.replay, samples=samples, per_sample=per_sample, warm=0))
    captured = engine.runner.graphs
    failure = None if captured is None or captured.failure is None else repr(captured.failure)
    by_graph = bool(timed) and len(timed) == len(steps)
    by_host = [[step.taken] for step in steps]
    return StepTimes(results, timed if by_graph else by_host, state_sizes(engine), failure, by_graph)


def state_sizes(engine: Engine) -> dict[str, int]:
    """Bytes of what an engine holds beside its weights."""
    state = engine.state
    prompts = sum(
        tensor.nbytes
        for name, tensor in state.prompts.prompt_tensors.tensors.items()
        if name.endswith("recurrent_state")
    )
    return {
        "beam_state": state.backend.nbytes,
        "prompt_state": prompts,
        "records": state.records.nbytes,
        "state": state.nbytes,
    }


def kernel_times(run: Callable[[], object]) -> dict[str, tuple[float, int]]:
    """Microseconds and calls of every kernel of a run on the GPU, by name, as torch's profiler sees them.

    A kernel that began while others ran, to wait for them, counts from when they had ended.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        spans = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type.name == "CUDA"
        ]
    return times_apart([span for span in spans if not re.search(r"^(Memcpy|Memset|Activity)", span[0])])


def times_apart(spans: Sequence[tuple[str, float, float]]) -> dict[str, tuple[float, int]]:
    """Time and number of spans (name, start, end) by name; each counts from the last end of those before it."""
    found: dict[str, tuple[float, int]] = {}
    ended = float("-inf")
    for name, start, end in sorted(spans, key=lambda span: span[2]):
        taken, count = found.get(name, (0.0, 0))
        found[name] = taken + max(0.0, end - max(start, ended)), count + 1
        ended = max(ended, end)
    return found


def part_of(kernel: str) -> str:
    """What a kernel is for: one of the parts of `PARTS`, or `rest`."""
    return next((part for part, pattern in PARTS if re.search(pattern, kernel)), "rest")


@torch.inference_mode()
def part_times(
    engine: Engine, num_requests: int, prompt_tokens: int, beam_width: int, *, whole_steps: bool = True
) -> dict[str, float]:
    """Microseconds of all decode steps of a batch by what their kernels are for.

    The forwards are counted by themselves, as graphs. With `whole_steps` a run of whole steps is counted too: head and
    selection are the calls that it has more.
    """
    active = start(engine, num_requests, prompt_tokens, BeamParams(beam_width=beam_width))
    steps: list[Step] = []

    def run_all() -> None:
        steps.extend(run_steps(engine, active))

    def replay_all() -> None:
        for step in steps:
            step.restore()
            step.graph.replay()

    whole = {}
    if whole_steps:
        whole = kernel_times(run_all)
    else:
        run_all()
    forwards = kernel_times(replay_all)
    parts = dict.fromkeys([*(part for part, _ in PARTS), "rest"], 0.0)
    for kernel, (taken, _) in forwards.items():
        parts[part_of(kernel)] += taken
    if whole_steps:
        parts["head_selection"] = 0.0
        for kernel, (taken, count) in whole.items():
            more = count - forwards.get(kernel, (0.0, 0))[1]
            parts["head_selection"] += taken * max(0, more) / count
    return parts
