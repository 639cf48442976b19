"""Tiny checkpoints as recommender teams publish them: a model of transformers, a tokenizer of tokenizers, a catalogue.

Weights are random and nothing is downloaded; names, order of tokens, padding, chat template and file formats are the
published ones. `python -m tests.fixtures DIRECTORY` writes one directory per convention.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import save_qwen3, save_qwen3_5

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
Sid = tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """One checkpoint directory.

    Attributes:
        path: the directory. catalog: the catalogue beside the weights. reference: transformers' model.
        tokenizer: as saved. items: published codes of every item. token: how a code's token reads.
    """

    path: Path
    catalog: Path
    reference: Any
    tokenizer: PreTrainedTokenizerFast
    items: dict[int | str, Sid]
    token: str = "<s_{level}_{code}>"

    def text(self, sid: Sid) -> str:
        """A SID as prompts write it."""
        return "".join(self.token.format(level=level, code=code) for level, code in zip("abcdefgh", sid))


def make_tokenizer(sid_tokens: Sequence[str], special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Bytes, the chat tokens, then the SID tokens, then `special`, in exactly this order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CHAT_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in sid_tokens])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


def padded(size: int, multiple: int = 256) -> int:
    """A vocabulary with room at its end, as embeddings are padded for the hardware."""
    return -(-(size + 1) // multiple) * multiple


def draw_items(
    count: int, sizes: Sequence[int], seed: int, codes: Sequence[Sequence[int]] | None = None
) -> list[Sid]:
    """Random SIDs; the first is there twice, because SIDs collide."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        tuple(int(torch.randint(0, size, (), generator=generator)) for size in sizes) for _ in range(count)
    ]
    if codes is not None:
        rows = [tuple(codes[level][place] for level, place in enumerate(row)) for row in rows]
    return [*rows, rows[0]]


def _openonerec_tokens(levels: str, codebook_size: int) -> list[str]:
    return [f"<s_{level}_{code}>" for level in levels for code in range(codebook_size)]


def _write_packed(path: Path, items: dict[int, Sid], codebook_size: int) -> Path:
    """`sid2pid.json`: the codes packed into one integer, to the items with their counts."""
    table: dict[str, list[dict[str, int]]] = {}
    for item, sid in items.items():
        key = 0
        for code in sid:
            key = key * codebook_size + code
        table.setdefault(str(key), []).append({"pid": item, "count": item % 7 + 1})
    file = path / "sid2pid.json"
    file.write_text(json.dumps(table), encoding="utf-8")
    return file


def _save_onerec(path: Path, levels: str, codebook_size: int, seed: int) -> Published:
    tokenizer = make_tokenizer(_openonerec_tokens(levels, codebook_size), ("<|sid_begin|>", "<|sid_end|>"))
    reference = save_qwen3(
        path, seed=seed, gain=1.0, vocab_size=padded(len(tokenizer)), tie_word_embeddings=True
    )
    tokenizer.save_pretrained(path)
    rows = draw_items(40, [codebook_size] * len(levels), seed)
    items: dict[int | str, Sid] = {1000 + i: sid for i, sid in enumerate(rows)}
    catalog = _write_packed(path, {int(i): sid for i, sid in items.items()}, codebook_size)
    return Published(path, catalog, reference, tokenizer, items)


def save_openonerec(path: Path, codebook_size: int = 24, seed: int = 0) -> Published:
    """OpenOneRec: three levels `<s_a_N>`, `<|sid_begin|>` and `<|sid_end|>` behind them, a padded vocabulary."""
    return _save_onerec(path, "abc", codebook_size, seed)


def save_onerec_think(path: Path, codebook_size: int = 16, seed: int = 1) -> Published:
    """OneRec-Think: the same with four levels."""
    return _save_onerec(path, "abcd", codebook_size, seed)


def save_minionerec(path: Path, codebook_size: int = 256, in_use: int = 20, seed: int = 2) -> Published:
    """MiniOneRec: only the codes that items use have tokens, sorted as strings; no token begins a SID."""
    generator = torch.Generator().manual_seed(seed)
    codes = [sorted(torch.randperm(codebook_size, generator=generator)[:in_use].tolist()) for _ in range(3)]
    rows = draw_items(60, [in_use] * 3, seed, codes)
    used = {f"<{'abc'[level]}_{code}>" for row in rows for level, code in enumerate(row)}
    tokenizer = make_tokenizer(sorted(used))
    reference = save_qwen3(path, seed=seed, gain=1.0, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(path)
    items: dict[int | str, Sid] = {str(i): sid for i, sid in enumerate(rows)}
    written = {
        item: [f"<{'abc'[level]}_{code}>" for level, code in enumerate(sid)] for item, sid in items.items()
    }
    index = path / "index.json"
    index.write_text(json.dumps(written), encoding="utf-8")
    lines = ["".join(tokens) + f"\tItem number {item}\t{item}\n" for item, tokens in written.items()]
    (path / "info.txt").write_text("".join(lines), encoding="utf-8")
    return Published(path, index, reference, tokenizer, items, token="<{level}_{code}>")


def save_hybrid(path: Path, codebook_size: int = 20, seed: int = 3) -> Published:
    """A Qwen3.5 hybrid with OpenOneRec's tokens, and a catalogue in JSON lines."""
    tokenizer = make_tokenizer(_openonerec_tokens("abc", codebook_size), ("<|sid_begin|>", "<|sid_end|>"))
    reference = save_qwen3_5(path, seed=seed, gain=1.0, vocab_size=padded(len(tokenizer)))
    tokenizer.save_pretrained(path)
    rows = draw_items(50, [codebook_size] * 3, seed)
    items: dict[int | str, Sid] = {f"item-{i}": sid for i, sid in enumerate(rows)}
    catalog = path / "catalog.jsonl"
    lines = [
        json.dumps({"item_id": item, "sid": sid, "title": f"Title of {item}"}) for item, sid in items.items()
    ]
    catalog.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Published(path, catalog, reference, tokenizer, items)


CONVENTIONS: dict[str, Callable[[Path], Published]] = {
    "openonerec": save_openonerec,
    "onerec_think": save_onerec_think,
    "minionerec": save_minionerec,
    "qwen3_5_hybrid": save_hybrid,
}


def main(directory: str) -> None:
    for name, save in CONVENTIONS.items():
        print(save(Path(directory) / name).path)


if __name__ == "__main__":
    main(sys.argv[1])
