"""Imports go one way: `ops <- state <- models <- items <- decoding <- engine <- serve, cli`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import onela

ROOT = Path(onela.__file__).parent
# What a package may import, its own modules apart. `items` needs none of the three before it.
ALLOWED: dict[str, set[str]] = {
    "ops": {"errors"},
    "state": {"errors", "config", "ops"},
    "models": {"errors", "config", "ops", "state"},
    "items": {"errors", "config"},
    "decoding": {"errors", "config", "ops", "items"},
    "engine": {"errors", "config", "ops", "state", "models", "items", "decoding"},
    "serve": {"errors", "config", "_version", "ops", "state", "models", "items", "decoding", "engine"},
    "bench": {"errors", "config", "ops", "state", "models", "items", "decoding", "engine"},
    "cli": {
        "errors",
        "config",
        "_version",
        "ops",
        "state",
        "models",
        "items",
        "decoding",
        "engine",
        "serve",
        "bench",
    },
    "config": {"errors"},
    "errors": set(),
    "_version": set(),
}


def imported_parts(source: str, module: str) -> Iterator[str]:
    """First component under `onela` of every import, inside functions and `if TYPE_CHECKING` too."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import"
            names = [node.module or ""]
            if node.module == "onela":
                names = [f"onela.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "onela":
                yield parts[1] if len(parts) > 1 else "onela"
            elif parts[0] in ("tests", "bench", "examples"):
                yield f"{parts[0]}/"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    relative = path.relative_to(ROOT)
    package = relative.parts[0].removesuffix(".py")
    if package == "__init__":
        return
    wrong = set(imported_parts(path.read_text(), str(relative))) - ALLOWED[package] - {package}
    assert not wrong, f"{relative} imports {sorted(wrong)}"


def test_every_module_can_be_imported_first() -> None:
    """Within a package the arrow does not forbid a cycle; a module that needs another to come before it shows here."""
    names = [
        ".".join(("onela", *path.relative_to(ROOT).with_suffix("").parts))
        for path in sorted((ROOT / "ops").rglob("*.py"))
        if path.name == "__init__.py" or "reference" in path.name or path.name == "dispatch.py"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    for known in [known for known in sys.modules if known.startswith('onela')]:\n"
        "        del sys.modules[known]\n"
        "    importlib.import_module(name.removesuffix('.__init__'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_wrong_import_is_seen() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from onela.engine import Engine\n"
    assert set(imported_parts(source, "x")) == {"engine"}
    assert set(imported_parts("def f():\n    import onela.serve.app\n", "x")) == {"serve"}
    assert set(imported_parts("import bench.common\nimport onela.bench.page\n", "x")) == {"bench/", "bench"}
