"""`onela version`."""

from __future__ import annotations

import platform

import torch
import transformers

from onela._version import __version__
from onela.cli.common import JsonOption, print_json, print_table


def version(json_output: JsonOption = False) -> None:
    """Print the versions that matter in a report."""
    versions = {
        "onela": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    if json_output:
        print_json(versions)
    else:
        print_table("Versions", ["part", "version"], [[name, value] for name, value in versions.items()])
