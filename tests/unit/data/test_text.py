"""Text: words, a vocabulary from training text alone, windows that hold what stands before a word, and clients with a topic or language."""

import csv
import gzip
import io
import os
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cflpriv.data import DataSpec, build_population
from cflpriv.data.text import PAD, TEXTS, UNKNOWN, load_texts, vocabulary, windows, word_numbers, words
from cflpriv.errors import InputError

FOLDER = Path(os.environ.get("CFLPRIV_DATA") or "absent")
needs_files = pytest.mark.skipif(not FOLDER.is_dir(), reason="CFLPRIV_DATA names no folder of real data sets")

DOCUMENTS = st.lists(st.lists(st.sampled_from("abcdefg"), max_size=12), max_size=8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Skandinavien er IKKE, en ø!", ["skandinavien", "er", "ikke", "en", "ø"]),
        ("the company's 12.5% e-mail", ["the", "company's", "0", "0", "e-mail"]),
        ("_under_score 3rd", ["under", "score", "0", "rd"]),
        ("… — !", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert list(words(text)) == expected


@given(documents=DOCUMENTS, size=st.integers(3, 12))
def test_the_vocabulary_is_the_most_frequent_words(documents: list[list[str]], size: int) -> None:
    entries = vocabulary(documents, size)
    counts = Counter(word for document in documents for word in document)
    assert len(set(entries)) == len(entries) == min(size, 2 + len(counts))
    kept = entries[2:]
    assert all(counts[a] > counts[b] or (counts[a] == counts[b] and a < b) for a, b in pairwise(kept))
    assert all(counts[word] <= counts[kept[-1]] for word in counts if word not in kept)


def test_a_vocabulary_needs_room() -> None:
    with pytest.raises(InputError, match="size = 2: expected an integer ≥ 3"):
        vocabulary([], 2)


@given(document=st.lists(st.integers(1, 50), max_size=15), length=st.integers(1, 8))
def test_windows_hold_the_words_before(document: list[int], length: int) -> None:
    x, y = windows(np.array(document, dtype=np.int64), length)
    assert x.shape == (max(len(document) - 1, 0), length)
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    assert y.tolist() == document[1:]
    for position, row in enumerate(x, start=1):
        before = document[max(0, position - length) : position]
        assert row.tolist() == [PAD] * (length - len(before)) + before


def test_unknown_words_have_one_number() -> None:
    assert word_numbers(("b", "z", "a"), {"a": 2, "b": 3}).tolist() == [3, UNKNOWN, 2]


# --- files


ARTICLES = [
    ("1", "Kabul #39;s vote", "The vote was counted."),
    ("2", "", "A goal, a win"),
    ("3", "Oil", "Oil fell \x85 again"),
    ("4", "Mars", "A rover"),
]


def write_ag(folder: Path, rows: Sequence[tuple[str, ...]], header: bool = True, packed: bool = True, part: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerows([("label", "title", "description"), *rows] if header else rows)
    path = folder / (f"{part}.csv.gz" if packed else f"{part}.csv")
    path.write_bytes(gzip.compress(text.getvalue().encode()) if packed else text.getvalue().encode())
    return path


@pytest.mark.parametrize(("header", "packed"), [(True, True), (False, False)])
def test_ag_news_files(tmp_path: Path, header: bool, packed: bool) -> None:
    for part in ("train", "test"):
        write_ag(tmp_path / "ag_news", ARTICLES * 2, header, packed, part)
    texts = load_texts("ag_news", tmp_path)
    assert texts.train_kinds == (0, 1, 2, 3) * 2
    assert texts.train[0] == ("kabul's", "vote", "the", "vote", "was", "counted")
    assert texts.train[2] == ("oil", "oil", "fell", "again")
    assert "8 training and 8 test articles" in texts.notes[0]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("5", "a", "b")], "row 2 has label '5', not in 1..4"),
        ([("1", "a", "b"), ("World", "a", "b")], "row 3 has label 'World'"),
        ([("1", "a")], "row 2 has 2 cells, expected 3"),
        ([], "holds no articles"),
    ],
)
def test_bad_ag_news(tmp_path: Path, rows: list[tuple[str, ...]], words: str) -> None:
    write_ag(tmp_path / "ag_news", rows)
    with pytest.raises(InputError) as caught:
        load_texts("ag_news", tmp_path)
    assert words in str(caught.value)
    assert "train.csv.gz" in str(caught.value)


@pytest.mark.parametrize("body", [b'1,"a,b', gzip.compress(b"1,a,b", mtime=0)[:-6], b"1,a,\xff", b'1,"a"x,b', b"1,a,b" + b"c" * 200_000])
def test_damaged_csv_is_one_line(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "ag_news").mkdir()
    (tmp_path / "ag_news" / "train.csv").write_bytes(body)
    with pytest.raises(InputError) as caught:
        load_texts("ag_news", tmp_path)
    assert "train.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", TEXTS)
def test_missing_texts_say_where_was_searched(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_texts(name, tmp_path)
    for part in (name, str(tmp_path / name), "train", "--data-dir", "CFLPRIV_DATA"):
        assert part in str(caught.value)


def write_nordic(folder: Path) -> None:
    folder.mkdir()
    for language, base in (("nb", "jeg er ikke her"), ("sv", "jag är inte här"), ("da", "jeg er ikke hér")):
        for part, count in (("train", 12), ("test", 6)):
            lines = "\n".join(f"{base} {'x' * (i + 1)}" for i in range(count))
            (folder / f"{language}_{part}.txt.gz").write_bytes(gzip.compress(lines.encode()))


def test_clients_of_a_language(tmp_path: Path) -> None:
    write_nordic(tmp_path / "nordic_wiki")
    spec = DataSpec("nordic_wiki", partition="kinds", clients=6, vocabulary=12, sequence_length=3)
    population = build_population(spec, tmp_path)
    assert population.groups == (0, 1, 2) * 2
    assert (population.shape, population.classes) == ((3,), 12)
    assert all(client.samples == 6 * 4 for client in population.clients)  # six sentences of five words
    # the whole sentences of the language, each client its own: the first windows of a sentence see its first word only
    for client in population.clients:
        first = client.x_train[::4]
        assert (first[:, :2] == PAD).all()
        assert len({int(number) for number in first[:, 2]}) == 1
    assert population.clients[0].x_test is population.clients[3].x_test
    assert any("test words are outside it" in note for note in population.notes)
    capped = build_population(
        DataSpec("nordic_wiki", partition="kinds", clients=3, samples_per_client=7, test_samples_per_client=5), tmp_path
    )
    assert {(client.samples, len(client.y_test)) for client in capped.clients} == {(7, 5)}
    mixed = build_population(DataSpec("nordic_wiki", clients=4, languages=("sv", "da")), tmp_path)
    assert mixed.groups == (0, 0, 0, 0)


def test_the_vocabulary_never_sees_test_text(tmp_path: Path) -> None:
    write_nordic(tmp_path / "nordic_wiki")
    before = build_population(DataSpec("nordic_wiki", partition="kinds", clients=3), tmp_path)
    lines = "\n".join(["helt andre ord enn før"] * 6)
    (tmp_path / "nordic_wiki" / "nb_test.txt.gz").write_bytes(gzip.compress(lines.encode()))
    after = build_population(DataSpec("nordic_wiki", partition="kinds", clients=3), tmp_path)
    assert before.classes == after.classes
    np.testing.assert_array_equal(before.clients[0].x_train, after.clients[0].x_train)
    assert (after.clients[0].y_test == UNKNOWN).all()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (DataSpec("nordic_wiki", partition="label_skew"), "[data] partition = 'label_skew': texts are divided by 'kinds'"),
        (DataSpec("nordic_wiki", partition="kinds", clients=4), "[data] clients = 4: not a multiple of the 3 groups"),
        (
            DataSpec("nordic_wiki", partition="kinds", clients=3, groups=((0,), (3,))),
            "[data] groups = [[0], [3]]: 3 is not a kind of nordic_wiki; kinds are [0, 1, 2]",
        ),
        (DataSpec("nordic_wiki", rotations=(0, 90)), "[data] rotations = (0, 90)"),
        (DataSpec("nordic_wiki", languages=("se",)), "[data] languages = ['se']: 'se' is not known; known are da, fo, is, nb, nn, sv"),
        (DataSpec("nordic_wiki", languages=("da", "da")), "names a language twice"),
        (DataSpec("ag_news", languages=("da",)), "[data] languages = ('da',): only source = 'nordic_wiki' or 'nordic_ud'"),
        (DataSpec("nordic_wiki", partition="kinds", noise=0.5), "[data] noise = 0.5"),
        (DataSpec("digits", vocabulary=50), "[data] vocabulary = 50: only texts have it"),
        (DataSpec("digits", sequence_length=5), "[data] sequence_length = 5: only texts have it"),
    ],
)
def test_mistakes(tmp_path: Path, spec: DataSpec, words: str) -> None:
    write_nordic(tmp_path / "nordic_wiki")
    with pytest.raises(InputError) as caught:
        build_population(spec, tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "number", "least"), [("vocabulary", 2, 3), ("sequence_length", 0, 1)])
def test_values_out_of_range(key: str, number: int, least: int) -> None:
    with pytest.raises(InputError, match=rf"^data\.{key} = {number}: expected an integer ≥ {least}$"):
        DataSpec("nordic_wiki", **{key: number})  # type: ignore[arg-type]


@pytest.mark.slow
@needs_files
def test_real_ag_news_clients_hold_one_topic() -> None:
    spec = DataSpec("ag_news", partition="kinds", clients=20, samples_per_client=500, test_samples_per_client=50, vocabulary=500)
    population = build_population(spec, FOLDER)
    texts = load_texts("ag_news", FOLDER)
    assert [texts.train_kinds.count(kind) for kind in range(4)] == [4331, 4316, 4355, 4270]
    assert [texts.test_kinds.count(kind) for kind in range(4)] == [1900] * 4
    assert population.groups == (0, 1, 2, 3) * 5
    assert population.classes == 500
    # Words tell the topic: the distribution of labels of a client is nearest to the others of its topic.
    spread = np.stack([np.bincount(client.y_train, minlength=500) for client in population.clients]) / 500
    distance = np.abs(spread[:, None] - spread[None]).sum(axis=2) + 9 * np.eye(20)
    nearest = distance.argmin(axis=1)
    # Chance is 4 of 19; for 20 clients 15 right by chance has probability below 1e-7.
    assert sum(population.groups[i] == population.groups[j] for i, j in enumerate(nearest)) >= 15


@needs_files
@pytest.mark.parametrize(("name", "counts"), [("nordic_wiki", [2566, 2475, 2674]), ("nordic_ud", [3022, 1204, 789])])
def test_real_nordic_files(name: str, counts: list[int]) -> None:
    texts = load_texts(name, FOLDER)
    assert texts.kinds == ("nb", "sv", "da")
    assert [texts.train_kinds.count(kind) for kind in range(3)] == counts
