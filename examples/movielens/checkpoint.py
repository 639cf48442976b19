"""Trained weights as they are shipped, and the Hugging Face directory made from them.

`weights/` holds no data, only what was derived from them: `model.safetensors` (bfloat16), `sids.json` (film id to
codes), `recipe.json` (the recipe, and the figures it reached). `write_checkpoint` fills a directory with

    config.json  generation_config.json  model.safetensors  tokenizer.json  tokenizer_config.json
    catalog.jsonl      one film a line: {"item_id", "sid", "title"}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Qwen3_5ForCausalLM

from .data import MovieLens
from .model import Recipe, new_model, use_reference_ops
from .semantic_ids import load_codes, save_codes
from .tokens import BOS, PAD, SidTokens, make_tokenizer

WEIGHTS = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class Trained:
    """A trained recommender.

    Attributes:
        model: fp32, in evaluation mode.
        tokens: the films as tokens.
        recipe: how it was made; `recipe.window` is the number of films in a prompt.
        figures: what it reached when it was made.
    """

    model: Qwen3_5ForCausalLM
    tokens: SidTokens
    recipe: Recipe
    figures: dict[str, Any]


def save_weights(path: Path, trained: Trained, data: MovieLens) -> None:
    """Writes `model.safetensors` (bfloat16), `sids.json` and `recipe.json` into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.detach().bfloat16().contiguous() for name, tensor in trained.model.state_dict().items()
    }
    del state["lm_head.weight"]  # the embeddings, tied
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    save_codes(path / "sids.json", data.item_ids, trained.tokens.codes)
    text = json.dumps({"recipe": trained.recipe.to_dict(), "figures": trained.figures}, indent=2)
    (path / "recipe.json").write_text(text + "\n", encoding="utf-8")


def load_weights(data: MovieLens, path: Path = WEIGHTS) -> Trained:
    """Reads what `save_weights` wrote; the shipped weights if no `path` is given."""
    use_reference_ops()
    facts = json.loads((path / "recipe.json").read_text(encoding="utf-8"))
    recipe = Recipe.from_dict(facts["recipe"])
    tokens = SidTokens(load_codes(path / "sids.json", data.item_ids), recipe.sids.codebook_sizes)
    state = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
    model = new_model(recipe, tokens)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise ValueError(
            f"{path}: weights do not fit the recipe (missing {missing}, unexpected {unexpected})"
        )
    return Trained(model.eval(), tokens, recipe, facts["figures"])


def write_checkpoint(path: Path, trained: Trained, data: MovieLens, num_beams: int = 128) -> Path:
    """Writes a Hugging Face directory (fp32) with tokenizer, generation defaults and `catalog.jsonl`.

    Returns:
        `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    model, tokens = trained.model, trained.tokens
    model.generation_config = GenerationConfig(
        max_new_tokens=tokens.num_levels,
        num_beams=num_beams,
        length_penalty=0.0,
        pad_token_id=PAD,
        bos_token_id=BOS,
    )
    model.save_pretrained(path)
    make_tokenizer(tokens).save_pretrained(path)
    with (path / "catalog.jsonl").open("w", encoding="utf-8") as file:
        for item_id, sid, title in zip(data.item_ids, tokens.codes.tolist(), data.titles):
            file.write(
                json.dumps({"item_id": item_id, "sid": sid, "title": title}, ensure_ascii=False) + "\n"
            )
    return path


def bfloat16_values(model: torch.nn.Module) -> None:
    """Rounds the weights to bfloat16, in place; what is evaluated is then what is shipped."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
