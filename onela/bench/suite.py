"""What `onela bench` measures: the operator and decode forwards of a whole model, with every backend."""

from __future__ import annotations

import gc
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onela.bench.decode import StepTimes, measure_steps, part_times
from onela.bench.models import TINY, engine_of, matrix_products, overlap, random_model, vocabulary_of
from onela.bench.operator import OPERATOR_LAYERS, fill, operator, operator_step, step_inputs
from onela.bench.results import Line, append_line, result_line
from onela.bench.timing import time_graph, time_host
from onela.decoding import BeamParams
from onela.engine import Request, Result
from onela.engine.verify import VARIANTS
from onela.errors import ConfigError, OneLAError
from onela.models import CausalLM
from onela.models.footprint import row_bytes
from onela.state import GatedDeltaGeometry
from onela.state.capacity import FIT_ARMS, RequestSize, ServedModel, max_requests

ARMS = tuple(name for name, _ in VARIANTS)
FIRST_TOKEN = 64
"""Where the codes begin in the vocabulary of a benchmark; prompts take the tokens before."""


def read_shape(text: str, *, written: str = "shape") -> tuple[int, int]:
    """`4x256`: requests and beams of each. Raises `ConfigError`, which calls the option what is `written`."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text, re.ASCII)
    if found is None:
        raise ConfigError(f"{written}: requests x beams such as 4x256 is expected, got {text!r}")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class Suite:
    """How much is measured.

    Attributes:
        arms: names of `VARIANTS`, `replay` first when it is there.
        operator_shapes: (R, W, O) of the operator by itself. model_shapes: (R, W) of decode forwards.
        prompts: their lengths. tokens: of a SID. codebook: codes of a level, as far as the vocabulary reaches.
        depths: ancestors of a beam at which one step of the operator is timed, at the first model shape.
        widths: beams for which the memory of a request is told. samples: of each time.
    """

    arms: tuple[str, ...]
    operator_shapes: tuple[tuple[int, int, int], ...]
    model_shapes: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    tokens: int
    codebook: int
    depths: tuple[int, ...]
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    samples: int = 5

    def __post_init__(self) -> None:
        for arm in self.arms:
            if arm not in ARMS:
                raise ConfigError(f"arms: {arm!r} is none of {', '.join(ARMS)}")
        sizes = [n for shape in (*self.operator_shapes, *self.model_shapes) for n in shape]
        for name, values in (("shape", sizes), ("prompts", self.prompts), ("samples", (self.samples,))):
            if min(values, default=1) < 1:
                raise ConfigError(f"{name}: whole numbers of at least 1 are expected, got {min(values)}")
        if self.tokens < 2:
            raise ConfigError(
                f"tokens: at least 2 are expected, got {self.tokens}: the first needs no decode step"
            )


COMMON = ("replay", "full_state_copy", "full_state_read_parent", "replay_ssm", "replay_ssm_shared")
QUICK = Suite(
    arms=COMMON,
    operator_shapes=((1, 256, 3), (4, 256, 3), (16, 256, 3)),
    model_shapes=((4, 256),),
    prompts=(1024,),
    tokens=3,
    codebook=8192,
    depths=(0, 2, 6, 15, 31, 63),
    samples=3,
)
FULL = Suite(
    arms=ARMS,
    operator_shapes=tuple((R, W, tokens) for tokens in (3, 7) for W in (128, 256, 512) for R in (1, 4, 16)),
    model_shapes=((4, 256), (1, 256), (16, 256), (4, 128), (4, 512)),
    prompts=(1024, 5120),
    tokens=7,
    codebook=8192,
    depths=(0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 63),
)
SMALL = Suite(
    arms=COMMON,
    operator_shapes=((1, 16, 3), (2, 16, 3)),
    model_shapes=((2, 16),),
    prompts=(32,),
    tokens=3,
    codebook=64,
    depths=(0, 2, 5),
    widths=(16, 64, 256),
    samples=2,
)
"""For a CPU: everything runs, and the times say little."""


@dataclass
class Recorder:
    """Where lines go, and what went wrong on the way.

    Attributes:
        path: file of JSON lines. command: what was typed. say: told what is going on, a line at a time.
        lines: all so far. lost: arms and cases without a result, and why.
    """

    path: Path
    command: str
    say: Callable[[str], None]
    lines: list[Line] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add(self, bench: str, **fields: Any) -> None:
        """Keep and write a line (see `result_line`)."""
        line = result_line(bench, command=self.command, **fields)
        self.lines.append(line)
        append_line(self.path, line)

    def lose(self, what: str, error: BaseException) -> None:
        """Note a case that has no result; the others are still worth their time."""
        why = (
            "does not fit"
            if isinstance(error, torch.OutOfMemoryError)
            else f"{type(error).__name__}: {error}"
        )
        self.lost.append(f"{what}: {why}"[:400])
        self.say(f"  lost {self.lost[-1]}")


def run_suite(
    model: CausalLM,
    name: str,
    suite: Suite,
    recorder: Recorder,
    *,
    weight_bytes: int = 0,
    memory: int | None = None,
) -> None:
    """Measure everything of a suite. A case that fails is noted in `recorder.lost`.

    Args:
        model: on the device that is measured. name: what the lines call it.
        weight_bytes: of the model, for how many requests fit. memory: bytes that they are to fit into; None: not told.
    Raises:
        OneLAError: the backends do not return the same items in fp32; then nothing is measured.
    """
    device = model.lm_head.weight.device
    began = time.perf_counter()
    same_items(device, suite.arms)
    recorder.say("every backend returns the same items in fp32")
    layers = [layer for layer in model.config.geometry if isinstance(layer, GatedDeltaGeometry)]
    if layers:
        measure_operator(layers[0], model.lm_head.weight.dtype, device, suite, recorder)
        measure_crossover(layers[0], model.lm_head.weight.dtype, device, suite, recorder)
    measure_model(model, name, suite, recorder)
    tell_memory(model, name, suite, recorder, weight_bytes, memory)
    recorder.say(f"measured in {time.perf_counter() - began:.0f} s")


def same_items(device: torch.device, arms: Sequence[str]) -> None:
    """The gate: over a small fp32 model every arm returns the same items. Raises `OneLAError`."""
    model = random_model(TINY, torch.float32, device)
    vocabulary = vocabulary_of(3, 64)
    requests = [Request(prompt_token_ids=list(range(length))) for length in (5, 70, 33)]
    expected: list[Result] | None = None
    for arm in arms:
        engine = engine_of(model, vocabulary, arm, cuda_graphs=False)
        results = engine.generate(requests, BeamParams(beam_width=24))
        expected = expected or results
        share, difference = overlap(expected, results)
        if share < 1 or difference > 1e-3:
            raise OneLAError(
                f"{arm} has {share:.3f} of the items of {arms[0]}, scores differ by {difference:.2g}: "
                "nothing was measured"
            )


def timer(device: torch.device, samples: int) -> Callable[[Callable[[], Any]], list[float]]:
    """Microseconds of a call, per sample: as a CUDA graph on a GPU, else by the host's clock."""
    if device.type == "cuda":
        return lambda call: time_graph([call], samples=samples, target_us=1000)
    return lambda call: time_host(call, samples=samples)


@torch.inference_mode()
def measure_operator(
    layer: GatedDeltaGeometry, dtype: torch.dtype, device: torch.device, suite: Suite, recorder: Recorder
) -> None:
    """All decode steps of one recurrent layer: reordering and the recurrence, by shape and arm."""
    take = timer(device, suite.samples)
    for R, W, tokens in suite.operator_shapes:
        for arm in suite.arms:
            if arm == "replay_unfused":
                continue  # the same operator; what differs is around it
            try:
                backend = operator(arm, R, W, tokens - 2, device, layer=layer, dtype=dtype)
                fill(backend)
                samples = [0.0] * suite.samples
                for depth in range(tokens - 1):
                    step = operator_step(backend, step_inputs(R, W, depth, 1, "random", device), dtype)
                    samples = [a + b / OPERATOR_LAYERS for a, b in zip(samples, take(step))]
                value = statistics.median(samples) / 1e3
                case = {
                    "R": R,
                    "W": W,
                    "O": tokens,
                    **sizes_of(layer),
                    "record_dtype": str(dtype).split(".")[1],
                }
                recorder.add(
                    "operator", arm=arm, case=case, metric="time", unit="ms", value=value,
                    spread=[min(samples) / 1e3, max(samples) / 1e3],
                )  # fmt: skip
                recorder.say(f"operator R={R} W={W} O={tokens} {arm}: {value * 1e3:.1f} us a layer")
            except Exception as error:  # the other arms are still worth their time
                recorder.lose(f"operator R={R} W={W} O={tokens} {arm}", error)
            finally:
                backend = None  # type: ignore[assignment]
                forget(device)


@torch.inference_mode()
def measure_crossover(
    layer: GatedDeltaGeometry, dtype: torch.dtype, device: torch.device, suite: Suite, recorder: Recorder
) -> None:
    """One step of a recurrent layer at every depth: records grow with it, states do not."""
    take = timer(device, suite.samples)
    if not suite.model_shapes or not suite.depths:
        return
    R, W = suite.model_shapes[0]
    deepest = max(suite.depths)
    for arm in suite.arms:
        if arm == "replay_unfused":
            continue
        try:
            backend = operator(arm, R, W, deepest, device, layer=layer, dtype=dtype)
            fill(backend)
            for depth in suite.depths:
                step = operator_step(backend, step_inputs(R, W, depth, 1, "random", device), dtype)
                samples = [taken / OPERATOR_LAYERS for taken in take(step)]
                case = {"what": "operator", "R": R, "W": W, "t": depth, "tree": "random", **sizes_of(layer)}
                recorder.add(
                    "crossover", arm=arm, case=case, metric="time", unit="us", value=statistics.median(samples),
                    spread=[min(samples), max(samples)],
                )  # fmt: skip
            recorder.say(f"crossover {arm}: depths up to {deepest}")
        except Exception as error:  # the other arms are still worth their time
            recorder.lose(f"crossover {arm}", error)
        finally:
            backend = None  # type: ignore[assignment]
            forget(device)


def measure_model(model: CausalLM, name: str, suite: Suite, recorder: Recorder) -> None:
    """Decode forwards of the whole model, every arm on one pipeline; on a GPU also what their kernels are for."""
    device = model.lm_head.weight.device
    codebook = min(suite.codebook, (model.config.vocab_size - FIRST_TOKEN) // suite.tokens)
    if codebook < 1:
        raise ConfigError(
            f"tokens: a vocabulary of {model.config.vocab_size} has no room for {suite.tokens} levels"
        )
    vocabulary = vocabulary_of(suite.tokens, codebook)
    for R, W in suite.model_shapes:
        alone = None
        if device.type == "cuda":
            alone = statistics.median(time_graph([matrix_products(model, R * W)], samples=suite.samples))
        for prompt in suite.prompts:
            expected: list[Result] | None = None
            for arm in suite.arms:
                label = f"decode {R} x {W}, prompt {prompt}, O={suite.tokens} {arm}"
                case = {
                    "model": name,
                    "R": R,
                    "W": W,
                    "prompt": prompt,
                    "O": suite.tokens,
                    "codebook": codebook,
                }
                case["dtype"] = str(model.lm_head.weight.dtype).split(".")[1]
                try:
                    engine = engine_of(model, vocabulary, arm, quantization=model.quantization)
                    measured = measure_steps(engine, R, prompt, W, samples=suite.samples)
                    expected = expected or measured.results
                    add_steps(recorder, arm, case, measured, alone, expected)
                    if measured.captured:
                        for part, taken in part_times(engine, R, prompt, W).items():
                            recorder.add(
                                "decode", arm=arm, case=case | {"part": part}, metric="part_time", unit="ms",
                                value=taken / 1e3,
                            )  # fmt: skip
                    recorder.say(f"{label}: {sum(map(statistics.median, measured.samples)) / 1e3:.2f} ms")
                except Exception as error:  # the other arms are still worth their time
                    recorder.lose(label, error)
                finally:
                    engine = None  # type: ignore[assignment]
                    forget(device)


def add_steps(
    recorder: Recorder,
    arm: str,
    case: dict[str, Any],
    measured: StepTimes,
    alone: float | None,
    expected: Sequence[Result],
) -> None:
    """The lines of one arm: time of all forwards, and bytes held."""
    steps = [statistics.median(taken) for taken in measured.samples]
    share, difference = overlap(expected, measured.results)
    recorder.add(
        "decode", arm=arm, case=case, metric="decode_forward", unit="ms", value=sum(steps) / 1e3,
        spread=[sum(map(min, measured.samples)) / 1e3, sum(map(max, measured.samples)) / 1e3],
        floor=None if alone is None else alone * len(steps) / 1e3, steps_us=[round(step, 1) for step in steps],
        cuda_graphs=measured.captured, overlap=share, max_score_difference=difference,
    )  # fmt: skip
    for metric, value in measured.sizes.items():
        recorder.add("decode", arm=arm, case=case, metric=metric, unit="bytes", value=value)


def tell_memory(
    model: CausalLM, name: str, suite: Suite, recorder: Recorder, weight_bytes: int, memory: int | None
) -> None:
    """Bytes that one request takes by its beam width, by formula, and how many fit into the memory."""
    dtype = model.lm_head.weight.dtype
    served = ServedModel(
        model.config.geometry,
        weight_bytes=weight_bytes,
        row_bytes=row_bytes(model.config, dtype),
        num_codes=suite.codebook,
        dtype=dtype,
        record_dtype=dtype,
    )
    prompt = suite.prompts[0]
    for arm in (arm for arm in suite.arms if arm in FIT_ARMS):
        for width in suite.widths:
            widths = tuple(min(width, suite.codebook ** (i + 1)) for i in range(suite.tokens))
            fit = max_requests(served, arm, RequestSize(prompt, widths), memory or 0)
            case = {"model": name, "W": width, "prompt": prompt, "O": suite.tokens}
            recorder.add(
                "capacity", arm=arm, case=case, metric="request_bytes", unit="bytes", value=fit.request_bytes
            )
            if memory is not None:
                case["memory_gib"] = round(memory / 2**30, 2)
                recorder.add(
                    "capacity", arm=arm, case=case, metric="requests", unit="requests", value=fit.num_requests
                )


def sizes_of(layer: GatedDeltaGeometry) -> dict[str, int]:
    """The geometry as a case of results names it."""
    return {"H": layer.num_key_heads, "HV": layer.num_value_heads, "K": layer.key_dim, "V": layer.value_dim}


def forget(device: torch.device) -> None:
    """Give memory back: captured forwards and their engine hold each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def read_values(path: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint directory. Raises `ConfigError`."""
    try:
        values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: config.json is not readable ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(f"{path}: config.json names no model_type")
    return values
