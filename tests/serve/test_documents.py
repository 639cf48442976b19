"""The serving guide says what the code does."""

from __future__ import annotations

from pathlib import Path

from onela.config import ServerConfig
from onela.serve import protocol
from onela.serve.app import create_app
from tests.docs_tables import options_table
from tests.serve.helpers import text_engine

GUIDE = (Path(__file__).parent.parent.parent / "docs" / "serving.md").read_text()


def test_the_table_of_options_is_the_dataclass() -> None:
    inside = GUIDE.split("<!-- options -->")[1].split("<!-- /options -->")[0].strip()
    assert inside == options_table(ServerConfig)


def test_every_route_and_every_field_is_there() -> None:
    for path in create_app(text_engine()).openapi()["paths"]:
        name = path.removeprefix("/v1/catalog/") if path != "/v1/catalog/load" else path
        assert f"{name}`" in GUIDE, path
    for field in protocol.RecommendRequest.model_fields:
        assert f"`{field}`" in GUIDE, field
