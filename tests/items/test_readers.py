"""Every catalogue format that exists, as published, and each of its faults with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onela.errors import CatalogError, ConfigError
from onela.items import CatalogItem, ItemCatalog, SidVocabulary

# Token ids in no order at all, so that nothing passes by arithmetic.
IDS = np.random.default_rng(0).permutation(1000)[: 3 * 16].reshape(3, 16)
VOCABULARY = SidVocabulary.from_vocab(
    {
        f"<s_{letter}_{code}>": int(IDS[level, code])
        for level, letter in enumerate("abc")
        for code in range(16)
    }
)
HOLED = SidVocabulary.from_vocab(
    {f"<{c}_{n}>": 10 * i + n for i, c in enumerate("abc") for n in (0, 2, 5, 7)}
)


def write(path: Path, content: str | bytes | list | dict) -> Path:
    if isinstance(content, list):
        content = "".join(json.dumps(record) + "\n" for record in content)
    elif isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def listing(catalog: ItemCatalog) -> list[tuple[Any, tuple[int, ...], Any, Any, Any]]:
    return [(r.item_id, tuple(r.sid), r.title, r.metadata, r.weight) for r in catalog.records()]


def refused(path: Path, message: str, line: int | None, *arguments: Any, **options: Any) -> None:
    with pytest.raises(CatalogError, match=message) as caught:
        ItemCatalog.load(path, *arguments, **options)
    assert caught.value.line == line
    assert caught.value.path is not None
    assert str(path.parent) in caught.value.path


# ---- JSONL


def test_jsonl(tmp_path: Path) -> None:
    records = [
        {"item_id": "m1", "sid": [2, 5, 7], "title": "Alien", "metadata": {"year": 1979}, "weight": 3},
        {"item_id": "m2", "sid": "<a_2><b_5><c_7>", "weight": 4.5},
        {"item_id": "m3", "sid": ["<a_0>", "<b_0>", "<c_0>"], "title": "Gr\u00fc\u00dfe"},
    ]
    path = write(tmp_path / "items.jsonl", records)
    for vocabulary in (None, HOLED):
        catalog = ItemCatalog.load(path, vocabulary)
        assert listing(catalog) == [
            ("m3", (0, 0, 0), "Gr\u00fc\u00dfe", None, 0.0),
            ("m2", (2, 5, 7), None, None, 4.5),
            ("m1", (2, 5, 7), "Alien", {"year": 1979}, 3.0),
        ]
    assert catalog.trie.sids([1]).tolist() == [[1, 2, 3]]
    assert ItemCatalog.load(write(tmp_path / "plain", records)).version == catalog.version


@pytest.mark.parametrize(
    ("third_line", "message"),
    [
        ('{"item_id": 3, "sid": [0, 0', "not JSON"),
        ("[3, [0, 0, 0]]", "expected an object"),
        ('{"item_id": 3}', "field 'sid' is missing"),
        ('{"sid": [0, 0, 0]}', "field 'item_id' is missing"),
        ('{"item_id": 3, "sid": [0, 0]}', "sid: 2 levels, expected 3"),
        ('{"item_id": 3, "sid": [0, 0, 1]}', "sid: code 1 of level 2 is out of range"),
        ('{"item_id": 1, "sid": [0, 0, 0]}', "item_id 1 is there already, on line 1"),
        ('{"item_id": 3, "sid": [0, 0, 0], "price": 2}', "unknown field 'price'"),
        ('{"item_id": 3, "sid": [0, 0, 0], "title": ["x"]}', "title: expected a string"),
        ('{"item_id": 3, "sid": [0, 0, 0], "weight": NaN}', "weight: expected a finite number"),
    ],
)
def test_jsonl_faults(tmp_path: Path, third_line: str, message: str) -> None:
    good = '{"item_id": 1, "sid": [0, 2, 5]}\n\n'
    tail = '\n{"item_id": 4, "sid": [0, 0, 0]}\n'
    refused(write(tmp_path / "items.jsonl", good + third_line + tail), message, 3, HOLED)


@pytest.mark.parametrize("name", ["items.jsonl", "items.json", "items.txt", "items.bin", "items"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    for content in ("", "\n \n"):
        refused(write(tmp_path / name, content), "no item in it", None)
    refused(write(tmp_path / name, ""), "no item in it", None, format="jsonl")


# ---- NVIDIA


def test_nvidia(tmp_path: Path) -> None:
    path = write(
        tmp_path / "items.jsonl",
        [
            {"item_id": 11, "token_ids": IDS[[0, 1, 2], [3, 0, 15]].tolist(), "metadata": {"title": "x"}},
            {"item_id": 12, "token_ids": IDS[[0, 1, 2], [0, 1, 2]].tolist()},
        ],
    )
    catalog = ItemCatalog.load(path, VOCABULARY)
    assert listing(catalog) == [
        (12, (0, 1, 2), None, None, None),
        (11, (3, 0, 15), None, {"title": "x"}, None),
    ]
    refused(path, "holds token ids; pass vocabulary=", None)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"item_id": 2}, "field 'token_ids' is missing"),
        ({"item_id": 2, "token_ids": [1, 2]}, r"token_ids: expected a list of 3 token ids, got \[1, 2\]"),
        ({"item_id": 2, "token_ids": "1 2 3"}, "token_ids: expected a list of 3 token ids"),
        ({"item_id": 2, "token_ids": [IDS[0, 0], IDS[0, 1], IDS[2, 2]]}, "is no SID token of level 1"),
        ({"item_id": 2, "token_ids": [IDS[0, 0], "5", IDS[2, 2]]}, "'5' is no SID token of level 1"),
        ({"item_id": 2, "token_ids": [IDS[0, 0], [5], IDS[2, 2]]}, r"\[5\] is no SID token of level 1"),
        ({"token_ids": IDS[:, 0]}, "field 'item_id' is missing"),
        ({"item_id": 1, "token_ids": IDS[:, 0]}, "item_id 1 is there already"),
        ({"item_id": 2, "token_ids": IDS[:, 0], "sid": [0, 0, 0]}, "both 'sid' and 'token_ids'"),
    ],
)
def test_nvidia_faults(tmp_path: Path, record: dict, message: str) -> None:
    lines = [
        json.dumps(r, default=lambda v: v.tolist()) for r in ({"item_id": 1, "token_ids": IDS[:, 0]}, record)
    ]
    refused(write(tmp_path / "items.jsonl", "\n".join(lines)), message, 2, VOCABULARY)


# ---- OpenOneRec


def packed(*sid: int, radix: int = 16) -> str:
    key = 0
    for code in sid:
        key = key * radix + code
    return str(key)


@pytest.mark.parametrize("field", ["pid", "iid"])
def test_openonerec(tmp_path: Path, field: str) -> None:
    content = {
        packed(3, 0, 15): [
            {field: 70, "count": 5, "count_after_downsample": 2},
            {field: 60, "count": 9, "count_after_downsample": 2},
            {field: 50, "count": 5},
        ],
        packed(0, 0, 1): [{field: 40}],
    }
    path = write(tmp_path / f"sid2{field}.json", content)
    catalog = ItemCatalog.load(path, VOCABULARY)
    more = {"count_after_downsample": 2}
    assert listing(catalog) == [
        (40, (0, 0, 1), None, None, 0.0),
        (60, (3, 0, 15), None, more, 9.0),
        (50, (3, 0, 15), None, None, 5.0),
        (70, (3, 0, 15), None, more, 5.0),
    ]
    assert [catalog.item_id(i) for i in catalog.items_of(1, expand="best")] == [60]
    assert ItemCatalog.load(path, radix=16).version == catalog.version
    assert ItemCatalog.load(path, radix=16, num_levels=4).sids([1]).tolist() == [[0, 3, 0, 15]]


def test_openonerec_published_key(tmp_path: Path) -> None:
    """a * 8192^2 + b * 8192 + c, as the published files have it."""
    a, b, c = 5211, 4093, 3567
    path = write(
        tmp_path / "sid2pid.json", {str(a * 8192**2 + b * 8192 + c): [{"pid": 7098944, "count": 8883}]}
    )
    assert ItemCatalog.load(path, radix=8192).sids([0]).tolist() == [[a, b, c]]


def test_openonerec_needs_a_radix(tmp_path: Path) -> None:
    path = write(tmp_path / "sid2pid.json", {packed(1, 2, 3): [{"pid": 1}]})
    refused(path, "no vocabulary is given; pass radix=", None)
    uneven = SidVocabulary.from_token_ids([range(16), range(16, 32), range(32, 40)])
    refused(path, r"the vocabulary's levels differ \(\[8, 16\]\); pass radix=", None, uneven)
    assert ItemCatalog.load(path, uneven, radix=16).sids([0]).tolist() == [[1, 2, 3]]
    with pytest.raises(ConfigError, match="radix: 8 is less than the 16 codes of a level"):
        ItemCatalog.load(path, uneven, radix=8)
    # A radix that is not the file's shows as codes that no token has.
    refused(write(tmp_path / "x.json", {packed(1, 2, 3, radix=64): [{"pid": 1}]}), "below 16", 1, VOCABULARY)
    refused(
        write(
            tmp_path / "y.json", {packed(1, 2, 3): [{"pid": 1}], packed(15, 20, 3, radix=64): [{"pid": 2}]}
        ),
        "code 35 of level 2 is out of range",
        1,
        VOCABULARY,
        radix=64,
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"4096": [{"pid": 2}]', r"key '4096': expected an integer below 16\*\*3"),
        ('"-1": [{"pid": 2}]', "key '-1'"),
        ('"1-2-3": [{"pid": 2}]', "key '1-2-3'"),
        ('"\u0663": [{"pid": 2}]', "expected an integer below"),
        ('"' + "9" * 5000 + '": [{"pid": 2}]', "expected an integer below"),
        ('"7": []', "expected a non-empty list of items"),
        ('"7": {"pid": 2}', "expected a non-empty list of items"),
        ('"7": [2]', "expected objects with 'pid' or 'iid', got 2"),
        ('"7": [{"count": 2}]', "expected objects with 'pid' or 'iid'"),
        ('"7": [{"pid": 2, "iid": 3}]', "expected objects with 'pid' or 'iid'"),
        ('"7": [{"pid": null}]', "item_id: expected a string or an integer"),
        ('"7": [{"pid": 2, "count": "9"}]', "weight: expected a finite number, got '9'"),
        ('"7": [{"pid": 1}]', "item_id 1 is there already, on line 2"),
        ('"7": [{"pid": 2}', "not JSON"),
        ('"7": [{"pid": 2}]]', "not JSON: expected ',' or '}'"),
    ],
)
def test_openonerec_faults(tmp_path: Path, entry: str, message: str) -> None:
    text = '{\n"0": [{"pid": 1}],\n' + entry + "}"
    refused(write(tmp_path / "sid2pid.json", text), message, 3, VOCABULARY)


def test_openonerec_item_on_two_sids(tmp_path: Path) -> None:
    content = {packed(1, 2, 3): [{"pid": 1, "count": 3}], packed(1, 2, 4): [{"pid": 1, "count": 8}]}
    path = write(tmp_path / "sid2pid.json", content)
    refused(path, "item_id 1 is there already", 1, VOCABULARY)
    assert listing(ItemCatalog.load(path, VOCABULARY, duplicates="best")) == [(1, (1, 2, 4), None, None, 8.0)]


# ---- MiniOneRec

INDEX = {"0": ["<a_2>", "<b_5>", "<c_7>"], "1": ["<a_0>", "<b_0>", "<c_0>"], "2": ["<a_2>", "<b_5>", "<c_7>"]}
INFO = "<a_2><b_5><c_7>\tTape, 1 in\t0\n<a_0><b_0><c_0>\tA tab\there\t1\r\n<a_2><b_5><c_7>\t\t2\n"


def test_minionerec_directory_files_and_info_alone(tmp_path: Path) -> None:
    index = write(tmp_path / "Industrial.index.json", json.dumps(INDEX, indent=1))
    info = write(tmp_path / "Industrial_5_2016.txt", INFO)
    expected = [
        ("1", (0, 0, 0), "A tab\there", None, None),
        ("0", (2, 5, 7), "Tape, 1 in", None, None),
        ("2", (2, 5, 7), "", None, None),
    ]
    for vocabulary in (None, HOLED):
        assert listing(ItemCatalog.load(tmp_path, vocabulary)) == expected
        assert listing(ItemCatalog.load(index, vocabulary, info=info)) == expected
        assert listing(ItemCatalog.load(info, vocabulary)) == expected
        untitled = [(item_id, sid, None, None, None) for item_id, sid, *_ in expected]
        assert listing(ItemCatalog.load(index, vocabulary)) == untitled


def test_minionerec_index_of_codes(tmp_path: Path) -> None:
    path = write(tmp_path / "index.json", {"7": [1, 2, 3]})
    assert listing(ItemCatalog.load(path, format="minionerec")) == [("7", (1, 2, 3), None, None, None)]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"3": "<a_0><b_0><c_0>"', "item '3': expected a list of SID tokens"),
        ('"3": ["<a_0>", "<b_0>"]', "2 levels"),
        ('"3": ["<a_0>", "<b_0>", "<c_1>"]', "'<c_1>' is not a SID token"),
        ('"3": ["<a_0>", "<c_0>", "<b_0>"]', "'<c_0>' is a token of level 2, not of level 1"),
        ('"3": ["<a_0>", 0, "<c_0>"]', "is not an integer code"),
        ('"0": ["<a_0>", "<b_0>", "<c_0>"]', "item_id '0' is there already, on line 2"),
        ('"3": ["<a_0>", "<b_0>", "<c_0>"', "not JSON"),
    ],
)
def test_minionerec_index_faults(tmp_path: Path, entry: str, message: str) -> None:
    text = '{\n"0": ["<a_2>", "<b_5>", "<c_7>"],\n' + entry + "}"
    refused(write(tmp_path / "index.json", text), message, 3, HOLED)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("<a_0><b_0><c_0>\t1", "expected sid, title and item_id between tabs, got 2 fields"),
        ("<a_0><b_0><c_0>\tx\t0", "item_id '0' is there already, on line 1"),
        ("<a_0><b_0><c_2>\tx\t1", "item '1' has SID <a_0><b_0><c_2>, but <a_0><b_0><c_0> in index.json"),
        ("<a_0><b_0><c_0>\tx\t9", "item '9' is not in index.json"),
    ],
)
def test_minionerec_info_faults(tmp_path: Path, line: str, message: str) -> None:
    index = write(tmp_path / "index.json", INDEX)
    info = write(tmp_path / "info.txt", "<a_2><b_5><c_7>\tTape\t0\n" + line)
    with pytest.raises(CatalogError, match=message) as caught:
        ItemCatalog.load(index, HOLED, info=info)
    assert (caught.value.path, caught.value.line) == (str(info), 2)


def test_minionerec_info_alone_faults(tmp_path: Path) -> None:
    info = write(tmp_path / "info.txt", "<a_2><b_5><c_7>\tTape\t0\n<a_2><b_5>\tx\t1\n")
    refused(info, "sid: 2 levels, expected 3", 2)


# ---- xLLM


def xllm(ids: list[int], sids: list[list[int]]) -> bytes:
    record = np.dtype([("id", "<i8"), ("tokens", "<i4", (3,))])
    rows = np.zeros(len(ids), dtype=record)
    rows["id"] = ids
    rows["tokens"] = [IDS[[0, 1, 2], sid] for sid in sids]
    return rows.tobytes()


def test_xllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onela.items.readers._RECORDS_AT_ONCE", 2)
    path = write(
        tmp_path / "items.bin",
        xllm([5, -6, 2**40, 8, 9], [[1, 2, 3], [0, 0, 0], [1, 2, 3], [15] * 3, [2] * 3]),
    )
    assert path.stat().st_size == 5 * 20
    catalog = ItemCatalog.load(path, VOCABULARY)
    assert [row[:2] for row in listing(catalog)] == [
        (-6, (0, 0, 0)),
        (5, (1, 2, 3)),
        (2**40, (1, 2, 3)),
        (9, (2, 2, 2)),
        (8, (15, 15, 15)),
    ]
    refused(path, "holds token ids; pass vocabulary=", None)


def test_xllm_by_hand(tmp_path: Path) -> None:
    """The bytes written out, so that endianness and field order are fixed by more than one library."""
    tokens = b"".join(int(IDS[level, 1]).to_bytes(4, "little") for level in range(3))
    path = write(tmp_path / "one.bin", (77).to_bytes(8, "little") + tokens)
    assert [row[:2] for row in listing(ItemCatalog.load(path, VOCABULARY))] == [(77, (1, 1, 1))]


def test_xllm_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onela.items.readers._RECORDS_AT_ONCE", 2)
    good = xllm([1, 2, 3], [[1, 2, 3]] * 3)
    refused(
        write(tmp_path / "a.bin", good + b"\0" * 7),
        "67 bytes are no whole number of records of 20",
        4,
        VOCABULARY,
    )
    bad = bytearray(good)
    bad[2 * 20 + 12 : 2 * 20 + 16] = (1234).to_bytes(4, "little")
    refused(
        write(tmp_path / "b.bin", bytes(bad)), "token_ids: 1234 is no SID token of level 1", 3, VOCABULARY
    )
    twice = xllm([1, 2, 1], [[1, 2, 3]] * 3)
    refused(write(tmp_path / "c.bin", twice), "item_id 1 is there already, on line 1", 3, VOCABULARY)
    refused(write(tmp_path / "d.bin", b""), "no item in it", None, VOCABULARY, format="xllm")


# ---- options


def test_wrong_options(tmp_path: Path) -> None:
    path = write(tmp_path / "items.jsonl", [{"item_id": 1, "sid": [0, 0, 0]}])
    for options, message in [
        ({"format": "csv"}, "format: 'csv', expected one of auto, onela, jsonl, parquet"),
        ({"radix": 16}, "radix: goes with the format openonerec"),
        ({"info": "info.txt"}, "info: goes with the format minionerec"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ItemCatalog.load(path, **options)  # type: ignore[arg-type]
    refused(path, "sid: 3 levels, expected 2", 1, num_levels=2)
    with pytest.raises(CatalogError, match="num_levels: 2, but the vocabulary has 3 levels"):
        ItemCatalog.load(path, VOCABULARY, num_levels=2)
    refused(tmp_path / "absent", "no such file or directory", None)
    refused(tmp_path / "absent", "no such file or directory", None, format="jsonl")


def test_all_formats_agree(tmp_path: Path) -> None:
    """The same items through every format that can carry them give the same version."""
    rng = np.random.default_rng(3)
    sids = rng.integers(0, 16, (300, 3))
    ids = rng.permutation(10_000)[:300].tolist()
    by_sid: dict[str, list] = {}
    for item_id, sid in zip(ids, sids.tolist()):
        by_sid.setdefault(packed(*sid), []).append({"pid": item_id})
    tokens = [IDS[[0, 1, 2], sid].tolist() for sid in sids]
    paths = [
        write(tmp_path / "a.jsonl", [{"item_id": i, "sid": s} for i, s in zip(ids, sids.tolist())]),
        write(tmp_path / "b.jsonl", [{"item_id": i, "token_ids": t} for i, t in zip(ids, tokens)]),
        write(tmp_path / "c.json", by_sid),
        write(tmp_path / "d.bin", xllm(ids, sids.tolist())),
    ]
    direct = ItemCatalog.from_arrays(ids, sids, vocabulary=VOCABULARY)
    direct.save(tmp_path / "saved")
    versions = {ItemCatalog.load(path, VOCABULARY).version for path in [*paths, tmp_path / "saved"]}
    assert versions == {direct.version}
    assert direct.num_sids == len(by_sid) < 300 or direct.num_sids == 300
    assert isinstance(next(direct.records()), CatalogItem)
