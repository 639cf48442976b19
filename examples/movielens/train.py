"""Trains the film recommender, from the data up: `python -m examples.movielens.train`."""

from __future__ import annotations

import argparse
import math
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import Progress
from transformers import Qwen3_5ForCausalLM

from .baselines import NEIGHBOUR_RECENCY, neighbour_scores
from .checkpoint import Trained, bfloat16_values, save_weights
from .data import Split, load_movielens, split
from .evaluate import beam_search, drop_seen, prompts, recall_ndcg
from .model import Recipe, new_model, use_reference_ops
from .semantic_ids import build_semantic_ids
from .tokens import BOS, SidTokens


def training_windows(
    histories: list[list[int]], recipe: Recipe, generator: torch.Generator
) -> list[torch.Tensor]:
    """Cuts every history into windows of at most `recipe.window` films, differently in every epoch.

    Films swap places with near neighbours and some histories run backwards: a burst of ratings has hardly an order of
    its own.
    """
    windows = []
    for history in histories:
        films = torch.tensor(history)
        places = torch.arange(len(films)) + recipe.jitter * torch.randn(len(films), generator=generator)
        films = films[places.argsort()]
        if torch.rand((), generator=generator) < recipe.reverse:
            films = films.flip(0)
        start = int(torch.randint(recipe.window, (), generator=generator))
        cuts = range(start, len(films), recipe.window) if len(films) > recipe.window else ()
        edges = [0, *cuts, len(films)]
        windows += [films[begin:end] for begin, end in pairwise(edges) if end - begin >= 2]
    return windows


class Teacher:
    """What the films of a prefix say of the next one: `baselines.cooccurrence` as a distribution, at every position."""

    def __init__(self, split: Split, tokens: SidTokens, power: float) -> None:
        self.scores = neighbour_scores(split.histories, split.num_items)
        self.codes = tokens.codes
        self.members = [
            F.one_hot(codes, size).float() for codes, size in zip(tokens.codes.T, tokens.codebook_sizes)
        ]
        self.power = power

    def targets(self, films: torch.Tensor) -> list[torch.Tensor]:
        """Distributions of each next film's codes.

        Args:
            films: [B, T] int64.
        Returns:
            per level [B, T - 1, codebook size]: position `t` tells of film `t + 1` from the films up to `t`, at the
            second level given the code that film has at the first, and so on. A row of zeros where the teacher has
            nothing to say.
        """
        state = torch.zeros(len(films), len(self.codes))
        seen = torch.zeros_like(state)
        rows = []
        for column in films[:, :-1].T:
            state = NEIGHBOUR_RECENCY * state + self.scores[column]
            seen.scatter_(1, column[:, None], 1.0)
            rows.append(state * (1 - seen))
        likely = torch.stack(rows, dim=1) ** self.power
        levels = []
        for level, member in enumerate(self.members):
            mass = likely @ member
            levels.append(mass / mass.sum(-1, keepdim=True).clamp(min=1e-30))
            likely = likely * member.T[self.codes[films[:, 1:], level]]
        return levels


def window_loss(
    model: Qwen3_5ForCausalLM,
    films: torch.Tensor,
    lengths: torch.Tensor,
    tokens: SidTokens,
    recipe: Recipe,
    teacher: Teacher | None,
) -> torch.Tensor:
    """Cross-entropy of the films' tokens, and of the teacher's distribution over them.

    Args:
        films: [B, T] int64, padded at the end.
        lengths: [B] int64; the films of each window.
    Returns:
        scalar: mean over films, sum over levels.
    """
    B, T = films.shape
    film_tokens = tokens.films[films]
    ids = torch.cat([torch.full((B, 1), BOS), film_tokens.flatten(1)], dim=1)[:, :-1]
    embeddings = F.dropout(model.model.embed_tokens(ids), recipe.dropout, model.training)
    hidden = model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    hidden = F.dropout(hidden, recipe.dropout, model.training)
    logprobs = model.lm_head(hidden).log_softmax(-1).view(B, T, tokens.num_levels, -1)
    targets = teacher.targets(films) if teacher is not None else None
    losses = []
    for level, first in enumerate(tokens.first):
        loss = -logprobs[:, :, level].gather(-1, film_tokens[..., level : level + 1]).squeeze(-1)
        if targets is not None:
            target = targets[level]
            soft = -(target * logprobs[:, 1:, level, first : first + target.shape[-1]]).sum(-1)
            share = recipe.teacher_weight * (target.sum(-1) > 0.5)
            # The first film of a window has nothing before it that the teacher could speak from.
            loss = torch.cat([loss[:, :1], share * soft + (1 - share) * loss[:, 1:]], dim=1)
        losses.append(loss)
    valid = torch.arange(T)[None] < lengths[:, None]
    return (torch.stack(losses).sum(0) * valid).sum() / valid.sum()


def train(
    split: Split, recipe: Recipe, tokens: SidTokens, centroids: list[torch.Tensor]
) -> Qwen3_5ForCausalLM:
    """Trains on `split.histories`, with a progress bar; the result is the running mean of the weights."""
    use_reference_ops()
    model = new_model(recipe, tokens, centroids)
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "out_proj", "down_proj")):
            module.register_forward_hook(
                lambda module, _, out: F.dropout(out, recipe.dropout, module.training)
            )
    teacher = Teacher(split, tokens, recipe.teacher_power) if recipe.teacher_weight else None
    optimizers = _optimizers(model, recipe)
    mean = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(recipe.seed)
    first = training_windows(split.histories, recipe, torch.Generator().manual_seed(recipe.seed))
    total = len(first) // recipe.batch * recipe.epochs
    step = 0
    model.train()
    with Progress() as progress:
        for epoch in range(recipe.epochs):
            batches = _batches(training_windows(split.histories, recipe, generator), recipe.batch, generator)
            bar = progress.add_task("", total=len(batches))
            for count, films in enumerate(batches, 1):
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = group["top_lr"] * _schedule(step, total)
                lengths = torch.tensor([len(window) for window in films])
                padded = torch.nn.utils.rnn.pad_sequence(films, batch_first=True)
                loss = window_loss(model, padded, lengths, tokens, recipe, teacher)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                step += 1
                decay = min(recipe.ema, (1 + step) / (10 + step))
                with torch.no_grad():
                    for name, parameter in model.named_parameters():
                        mean[name].lerp_(parameter, 1 - decay)
                text = f"epoch {epoch + 1}/{recipe.epochs}  loss {loss.item():.3f}"
                progress.update(bar, completed=count, description=text)
    model.load_state_dict(mean, strict=False)
    return model.eval()


def _optimizers(model: Qwen3_5ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the rest."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    other = [p for name, p in named if p.ndim > 2 or "embed" in name]
    vectors = [p for _, p in named if p.ndim < 2]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(
            [
                {"params": other, "weight_decay": recipe.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=recipe.lr,
            betas=(0.9, 0.98),
        ),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["top_lr"] = group["lr"]
    return optimizers


def _schedule(step: int, total: int) -> float:
    """A twentieth of the steps to warm up, then a cosine down to a fiftieth."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))
    return min(1.0, (step + 1) / (0.05 * total)) * (0.02 + 0.98 * cosine)


def _batches(windows: list[torch.Tensor], size: int, generator: torch.Generator) -> list[list[torch.Tensor]]:
    """Windows of like length share a batch; the order is random."""
    order = torch.randperm(len(windows), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), 8 * size):
        group = sorted(order[start : start + 8 * size], key=lambda i: len(windows[i]))
        batches += [[windows[i] for i in group[at : at + size]] for at in range(0, len(group), size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--holdout", choices=("test", "valid"), default="test", help="the film held out and evaluated"
    )
    parser.add_argument("--weights", type=Path, default=Path("build/demo/weights"), help="directory to write")
    parser.add_argument("--epochs", type=int, default=Recipe().epochs)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    data = load_movielens()
    held = split(data, options.holdout)
    recipe = Recipe(epochs=options.epochs)
    codes, centroids = build_semantic_ids(data, held.histories, recipe.sids)
    tokens = SidTokens(codes, recipe.sids.codebook_sizes)
    start = time.perf_counter()
    model = train(held, recipe, tokens, centroids)
    seconds = time.perf_counter() - start
    bfloat16_values(model)
    found, _ = beam_search(model, prompts(held.histories, tokens, recipe.window), tokens, progress=True)
    recall, ndcg = recall_ndcg(drop_seen(found, held.histories), held.targets)
    figures = {
        "holdout": options.holdout,
        "recall@10": round(recall, 4),
        "ndcg@10": round(ndcg, 4),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_seconds": round(seconds),
        "torch": torch.__version__,
    }
    save_weights(options.weights, Trained(model, tokens, recipe, figures), data)
    print(f"{options.weights}: {figures}")


if __name__ == "__main__":
    main()
