"""Text for next-word models: articles with a topic, sentences with a language, and the vocabulary and windows of an LSTM.

A window is the `length` words before a word, as their numbers, and its label is the number of that word. The vocabulary is fitted on
training text alone and is public: every client knows it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from ..errors import InputError
from ..keys import Key, ranged
from ..types import Array
from .datasets import HOW_TO_SET, data_directory
from .formats import csv_row_numbers, read_csv, read_lines

__all__ = [
    "NORDIC", "PAD", "TEXTS", "UNKNOWN", "Texts", "VocabularySize", "WindowLength", "load_texts", "vocabulary", "windows",
    "word_numbers", "words",
]  # fmt: skip

PAD, UNKNOWN = 0, 1
"""The numbers of what stands before a text's beginning, and of every word outside the vocabulary."""
_SPECIAL = ("<pad>", "<unknown>")
_WORD = re.compile(r"\d+|[^\W\d_]+(?:[’'-][^\W\d_]+)*")

NORDIC = ("nb", "sv", "da")
"""pFedLIA's Norwegian, Swedish and Danish (section V)."""
_LANGUAGES = ("da", "fo", "is", "nb", "nn", "sv")
VocabularySize = Annotated[int, Key("Texts: entries of the public vocabulary, fitted on all training text.", "[3, inf)", "words")]
WindowLength = Annotated[int, Key("Texts: words before the one to be predicted.", "[1, inf)", "words")]


@dataclass(frozen=True)
class Texts:
    """Documents, each tokenised, with the number of their kind (topic, language), an index of `kinds`."""

    name: str
    kinds: tuple[str, ...]
    train: tuple[tuple[str, ...], ...]
    train_kinds: tuple[int, ...]
    test: tuple[tuple[str, ...], ...]
    test_kinds: tuple[int, ...]
    notes: tuple[str, ...] = ()


def words(text: str) -> tuple[str, ...]:
    """Lower-case words: runs of letters, joined by apostrophes or hyphens inside, and runs of digits, all of which become "0"."""
    return tuple("0" if word[0].isdigit() else word for word in _WORD.findall(text.lower()))


@ranged()
def vocabulary(documents: Iterable[Sequence[str]], size: VocabularySize) -> tuple[str, ...]:
    """<pad>, <unknown> and the most frequent words, `size` entries at most; ties in the order of the alphabet."""
    counts = Counter(word for document in documents for word in document)
    return (*_SPECIAL, *sorted(counts, key=lambda word: (-counts[word], word))[: size - len(_SPECIAL)])


def word_numbers(document: Sequence[str], index: dict[str, int]) -> Array:
    """The numbers of a document's words, shape (words,), int64; `UNKNOWN` for words that `index` has not."""
    return np.array([index.get(word, UNKNOWN) for word in document], dtype=np.int64)


def windows(document: Array, length: WindowLength) -> tuple[Array, Array]:
    """Every word of a document but its first, with the `length` words before it: x (n, length) float32, y (n,) int64.

    Where fewer words stand before it, `PAD` fills the front. Numbers below 2²⁴ are exact in float32.
    """
    if len(document) < 2:
        return np.zeros((0, length), np.float32), np.zeros(0, np.int64)
    padded = np.concatenate([np.full(length - 1, PAD), document])
    x = np.lib.stride_tricks.sliding_window_view(padded, length)[:-1]
    return x.astype(np.float32), document[1:].copy()


def load_texts(name: str, directory: str | Path | None = None, languages: Sequence[str] = ()) -> Texts:
    """One of `TEXTS`. `languages` chooses those of the Nordic texts; empty means `NORDIC`.

    Raises `InputError` for an unknown language, a missing file (naming the folders searched) or a damaged one.
    """
    folder = data_directory(directory)
    if name == "ag_news":
        if languages:
            raise InputError(f"languages = {list(languages)}: ag_news is in English")
        return _ag_news(folder)
    for language in languages:
        if language not in _LANGUAGES:
            raise InputError(f"languages = {list(languages)}: {language!r} is not known; known are {', '.join(_LANGUAGES)}")
    if len(set(languages)) < len(languages):
        raise InputError(f"languages = {list(languages)}: names a language twice")
    return TEXTS[name](folder, tuple(languages) or NORDIC)


def _file(name: str, folders: Sequence[Path], stem: str) -> Path:
    for folder in folders:
        for file in (folder / f"{stem}.gz", folder / stem):
            if file.is_file():
                return file
    searched = " and ".join(map(str, folders))
    raise InputError(f"{name}: no {stem}.gz or {stem} in {searched}; {HOW_TO_SET}")


def _ag_news(directory: Path) -> Texts:
    """train.csv and test.csv of rows (label 1..4, title, description), with or without a header, packed or not."""
    kinds = ("World", "Sports", "Business", "Sci/Tech")
    folders = [directory / "ag_news", directory / "ag_news_csv"]
    parts = []
    for part in ("train", "test"):
        path = _file("ag_news", folders, f"{part}.csv")
        rows = read_csv(path, 3)
        header = bool(rows) and rows[0][0] == "label"
        labels = []
        for number, (label, _, _) in enumerate(rows[header:], start=header):
            if label not in ("1", "2", "3", "4"):
                raise InputError(f"{path}: row {csv_row_numbers(path)[number]} has label {label!r}, not in 1..4")
            labels.append(int(label) - 1)
        if not labels:
            raise InputError(f"{path}: holds no articles")
        # The corpus lost the & of its entities: "company #39;s" is "company's".
        texts = tuple(words(f"{title} {body}".replace(" #39;", "'").replace("#39;", "'")) for _, title, body in rows[header:])
        parts.append((texts, tuple(labels)))
    (train, train_kinds), (test, test_kinds) = parts
    official = len(train) == 120_000 and len(test) == 7_600
    note = f"ag_news: {len(train)} training and {len(test)} test articles; the official files have 120000 and 7600"
    return Texts("ag_news", kinds, train, train_kinds, test, test_kinds, () if official else (note,))


def _nordic(name: str) -> Callable[[Path, tuple[str, ...]], Texts]:
    def load(directory: Path, languages: tuple[str, ...]) -> Texts:
        parts: dict[str, tuple[list[tuple[str, ...]], list[int]]] = {"train": ([], []), "test": ([], [])}
        for kind, language in enumerate(languages):
            for part, (documents, kinds) in parts.items():
                path = _file(name, [directory / name], f"{language}_{part}.txt")
                lines = read_lines(path)
                if not lines:
                    raise InputError(f"{path}: holds no sentences")
                documents += [words(line) for line in lines]
                kinds += [kind] * len(lines)
        (train, train_kinds), (test, test_kinds) = parts.values()
        notes = ("nordic_ud: not the official split of the treebanks; genres differ by language",) if name == "nordic_ud" else ()
        return Texts(name, languages, tuple(train), tuple(train_kinds), tuple(test), tuple(test_kinds), notes)

    return load


TEXTS: dict[str, Callable[[Path, tuple[str, ...]], Texts]] = {
    "ag_news": lambda directory, _: _ag_news(directory),
    "nordic_wiki": _nordic("nordic_wiki"),
    "nordic_ud": _nordic("nordic_ud"),
}
