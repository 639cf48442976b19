"""The `onela` command: one file per subcommand, all errors of OneLA's as one line and exit code 2."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from onela._version import __version__
from onela.cli import capacity, catalog, evaluate, recommend, serve, verify
from onela.cli.version import version as print_versions
from onela.errors import OneLAError

typer_app = typer.Typer(
    name="onela",
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


typer_app.command("recommend")(recommend.recommend)
typer_app.command("serve")(serve.serve)
typer_app.command("capacity")(capacity.capacity)
typer_app.command("verify")(verify.verify)
typer_app.command("evaluate")(evaluate.evaluate_command)
typer_app.command("version")(print_versions)
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
