"""The `onela` command: one file per subcommand, all errors of OneLA's as one line and exit code 2.

A subcommand's file is read when it is called: most of them need torch, and that takes
seconds to import.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from onela._version import __version__
from onela.errors import OneLAError

# Name -> module and object, and what the list of commands says (the first line of its help).
COMMANDS = {
    "recommend": ("recommend:recommend", "Recommend items for one or many prompts."),
    "serve": (
        "serve:serve",
        "Serve a checkpoint over HTTP: /v1/recommend, OpenAI's completions, metrics, and a page to look at.",
    ),
    "capacity": (
        "capacity:capacity",
        "Print what each backend holds and writes per step, by formula, and how many requests fit into a memory.",
    ),
    "verify": (
        "verify:verify",
        "Run all backends on a checkpoint and print the largest difference; exit code 1 above the tolerance.",
    ),
    "bench": (
        "bench:bench",
        "Measure operator, decode and memory with every backend on this machine, and write a report.",
    ),
    "evaluate": (
        "evaluate:evaluate_command",
        "Measure recall, NDCG, hit rate, legality and coverage on held-out interactions.",
    ),
    "version": ("version:version", "Print the versions that matter in a report."),
    "catalog": ("catalog:catalog_app", "Check, inspect and convert item catalogues."),
}


def load_command(name: str) -> Any:
    """The subcommand of this name, with all that it needs."""
    module, attribute = COMMANDS[name][0].split(":")
    found = getattr(importlib.import_module(f"onela.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        command: Any = typer.main.get_group(found)
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name)(found)
        command = typer.main.get_command(alone)
    command.name = name
    return command


class Commands(TyperGroup):
    """The subcommands, each loaded when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What the list of commands shows."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else load_command(str(name)), rest


typer_app = typer.Typer(
    name="onela",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@typer_app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print OneLA's version and leave."
        ),
    ] = False,
) -> None:
    """Exact wide-beam decoding for generative recommenders."""


def app(args: list[str] | None = None) -> Any:
    """Entry point: run the command line and leave with its exit code."""
    try:
        typer_app(args)
    except OneLAError as error:
        print(f"onela: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app()
