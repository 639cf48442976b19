"""The recurrent operator alone, at any depth: reordering and the recurrence of a few layers, whatever the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onela.config import EngineConfig
from onela.engine.verify import VARIANTS
from onela.state import (
    REPLAYING,
    GatedDeltaGeometry,
    PromptPool,
    Records,
    RecurrentBackend,
    StepInputs,
    make_backend,
)

OPERATOR_LAYERS = 4
LAYER = GatedDeltaGeometry(16, 16, 128, 128)


def tree(requests: int, width: int, depth: int, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ancestors [N, depth] of the beams of a step, oldest first, and the parents' rows [N]; slots step by step."""
    N = requests * width
    generator = torch.Generator(device).manual_seed(depth)
    rows = torch.arange(N, device=device)
    first = rows // width * width
    ancestors = torch.empty(N, 0, dtype=torch.int32, device=device)
    parents = rows
    for t in range(depth):
        if kind == "random":
            drawn = torch.randint(width, (requests, width), generator=generator, device=device)
            parents = drawn.sort(-1).values.flatten() + first
        slots = (parents + t * N).to(torch.int32)
        ancestors = torch.cat([ancestors[parents], slots[:, None]], dim=1)
    return ancestors.contiguous(), parents


def step_inputs(
    requests: int, width: int, depth: int, prompt: int, kind: str, device: torch.device
) -> StepInputs:
    """The step of R requests of W beams that all stand at the same depth."""
    N = requests * width
    ancestors, parents = tree(requests, width, depth, kind, device)

    def numbers(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    rows = torch.arange(N, dtype=torch.int32, device=device)
    return StepInputs(
        token_ids=numbers([64]).repeat(N),
        positions=numbers([prompt + depth]).repeat(N),
        slots=rows + depth * N,
        ancestors=ancestors,
        cu_rows=numbers([i * width for i in range(requests + 1)]),
        prompts=numbers(range(requests)),
        depths=numbers([depth] * requests),
        rows=rows,
        parent_rows=parents.to(torch.int32) if depth else torch.full_like(rows, -1),
        row_prompts=rows // width,
        row_depths=torch.full_like(rows, depth),
        some_first=depth == 0,
    )


def operator(
    arm: str,
    requests: int,
    width: int,
    max_depth: int,
    device: torch.device,
    *,
    layer: GatedDeltaGeometry = LAYER,
    dtype: torch.dtype = torch.bfloat16,
) -> RecurrentBackend:
    """A backend over four layers, as the engine makes it for a model of this dtype."""
    config = EngineConfig(**dict(VARIANTS)[arm])
    name = config.recurrent_backend
    layers = [layer] * OPERATOR_LAYERS
    split = device.type == "cuda" and dtype == torch.bfloat16 and name in REPLAYING
    prompts = PromptPool(layers, dtype=dtype, device=device, split_states=split)
    for _ in range(requests):
        prompts.allocate(1)
    for i in range(OPERATOR_LAYERS):
        shape = (layer.num_value_heads, layer.value_dim, layer.key_dim)
        states = torch.randn(requests, *shape, device=device) * 0.1
        prompts.write_recurrent_states(i, torch.arange(requests, device=device), states)
    records = Records(
        layers,
        dtype=dtype,
        record_dtype=dtype,
        device=device,
        transitions=name == "replay",
        conv_inputs=False,
    )
    records.admit(requests * width * (max_depth + 1), num_spare=0)
    backend = make_backend(
        name,
        layers,
        prompts,
        records,
        dtype=dtype,
        record_dtype=dtype,
        full_state_mode=config.full_state_mode,
        replay_ssm_checkpoint=config.replay_ssm_checkpoint,
    )
    backend.reserve(requests * width, max_depth + 1)
    return backend


def fill(backend: RecurrentBackend) -> None:
    """Numbers of the usual size in everything that a step may read, so that none of it is infinite."""
    pools = [backend.records.pool, getattr(backend, "pool", None)]
    for name, tensor in [item for pool in pools if pool is not None for item in pool.tensors.items()]:
        if tensor.dtype == torch.int32:
            tensor.zero_()
        elif name.endswith(".g"):
            tensor.fill_(-0.1)
        else:
            tensor.normal_(0, 0.1)


def operator_step(
    backend: RecurrentBackend, inputs: StepInputs, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], Any]:
    """Reordering and the recurrence of all layers."""
    N, device = inputs.rows.shape[0], inputs.rows.device
    layer = next(iter(backend.geometry.values()))
    H, HV, K, V = layer.num_key_heads, layer.num_value_heads, layer.key_dim, layer.value_dim
    q, k = (torch.randn(N, H, K, device=device).to(dtype) for _ in range(2))
    v = torch.randn(N, HV, V, device=device).to(dtype)
    g, beta = -torch.rand(N, HV, device=device), torch.rand(N, HV, device=device)

    def run() -> list[Tensor]:
        backend.begin(inputs)
        backend.reorder(inputs)
        return [backend.step(i, q, k, v, g, beta, inputs) for i in backend.geometry]

    return run
