"""Recall and NDCG of ranked lists, the users' prompts, and a plain beam search.

The beam search here is `transformers`' forward pass and a few lines around it. It is what OneLA is compared with, not
what serves. `python -m examples.movielens.evaluate` prints the baselines and the shipped model side by side.
"""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import DynamicCache, Qwen3_5ForCausalLM

from . import baselines
from .data import load_movielens, split
from .tokens import SidTokens

# transformers 5.24 renames the argument and warns about the old name.
CACHE = "cache" if "cache" in inspect.signature(Qwen3_5ForCausalLM.forward).parameters else "past_key_values"


def recall_ndcg(
    ranked: torch.Tensor | list[list[int]], targets: torch.Tensor, k: int = 10
) -> tuple[float, float]:
    """Recall@k and NDCG@k of lists with one relevant film each.

    Args:
        ranked: [num_users, >= k] film indices, best first; shorter lists end with -1.
        targets: [num_users] int64.
    """
    hits = torch.as_tensor(ranked)[:, :k] == targets[:, None]
    gains = 1 / torch.log2(torch.arange(hits.shape[1], dtype=torch.float64) + 2)
    return hits.any(1).double().mean().item(), (hits * gains).sum(1).mean().item()


def prompts(histories: list[list[int]], tokens: SidTokens, window: int) -> list[list[int]]:
    """Each user's prompt: `<bos>` and the tokens of the last `window` films, the most recent last."""
    return [tokens.prompt(films[-window:]) for films in histories]


def drop_seen(found: torch.Tensor | list[list[int]], histories: list[list[int]], k: int = 10) -> torch.Tensor:
    """The first `k` films of each list that are not in the user's history.

    Args:
        found: [num_users, any] film indices, best first, -1 where there is none.
    Returns:
        [num_users, k] int64; lists that run out end with -1.
    """
    rows = []
    for films, history in zip(torch.as_tensor(found).tolist(), histories):
        seen = {-1, *history}
        fresh = [film for film in films if film not in seen][:k]
        rows.append(fresh + [-1] * (k - len(fresh)))
    return torch.tensor(rows)


@torch.no_grad()
def beam_search(
    model: Qwen3_5ForCausalLM,
    prompts: list[list[int]],
    tokens: SidTokens,
    beam_width: int = 128,
    batch_size: int = 16,
    progress: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Beams over the films' semantic IDs, log-probabilities within each level's codes.

    Returns:
        films: [num_prompts, beam_width] int64, best first, -1 where there are fewer.
        cum_logprobs: [num_prompts, beam_width] fp32, -inf there.
    """
    table = torch.full(tokens.codebook_sizes, -1)
    table[tuple(tokens.codes.T)] = torch.arange(len(tokens.codes))
    films = torch.full((len(prompts), beam_width), -1)
    scores = torch.full((len(prompts), beam_width), -torch.inf)
    # Prompts of one length need no padding.
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    batches = [
        rows[at : at + batch_size] for rows in by_length.values() for at in range(0, len(rows), batch_size)
    ]
    for rows in track(batches, "beam search", disable=not progress):
        codes, total = _search(
            model, torch.tensor([prompts[i] for i in rows]), tokens, table >= 0, beam_width
        )
        found = table[tuple(codes.unbind(-1))].masked_fill(total == -torch.inf, -1)
        films[rows, : found.shape[1]] = found
        scores[rows, : found.shape[1]] = total
    return films, scores


def _search(
    model: Qwen3_5ForCausalLM, ids: torch.Tensor, tokens: SidTokens, films: torch.Tensor, beam_width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Beam search for prompts of one length.

    Args:
        ids: [B, T] int64.
        films: [codebook sizes] bool; True at every film's codes.
    Returns:
        codes [B, W, num_levels] and scores [B, W], best first.
    """
    B = len(ids)
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=ids, use_cache=True, **{CACHE: cache}).logits[:, -1:]
    codes = torch.zeros(B, 1, 0, dtype=torch.int64)
    total = torch.zeros(B, 1)
    for level, (first, size) in enumerate(zip(tokens.first, tokens.codebook_sizes)):
        W = codes.shape[1]
        legal = films.flatten(level + 1).any(-1) if level + 1 < films.ndim else films
        legal = legal[tuple(codes.unbind(-1))] if level else legal.expand(B, 1, size)
        logprobs = logits[..., first : first + size].log_softmax(-1)
        candidates = (total[..., None] + logprobs).masked_fill(~legal, -torch.inf).flatten(1)
        total, index = candidates.topk(min(beam_width, candidates.shape[1]))
        parents, code = index // size, index % size
        codes = torch.cat(
            [codes.gather(1, parents[..., None].expand(-1, -1, level)), code[..., None]], dim=-1
        )
        if level + 1 < tokens.num_levels:
            cache.reorder_cache((torch.arange(B)[:, None] * W + parents).flatten())
            step = (first + code).view(-1, 1)
            logits = model(input_ids=step, use_cache=True, **{CACHE: cache}).logits.view(B, code.shape[1], -1)
    return codes, total


def main() -> None:
    from .checkpoint import WEIGHTS, load_weights

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--beams", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    data = load_movielens()
    trained = load_weights(data, options.weights)
    held = split(data, trained.figures["holdout"])
    table = Table("recommender", "Recall@10", "NDCG@10", title=f"{trained.figures['holdout']} events")
    for name, ranked in {
        "popularity": baselines.popularity(held),
        "item-kNN, whole history": baselines.item_knn(held),
        "item-kNN, last three films": baselines.item_knn(held, last=3),
        "second-order Markov chain": baselines.markov(held),
        "neighbours in time (the teacher)": baselines.cooccurrence(held),
    }.items():
        recall, ndcg = recall_ndcg(ranked, held.targets)
        table.add_row(name, f"{recall:.4f}", f"{ndcg:.4f}")
    asked = prompts(held.histories, trained.tokens, trained.recipe.window)
    found, _ = beam_search(trained.model, asked, trained.tokens, options.beams, progress=True)
    recall, ndcg = recall_ndcg(drop_seen(found, held.histories), held.targets)
    table.add_row(f"the model, {options.beams} beams", f"{recall:.4f}", f"{ndcg:.4f}")
    Console().print(table)


if __name__ == "__main__":
    main()
