"""Settings of every test run: few threads that do not spin, and uninitialised memory full of NaN."""

from __future__ import annotations

import os
from collections.abc import Iterator

# A spinning OpenMP makes every small operation wait for a busy core; it reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

if not torch.cuda.is_available():
    # Kernels run under the interpreter then; Triton decides that when it is imported, and transformers imports it.
    os.environ["TRITON_INTERPRET"] = "1"

import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN: a result that depends on memory nobody wrote cannot pass.

    Only where no GPU takes part: torch's deterministic mode, which does it, forbids cumulative sums there.
    """
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a GPU the ops' tests run on it, so they count as `gpu`; without, what needs one is skipped, visibly."""
    for item in items:
        if not torch.cuda.is_available():
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif "ops" in item.path.parts and "compile" not in item.path.name:
            item.add_marker(pytest.mark.gpu)
