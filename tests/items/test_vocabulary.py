"""SidVocabulary against tables written out by hand, and against a real tokenizer."""

from __future__ import annotations

import ast
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import onela.items
from onela.errors import VocabularyError
from onela.items.sid_text import MAX_CODE
from onela.items.vocabulary import SidVocabulary


def openonerec_vocab(num_levels: int = 3, size: int = 40) -> dict[str, int]:
    """Text tokens, then levels one after another, then begin and end, then padding: the published order."""
    words = ["hello", "<|im_end|>", "<think>", "a_1", "<s_a_1", "s_a_1>"]
    codes = [f"<s_{'abcd'[level]}_{code}>" for level in range(num_levels) for code in range(size)]
    names = [*words, *codes, "<|sid_begin|>", "<|sid_end|>"]
    return {name: token_id for token_id, name in enumerate(names)}


def minionerec_vocab() -> tuple[dict[str, int], list[list[int]]]:
    """Only codes in use, added in string order: `<a_10>` comes before `<a_2>`."""
    used = [[0, 2, 10, 11, 255], [1, 3, 20], [0, 100, 9]]
    names = sorted(f"<{letter}_{code}>" for letter, codes in zip("abc", used) for code in codes)
    return {"word": 0, **{name: 1000 + i for i, name in enumerate(names)}}, [sorted(codes) for codes in used]


# ---- explicit ids


def test_explicit_ids_position_is_code() -> None:
    vocabulary = SidVocabulary.from_token_ids([[7, 5, 9], [1, 2], [30, 20, 10, 0]], begin_token_id=99)
    assert vocabulary.num_levels == 3
    assert vocabulary.codebook_sizes == (3, 2, 4)
    assert vocabulary.token_ids(0).tolist() == [7, 5, 9]
    assert vocabulary.token_ids(0).dtype == np.int64
    assert vocabulary.codes(2).tolist() == [0, 1, 2, 3]
    assert vocabulary.token_strings(0) is None
    assert (vocabulary.begin_token_id, vocabulary.end_token_id, vocabulary.max_token_id) == (99, None, 30)


def test_explicit_ids_with_holes() -> None:
    vocabulary = SidVocabulary.from_token_ids([[50, 40, 60]], codes=[[9, 2, 4]])
    assert vocabulary.codes(0).tolist() == [2, 4, 9]
    assert vocabulary.token_ids(0).tolist() == [40, 60, 50]
    assert vocabulary.encode([[9], [2], [4]]).tolist() == [[2], [0], [1]]
    assert vocabulary.decode([[2], [0]]).tolist() == [[9], [2]]


@pytest.mark.parametrize(
    ("token_ids", "codes", "message"),
    [
        ([], None, "no level"),
        (None, None, "token_ids: one list of token ids per level is expected, got None"),
        ([[]], None, r"token_ids\[0\]: expected a non-empty list"),
        ([[1], []], None, r"token_ids\[1\]"),
        ([[1.0]], None, "expected integers"),
        ([[[1]]], None, "non-empty list of integers"),
        ([[True, False]], None, "expected integers"),
        ([[3, True]], None, r"token_ids\[0\]: expected integers, got bool"),
        ([[3, np.True_]], None, r"token_ids\[0\]: expected integers, got bool"),
        ([[3, 4]], [[0, True]], r"codes\[0\]: expected integers, got bool"),
        ([[3, -1]], None, "-1 is negative"),
        ([[3, 4, 3]], None, "token id 3 stands at level 0 and again at level 0"),
        ([[3, 4], [5, 4]], None, "token id 4 stands at level 0 and again at level 1"),
        ([[3, 4]], [[1, 1]], "code 1 is given twice"),
        ([[3, 4]], [[1]], "1 codes for 2 token ids"),
        ([[3, 4]], [[1, 2], [3]], "2 levels, but token_ids has 1"),
        ([[3, 4]], [[1, MAX_CODE + 1]], "above the limit"),
    ],
)
def test_explicit_ids_refused(token_ids: Any, codes: list | None, message: str) -> None:
    with pytest.raises(VocabularyError, match=message):
        SidVocabulary.from_token_ids(token_ids, codes=codes)


# ---- conventions


@pytest.mark.parametrize("num_levels", [3, 4])
def test_openonerec_convention(num_levels: int) -> None:
    vocab = openonerec_vocab(num_levels)
    vocabulary = SidVocabulary.from_vocab(vocab)
    assert vocabulary.codebook_sizes == (40,) * num_levels
    for level in range(num_levels):
        strings = vocabulary.token_strings(level)
        assert strings == tuple(f"<s_{'abcd'[level]}_{code}>" for code in range(40))
        assert vocabulary.token_ids(level).tolist() == [vocab[name] for name in strings]
    assert vocabulary.begin_token_id == vocab["<|sid_begin|>"]
    assert vocabulary.end_token_id == vocab["<|sid_end|>"]


def test_minionerec_convention_maps_by_string() -> None:
    vocab, used = minionerec_vocab()
    vocabulary = SidVocabulary.from_vocab(vocab)
    assert vocabulary.codebook_sizes == (5, 3, 3)
    for level, letter in enumerate("abc"):
        assert vocabulary.codes(level).tolist() == used[level]
        assert vocabulary.token_ids(level).tolist() == [vocab[f"<{letter}_{code}>"] for code in used[level]]
    # String order is not code order: were the ids of level a ascending, the case would prove nothing.
    assert (np.diff(vocabulary.token_ids(0)) < 0).any()
    assert (vocabulary.begin_token_id, vocabulary.end_token_id) == (None, None)
    assert vocabulary.encode([[10, 20, 9]]).tolist() == [[2, 2, 1]]
    assert vocabulary.decode_tokens([[2, 2, 1]]).tolist() == [
        [vocab["<a_10>"], vocab["<b_20>"], vocab["<c_9>"]]
    ]


def test_vocabulary_order_does_not_matter() -> None:
    vocab, _ = minionerec_vocab()
    assert SidVocabulary.from_vocab(dict(reversed(list(vocab.items())))) == SidVocabulary.from_vocab(vocab)


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        ({}, "no SID tokens among 0 tokens"),
        ({"hello": 1, "<a>": 2}, "no SID tokens among 2 tokens"),
        ({"<a_1>": 1, "<b_1>": 2, "<s_a_1>": 3}, "two SID conventions are present"),
        ({"<a_1>": 1, "<c_1>": 2}, r"gap; found a \(1 tokens, such as <a_1>\), c"),
        ({"<b_1>": 1, "<c_1>": 2}, "gap"),
        ({"<a_1>": 1, "<b_1>": 1}, r"token id 1 stands at level 0 and again at level 1 \(<a_1> and <b_1>\)"),
        ({"<a_1>": 1, "<a_2>": 1}, "token id 1 stands at level 0"),
        ({"<a_1>": 1, "<a_01>": 2}, "code 1 has two tokens: '<a_1>' and '<a_01>'"),
        ({f"<a_{MAX_CODE + 1}>": 1}, "above the limit"),
        ({"<a_" + "1" * 5000 + ">": 1}, "above the limit"),
    ],
)
def test_wrong_or_ambiguous_vocabularies_are_refused(vocab: dict[str, int], message: str) -> None:
    with pytest.raises(VocabularyError, match=message):
        SidVocabulary.from_vocab(vocab)


def test_pattern_settles_an_ambiguous_vocabulary() -> None:
    vocab = {"<a_1>": 1, "<b_1>": 2, "<s_a_1>": 3, "<s_a_4>": 4}
    vocabulary = SidVocabulary.from_vocab(vocab, sid_pattern=r"<s_([a-z])_(\d+)>")
    assert vocabulary.codebook_sizes == (2,)
    assert vocabulary.token_ids(0).tolist() == [3, 4]


@pytest.mark.parametrize("start", [0, 1])
def test_pattern_with_numbered_levels(start: int) -> None:
    vocab = {f"[{level + start}:{code}]": 10 * level + code for level in range(11) for code in range(2)}
    named = SidVocabulary.from_vocab(vocab, sid_pattern=r"\[(?P<level>\d+):(?P<code>\d+)\]")
    assert named.codebook_sizes == (2,) * 11
    assert [named.token_ids(level)[0] for level in range(11)] == [10 * level for level in range(11)]


def test_pattern_named_groups_may_be_swapped() -> None:
    vocab = {"5@a": 1, "7@b": 2}
    vocabulary = SidVocabulary.from_vocab(vocab, sid_pattern=r"(?P<code>\d+)@(?P<level>[a-z])")
    assert [vocabulary.codes(level).tolist() for level in range(2)] == [[5], [7]]


def test_one_pattern_per_level() -> None:
    vocab = {"genre_3": 1, "genre_1": 2, "brand_9": 3, "other_1": 4}
    vocabulary = SidVocabulary.from_vocab(vocab, sid_pattern=[r"genre_(\d+)", r"brand_(\d+)"])
    assert vocabulary.token_ids(0).tolist() == [2, 1]
    assert vocabulary.codes(1).tolist() == [9]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "is not a regular expression"),
        (r"<a_\d+>", "must have the groups level and code"),
        (r"<([a-z])_(\d+)_(x)>", "must have the groups level and code"),
        (r"<([a-z]).([a-z]+)>", "which is not a number"),
        (r"<(.*)_([0-9]+)>", "levels must be single letters or numbers"),
        (r"nothing([a-z])(\d+)", "no token matches"),
        ([], "an empty list"),
        (5, "a regular expression, or one per level, is expected, got 5"),
        ([5], r"a regular expression, or one per level, is expected, got \[5\]"),
        ([r"<a_\d+>"], "must have one group, the code"),
        ([r"<a_(\d+)>", r"<q_(\d+)>"], "level 1: no token matches"),
        ([r"<a_(\d+)>", r"<.+_(\d+)>"], "matches the patterns of levels 0 and 1"),
    ],
)
def test_wrong_patterns(pattern: Any, message: str) -> None:
    vocab = {"<a_1>": 1, "<b_1>": 2, "<w-x>": 3, "<long_7>": 4}
    with pytest.raises(VocabularyError, match=f"^sid_pattern: .*{message}"):
        SidVocabulary.from_vocab(vocab, sid_pattern=pattern)


# ---- tokenizers


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tokenizer, saved as checkpoints have it: words, then SID tokens as added special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "hello": 1, "world": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    names = sorted(f"<{letter}_{code}>" for letter in "abc" for code in (0, 2, 10, 11))
    tokenizer.add_special_tokens({"additional_special_tokens": [*names, "<|sid_begin|>", "<|sid_end|>"]})
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


def test_from_tokenizer_path_and_object(tokenizer_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    vocabulary = SidVocabulary.from_tokenizer(tokenizer_dir)
    assert (
        vocabulary
        == SidVocabulary.from_tokenizer(str(tokenizer_dir))
        == SidVocabulary.from_tokenizer(tokenizer)
    )
    assert vocabulary.codebook_sizes == (4, 4, 4)
    # The tokenizer's own encoding is the witness: the written SID becomes exactly these token ids.
    for sid in [(0, 2, 10), (11, 11, 0), (10, 0, 2)]:
        text = vocabulary.format_sid(sid)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert vocabulary.decode_tokens(vocabulary.encode(sid)).tolist() == ids
        assert vocabulary.parse_sid(text) == sid
    assert vocabulary.begin_token_id == tokenizer.convert_tokens_to_ids("<|sid_begin|>")


def test_from_tokenizer_stays_on_this_machine_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    asked = []

    def load(name: str, **options: Any) -> Any:
        asked.append((name, options))
        raise OSError("not here")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    for options in ({}, {"local_files_only": False}):
        with pytest.raises(VocabularyError, match="no tokenizer could be loaded from 'some/model': not here"):
            SidVocabulary.from_tokenizer("some/model", **options)
    assert asked == [("some/model", {"local_files_only": True}), ("some/model", {"local_files_only": False})]


def test_from_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match="no tokenizer could be loaded"):
        SidVocabulary.from_tokenizer(tmp_path)
    with pytest.raises(VocabularyError, match="int has no get_vocab"):
        SidVocabulary.from_tokenizer(3)


# ---- encode and decode


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=20, unique=True), min_size=1, max_size=4),
    st.data(),
)
def test_directions_are_inverse(codes: list[list[int]], data: st.DataObject) -> None:
    total = sum(map(len, codes))
    ids = data.draw(st.permutations(range(total)))
    starts = np.cumsum([0, *map(len, codes)])
    token_ids = [list(ids[starts[level] : starts[level + 1]]) for level in range(len(codes))]
    vocabulary = SidVocabulary.from_token_ids(token_ids, codes=codes)
    witness = [dict(zip(level_codes, level_ids)) for level_codes, level_ids in zip(codes, token_ids)]
    sids = np.array(data.draw(st.lists(st.tuples(*map(st.sampled_from, codes)), min_size=1, max_size=10)))
    indices = vocabulary.encode(sids)
    assert indices.dtype == np.int32
    assert np.array_equal(vocabulary.decode(indices), sids)
    tokens = vocabulary.decode_tokens(indices)
    assert tokens.tolist() == [
        [witness[level][code] for level, code in enumerate(sid)] for sid in sids.tolist()
    ]
    assert np.array_equal(vocabulary.encode_tokens(tokens), indices)
    assert [sorted(c)[i] for c, i in zip(codes, indices[0])] == sids[0].tolist()


@pytest.mark.parametrize("count", [0, 1, 20])
def test_rows_are_the_codes_and_tokens_of_sids_and_of_prefixes(count: int) -> None:
    vocabulary = SidVocabulary.from_token_ids([[40, 10, 30], [7, 5, 2, 9]], codes=[[5, 1, 3], [0, 8, 4, 2]])
    chance = np.random.default_rng(0)
    indices = np.stack([chance.integers(0, size, count) for size in (3, 4)], axis=1).astype(np.int32)
    codes, tokens = vocabulary.rows(indices)
    assert codes == [tuple(row) for row in vocabulary.decode(indices).tolist()]
    assert tokens == [tuple(row) for row in vocabulary.decode_tokens(indices).tolist()]
    codes, tokens = vocabulary.rows(indices[:, :1])
    assert codes == [(code,) for code in vocabulary.codes(0, indices[:, 0]).tolist()]
    assert tokens == [(token,) for token in vocabulary.token_ids(0, indices[:, 0]).tolist()]


def test_unknown_codes_and_tokens() -> None:
    vocabulary = SidVocabulary.from_token_ids([[7, 5, 9], [1, 2, 3]], codes=[[0, 1, 2], [0, 4, 8]])
    sids = [[0, 4], [3, 4], [-1, 8], [1, 5], [2, 100]]
    assert vocabulary.encode(sids, strict=False).tolist() == [[0, 1], [-1, 1], [-1, 2], [1, -1], [2, -1]]
    with pytest.raises(VocabularyError, match="level 0: no SID token has code 3"):
        vocabulary.encode(sids)
    # A token of another level is as unknown as one that is no SID token at all.
    assert vocabulary.encode_tokens([[5, 3], [1, 7], [6, 10]], strict=False).tolist() == [
        [1, 2],
        [-1, -1],
        [-1, -1],
    ]
    with pytest.raises(VocabularyError, match="level 0: no SID token has token id 1"):
        vocabulary.encode_tokens([[1, 1]])


@pytest.mark.parametrize("shape", [(3,), (0, 3), (2, 2, 3), (2, 0, 3)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    vocabulary = SidVocabulary.from_vocab(openonerec_vocab())
    sids = np.random.default_rng(0).integers(0, 40, shape)
    assert vocabulary.encode(sids).shape == shape
    assert np.array_equal(vocabulary.decode(vocabulary.encode(sids)), sids)


def test_wrong_shapes_dtypes_and_ranges() -> None:
    vocabulary = SidVocabulary.from_vocab(openonerec_vocab())
    for call in (vocabulary.encode, vocabulary.decode, vocabulary.encode_tokens, vocabulary.decode_tokens):
        with pytest.raises(VocabularyError, match=r"shape \(2,\), expected \[..., 3\]"):
            call([1, 2])
        with pytest.raises(VocabularyError, match="dtype float64, expected integers"):
            call([[1.0, 2.0, 3.0]])
    for index in (-1, 40):
        with pytest.raises(VocabularyError, match=f"level 2: index {index} is out of range 0..39"):
            vocabulary.decode([[0, 0, index]])
    for level in (-1, 3):
        with pytest.raises(VocabularyError, match=r"out of range, the vocabulary has levels 0\.\.2"):
            vocabulary.token_ids(level)


# ---- text, description, immutability


def test_parse_sid() -> None:
    vocabulary = SidVocabulary.from_vocab(openonerec_vocab())
    assert vocabulary.parse_sid("<s_a_1><s_b_39><s_c_0>") == (1, 39, 0)
    assert vocabulary.parse_sid(" <|sid_begin|><s_a_1><s_b_39><s_c_0><|sid_end|>\n") == (1, 39, 0)
    for text, message in [
        ("<s_a_1><s_b_2>", "has 2 levels, the vocabulary has 3"),
        ("<s_a_1><s_b_2><s_c_3><s_a_1>", "'<s_a_1>' is a token of level 0, not of level 3"),
        ("<s_b_1><s_a_2><s_c_3>", "'<s_b_1>' is a token of level 1, not of level 0"),
        ("<s_a_1><s_b_40><s_c_3>", "'<s_b_40>' is not a SID token of the vocabulary"),
        ("<a_1><b_2><c_3>", "'<a_1>' is not a SID token"),
        ("", "'' is not a SID token"),
    ]:
        with pytest.raises(VocabularyError, match=message):
            vocabulary.parse_sid(text)


def test_strings_of_a_sid_and_of_a_prefix() -> None:
    vocabulary = SidVocabulary.from_vocab({"x1y2": 1, "x1y5": 2, "x2y0": 3}, r"x(\d)y(\d)")
    assert vocabulary.token_strings_of((5, 0)) == ["x1y5", "x2y0"]
    assert vocabulary.token_strings_of(np.array([2])) == ["x1y2"]  # type: ignore[arg-type]
    assert vocabulary.format_sid((5, 0)) == "x1y5x2y0"
    with pytest.raises(VocabularyError, match="level 1: no SID token has code 2"):
        vocabulary.format_sid((5, 2))
    with pytest.raises(VocabularyError, match="sid: 1 levels, expected 2"):
        vocabulary.format_sid((5,))


def test_text_without_token_strings() -> None:
    vocabulary = SidVocabulary.from_token_ids([[7, 5], [1, 2]])
    assert vocabulary.parse_sid("<a_1><b_0>") == (1, 0)
    assert vocabulary.format_sid((1, 0)) == "<a_1><b_0>"
    assert vocabulary.token_strings_of((1,)) == ["<a_1>"]
    with pytest.raises(VocabularyError, match="sid: 1 levels, expected 2"):
        vocabulary.format_sid((1,))
    with pytest.raises(VocabularyError, match="has 1 levels, the vocabulary has 2"):
        vocabulary.parse_sid("<a_1>")


def test_describe_says_what_was_found() -> None:
    text = SidVocabulary.from_vocab(minionerec_vocab()[0]).describe().splitlines()
    assert text[0] == "3 levels, 11 SID tokens (<a_N><b_N>...)"
    assert text[1].startswith(
        "level 0: 5 codes, 251 holes (1, 3, 4, 5, 6, ...); <a_0> = 1000 ... <a_255> = 1003;"
    )
    assert text[1].endswith("ids 1000..1004, not in code order")
    assert text[2].startswith("level 1: 3 codes, 18 holes")
    assert text[-1] == "<|sid_end|>: absent"
    text = SidVocabulary.from_vocab(openonerec_vocab()).describe().splitlines()
    assert text[1] == "level 0: 40 codes, no holes; <s_a_0> = 6 ... <s_a_39> = 45; ids 6..45, in code order"
    assert text[-2] == "<|sid_begin|>: 126"


def test_immutable_and_hashable() -> None:
    vocabulary = SidVocabulary.from_token_ids([[7, 5, 9]])
    vocabulary.token_ids(0)[0] = 1
    vocabulary.codes(0)[0] = 1
    vocabulary.codes(0, [1])[0] = 5
    assert vocabulary.token_ids(0).tolist() == [7, 5, 9]
    assert vocabulary.token_ids(0, np.array([2, 0])).tolist() == [9, 7]
    assert vocabulary.codes(0, [2, 0]).tolist() == [2, 0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        vocabulary.convention = "other"  # type: ignore[misc]
    assert hash(vocabulary) == hash(SidVocabulary.from_token_ids([[7, 5, 9]]))
    assert vocabulary != SidVocabulary.from_token_ids([[7, 9, 5]])
    assert vocabulary != SidVocabulary.from_token_ids([[7, 5, 9]], codes=[[0, 1, 3]])
    assert vocabulary != SidVocabulary.from_token_ids([[7, 5, 9]], begin_token_id=1)
    assert vocabulary != 3


@pytest.mark.parametrize("module", ["vocabulary.py", "sid_text.py", "trie.py"])
def test_import_needs_numpy_only(module: str) -> None:
    tree = ast.parse((Path(onela.items.__file__).parent / module).read_text())
    modules = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
    outside = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert outside == {"numpy", "onela"} or outside == {"onela"}
