"""SID strings: what is read, and what is refused."""

from __future__ import annotations

import pytest

from onela.errors import VocabularyError
from onela.items.sid_text import MAX_CODE, parse_sid_text


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("<a_1><b_2><c_3>", (1, 2, 3)),
        ("<s_a_8191><s_b_0><s_c_7><s_d_12>", (8191, 0, 7, 12)),
        ("<a_5>", (5,)),
    ],
)
def test_reads_the_published_conventions(text: str, codes: tuple[int, ...]) -> None:
    assert parse_sid_text(text) == codes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1,2,3",
        "<a_1> <b_2>",
        "<b_1><a_2>",
        "<a_1><c_2>",
        "<a_1><b_x>",
        "<a_1><s_b_2>",
        "<s_a_1><b_2>",
        "<a_1><b_2>tail",
        "head<a_1>",
        "<a_-1>",
        "<a_\u0663>",
        f"<a_{MAX_CODE + 1}>",
        "<a_" + "9" * 5000 + ">",
    ],
)
def test_refuses_anything_else(text: str) -> None:
    with pytest.raises(VocabularyError, match="is not a SID"):
        parse_sid_text(text)
