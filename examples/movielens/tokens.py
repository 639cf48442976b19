"""Films as tokens: `<pad>`, `<bos>`, then one token per code of each semantic-ID level."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BOS = 0, 1
LEVELS = "abcdefgh"


class SidTokens:
    """Token ids of films: code `c` of the first level is the token `<a_c>`, of the second `<b_c>`, and so on.

    Args:
        codes: [num_items, num_levels] int64.
        codebook_sizes: codes per level.

    Attributes:
        names: token strings by token id.
        first: token id of code 0 of each level.
        films: [num_items, num_levels] int64 token ids.
    """

    def __init__(self, codes: torch.Tensor, codebook_sizes: tuple[int, ...]) -> None:
        self.codes = codes
        self.codebook_sizes = codebook_sizes
        self.num_levels = len(codebook_sizes)
        self.names = ["<pad>", "<bos>"]
        self.first: list[int] = []
        for level, size in zip(LEVELS, codebook_sizes):
            self.first.append(len(self.names))
            self.names += [f"<{level}_{code}>" for code in range(size)]
        self.films = codes + torch.tensor(self.first)

    def prompt(self, films: list[int]) -> list[int]:
        """`<bos>` and the films' tokens, in the order given."""
        return [BOS, *self.films[films].flatten().tolist()]


def make_tokenizer(tokens: SidTokens) -> PreTrainedTokenizerFast:
    """A word-level tokenizer: `"<bos><a_3><b_7><c_0>"`, with or without blanks between, becomes four ids."""
    vocabulary = {name: token_id for token_id, name in enumerate(tokens.names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        # Named, so that a prompt of ordinary words can be seen to have none that the model knows.
        unk_token="<pad>",
        pad_token="<pad>",
        bos_token="<bos>",
        padding_side="left",
    )
    # As added tokens they are cut out of a text before the word-level model sees it.
    tokenizer.add_tokens(tokens.names[BOS + 1 :])
    return tokenizer
