"""The metrics say what happened, and the documents explain each of them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.engine.fake_model import NAN_TOKEN
from tests.serve.helpers import CATALOG, metric, serving, text_engine

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "metrics.md"
CACHE = {"prompt_cache_bytes": 100_000, "page_size": 4, "prompt_cache_interval": 8, "prompt_cache_tail": 2}


def test_counts_and_gauges() -> None:
    with serving(text_engine(**CACHE)) as client:
        body = {"prompt_token_ids": [5] * 30, "beam_width": 10}
        for _ in range(3):
            assert client.post("/v1/recommend", json=body).status_code == 200
        client.post("/v1/recommend", json={**body, "allow_item_ids": []})
        client.post("/v1/recommend", json={"prompt_token_ids": [NAN_TOKEN]})
        client.post("/v1/recommend", json={"prompt_token_ids": [97]})
        assert metric(client, 'onela_requests_total{outcome="stop"}') == 3
        assert metric(client, 'onela_requests_total{outcome="filtered"}') == 1
        assert metric(client, 'onela_requests_total{outcome="engine_error"}') == 1
        assert metric(client, 'onela_requests_total{outcome="invalid_request"}') == 1
        assert metric(client, "onela_items_total") == 30
        assert metric(client, 'onela_request_seconds_count{stage="decode"}') == 4
        assert metric(client, "onela_step_prefill_tokens_sum") == 30 + 6 + 6 + 1
        assert metric(client, "onela_step_rows_sum") >= 3 * 20
        assert metric(client, 'onela_prompt_cache_hits_total{tier="device"}') == 2
        assert metric(client, "onela_prompt_cache_misses_total") == 2
        assert metric(client, "onela_prompt_cache_hit_tokens_total") == 48
        assert metric(client, 'onela_prompt_cache_entries{tier="device"}') == 1
        assert metric(client, "onela_kv_pages_used") == 6
        assert metric(client, "onela_slots_used") == 0
        assert metric(client, "onela_requests_running") == 0
        assert metric(client, "onela_up") == 1
        assert metric(client, "onela_catalog_items") == CATALOG.num_items
        assert metric(client, f'onela_catalog_info{{version="{CATALOG.version}"}}') == 1


def test_every_metric_is_documented_and_no_other() -> None:
    with serving(text_engine(**CACHE)) as client:
        text = client.get("/metrics").text
    served = {
        line.split()[2].removesuffix("_total") for line in text.splitlines() if line.startswith("# TYPE")
    }
    served = {name for name in served if not name.endswith("_created")}
    documented = {
        name.removesuffix("_total") for name in re.findall(r"^\| `(onela_\w+)", DOCUMENT.read_text(), re.M)
    }
    assert served == documented
