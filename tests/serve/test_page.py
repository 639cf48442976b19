"""The page at `/`, in a real browser without a screen."""

from __future__ import annotations

import html
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from onela.serve.stream import Watch
from tests.serve.browser import BROWSER, browsing
from tests.serve.helpers import serving, text_engine

PAGE = Path(__file__).parent.parent.parent / "onela" / "serve" / "page.html"


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = PAGE.read_text()
    assert not re.findall(r"(?:src|href)\s*=", text)
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_the_tree_the_items_and_the_times(tmp_path: Path) -> None:
    with serving(text_engine()) as client:
        address = f"{client.base_url}/?prompt={quote('5, 6, 7')}&width=20&items=4"
        with browsing(tmp_path) as browser:
            page = browser.page(address, "#list tbody tr")
        answer = client.post(
            "/v1/recommend", json={"prompt_token_ids": [5, 6, 7], "beam_width": 20, "n": 4}
        ).json()
    rows = re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td class=\"number\">(.*?)</td></tr>", page)
    expected = [
        (item["titles"][0], " ".join(map(str, item["sid"])), f"{item['cum_logprob']:.3f}")
        for item in answer["items"]
    ]
    assert [tuple(map(html.unescape, row)) for row in rows] == expected
    steps = re.findall(r"level (\d): (\d+) beams, ([\d.]+) ms", page)
    assert [(level, count) for level, count, _ in steps] == [("1", "6"), ("2", "20"), ("3", "20")]
    # The tree: at least every beam of the last level, the four best with their way from the root.
    assert len(re.findall(r"<circle", page)) > 26
    assert len(re.findall(r"<path[^>]*class=\"best", page)) >= 4
    assert "catalogue" in page


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_stream_that_is_cut_short_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cut(self: Watch, first: Any, finish: Any) -> AsyncIterator[str]:
        yield f"event: step\ndata: {json.dumps(first)}\n\n"
        await self.cancel()

    monkeypatch.setattr(Watch, "events", cut)
    with serving(text_engine()) as client, browsing(tmp_path) as browser:
        page = browser.page(f"{client.base_url}/?prompt={quote('5, 6, 7')}&width=20", "#message.error")
    assert "the answer was cut short" in page
