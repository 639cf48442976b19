"""The mixture-of-experts MLP of Qwen3-Next and Qwen3.5-MoE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onela.errors import ConfigError
from onela.models.config import ConfigReader, ModelConfig, MoeConfig
from onela.models.layers import MLP
from onela.models.rounding import Rounded

MAX_EXPERTS = 32767  # they are numbered in 16 bits


def read_experts(
    reader: ConfigReader, sparse_layers: frozenset[int], *, normalize_weights: bool
) -> MoeConfig:
    """The sizes of a mixture. Raises `ConfigError` when a token would visit more experts than there are."""
    moe = MoeConfig(
        num_experts=reader.integer("num_experts"),
        num_experts_per_token=reader.integer("num_experts_per_tok"),
        intermediate_size=reader.integer("moe_intermediate_size"),
        shared_intermediate_size=reader.integer("shared_expert_intermediate_size", minimum=0),
        normalize_weights=normalize_weights,
        sparse_layers=sparse_layers,
    )
    if moe.num_experts > MAX_EXPERTS:
        raise ConfigError(f"config.json: num_experts = {moe.num_experts} exceeds {MAX_EXPERTS}")
    if moe.num_experts_per_token > moe.num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok = {moe.num_experts_per_token} exceeds num_experts = {moe.num_experts}"
        )
    return moe


class Experts(nn.Module):
    """Weights of all routed experts: gate and up [E, 2*I, D], gate first, and down [E, D, I]."""

    def __init__(self, moe: MoeConfig, hidden_size: int) -> None:
        super().__init__()
        E, size = moe.num_experts, moe.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * size, hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(E, hidden_size, size))


class SparseMLP(Rounded):
    """Every token visits its `num_experts_per_token` likeliest experts, and the shared one.

    The router's softmax runs over all experts in fp32. A token's experts are added up in fp32, in an order of its
    own, so that its result depends on the tokens beside it no more than the matrix products do.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "a sparse layer needs ModelConfig.moe"
        self.moe = moe
        self.gate = nn.Linear(config.hidden_size, moe.num_experts, bias=False)
        self.experts = Experts(moe, config.hidden_size)
        if moe.shared_intermediate_size:
            self.shared_expert = MLP(config.hidden_size, moe.shared_intermediate_size)
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        out = self.run_experts(x, weights, experts)
        if self.moe.shared_intermediate_size:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [N, k] in x's dtype, and experts [N, k] int64, of each token [N, D]; likeliest first."""
        probabilities = self.gate(x).softmax(-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.moe.num_experts_per_token, dim=-1)
        if self.moe.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts

    def run_experts(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The weighted sum of each token's experts, [N, D]."""
        N, k = experts.shape
        # Rows are (token, choice) pairs, put in order of their expert and back. Nothing here waits for the device.
        # Small numbers are sorted in fewer passes.
        grouped, order = experts.flatten().to(torch.int16).sort(stable=True)
        bounds = torch.arange(self.moe.num_experts, dtype=torch.int16, device=x.device)
        ends = torch.searchsorted(grouped, bounds, right=True, out_int32=True)
        hidden = self.rounding.swiglu(
            grouped_linear(x.index_select(0, order // k), self.experts.gate_up_proj, ends)
        )
        places = torch.empty_like(order)
        places[order] = torch.arange(N * k, device=x.device)
        rows = (
            grouped_linear(hidden, self.experts.down_proj, ends)
            .index_select(0, places)
            .view(N, k, x.shape[-1])
        )
        if not self.rounding.least:
            return (rows * weights[..., None]).sum(1)
        if x.is_cuda:  # products of halves, summed in fp32
            return torch.bmm(weights[:, None], rows)[:, 0]
        return (rows.float() * weights.float()[..., None]).sum(1).to(x.dtype)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Apply to each group of rows its own linear map.

    Args:
        x: [M, D], rows of a group side by side.
        weight: [E, size, D]. ends: [E] int32, ascending, one past the last row of each group; the last is M.
    Returns:
        [M, size] in x's dtype.

    Numerics: on a GPU with bf16 one grouped matrix product of torch's, without waiting for the device; otherwise one
        product per group that has rows, which reads `ends` on the host.
    """
    # The grouped product wants rows that start at multiples of 16 bytes.
    aligned = x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0
    if x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.shape[0]:
        product = getattr(F, "grouped_mm", None) or torch._grouped_mm
        return product(x, weight.transpose(1, 2), offs=ends)
    out = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            out[start:end] = F.linear(x[start:end], weight[expert])
            start = end
    return out


def expert_pieces(layers: Iterable[int], num_experts: int) -> Iterator[tuple[str, list[str]]]:
    """The stacked expert weights and the names that their parts go by in checkpoints with one tensor per expert.

    Yields:
        A parameter's name, and the names of the tensors that make up its rows from first to last.
    """
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts"
        yield (
            f"{prefix}.gate_up_proj",
            [f"{prefix}.{e}.{half}_proj.weight" for e in range(num_experts) for half in ("gate", "up")],
        )
        yield f"{prefix}.down_proj", [f"{prefix}.{e}.down_proj.weight" for e in range(num_experts)]
