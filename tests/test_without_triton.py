"""A machine without triton, fla-core and einops: everything imports, and an engine answers by the references."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SCRIPT = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "fla", "einops"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
import onela
from onela import BeamParams, Request

# What has kernels in it is imported when tensors are on a GPU; all other modules must not need them.
failed = {}
for module in pkgutil.walk_packages(onela.__path__, "onela."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed[module.name] = error.name.split(".")[0]
print(*(f"{name}={missing}" for name, missing in failed.items()))

from pathlib import Path
from tests.engine.helpers import catalog_of, random_prompt, random_sids, save_qwen3_5, tiny_engine, vocabulary_of

vocabulary = vocabulary_of(6, 8, 7)
path = Path(sys.argv[1])
save_qwen3_5(path)
engine = tiny_engine(path, vocabulary, catalog_of(random_sids(60, (6, 8, 7)), vocabulary))
request = Request(prompt_token_ids=random_prompt(9))
[result] = engine.generate([request], BeamParams(beam_width=4))
print(len(result.items), "triton" in sys.modules)
"""


@pytest.mark.slow
def test_package_and_engine_without_triton(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    imports, answer = done.stdout.splitlines()[-2:]
    assert answer == "4 False"
    failed = dict(item.split("=") for item in imports.split())
    assert {name for name in failed if not name.startswith("onela.ops.")} <= {"onela.serve.cluster"}, failed
    assert set(failed.values()) <= {"triton", "ray"}, failed
    assert "onela.ops.gated_delta.reference" not in failed
