"""The `onela` command: one file per subcommand, all errors of OneLA's as one line and exit code 2."""

from __future__ import annotations

import sys
from typing import Any

import typer

from onela.cli import capacity, catalog, evaluate, recommend, serve, verify, version
from onela.errors import OneLAError

typer_app = typer.Typer(
    name="onela",
    help="Exact wide-beam decoding for generative recommenders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
typer_app.command("recommend")(recommend.recommend)
typer_app.command("serve")(serve.serve)
typer_app.command("capacity")(capacity.capacity)
typer_app.command("verify")(verify.verify)
typer_app.command("evaluate")(evaluate.evaluate_command)
typer_app.command("version")(version.version)
typer_app.add_typer(catalog.catalog_app, name="catalog")


def app(args: list[str] | None = None) -> Any:
    """Entry point: run the command line and leave with its exit code."""
    try:
        typer_app(args)
    except OneLAError as error:
        print(f"onela: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app()
