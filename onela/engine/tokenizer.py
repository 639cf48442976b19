"""The checkpoint's tokenizer, through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onela.errors import CheckpointError

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a directory; None when it has none.

    Raises:
        CheckpointError: no such directory, or the tokenizer is there and cannot be loaded.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    if not any((directory / name).exists() for name in FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare ones, transformers those of its checks
        raise CheckpointError(f"{directory}: the tokenizer cannot be loaded ({error})") from error
