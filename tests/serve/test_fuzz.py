"""Bodies made from the OpenAPI description, right and wrong: none of them is answered with 500, or not as described."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from onela.config import ServerConfig
from onela.serve.app import create_app
from tests.serve.helpers import serving, text_engine

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

# A body can have the right form and still ask for what is not there: a token, an item attribute, a catalogue.

OPTIONS: dict[str, Any] = {"admin_token": "admin", "model_name": "string", "catalog_dir": "/nonexistent"}
schema = schemathesis.openapi.from_dict(create_app(text_engine(), ServerConfig(**OPTIONS)).openapi())


@pytest.fixture(scope="module")
def url() -> Any:
    with serving(text_engine(), **OPTIONS) as client:
        yield str(client.base_url)


@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_that_is_sent_makes_the_server_fail(case: Any, url: str) -> None:
    case.call_and_validate(
        base_url=url, headers={"authorization": "Bearer admin"}, excluded_checks=[positive_data_acceptance]
    )
