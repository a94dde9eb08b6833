"""Names of classes as people write them: forms of the same name, names that differ by accident, words for a missing value, and quantities.

A table that is read as it stands makes two classes of "Yes" and "yes" and a class of "nan", and a price becomes a thousand classes.
Training works, and the accuracy looks like that of a hard problem. Here such labels are merged where that is certain, and named otherwise.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from html import unescape

import numpy as np

from ..types import Array

__all__ = [
    "NOT_A_CLASS",
    "accidental_pairs",
    "combined",
    "missing_word",
    "misspelt",
    "no_classes",
    "number_of",
    "one_letter_apart",
    "same_name",
    "strangers",
    "unified",
    "unsure_word",
]

_WHOLE = re.compile(r"([+-]?)(0|[1-9][0-9]{0,14})(\.0*)?")
_EXPONENT = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]{1,2}")
_INVISIBLE = dict.fromkeys((0x200B, 0x2060, 0xFEFF, 0x00AD))
"""Zero-width space, word joiner, byte order mark and soft hyphen. They never change what a name means."""
_LOOKS_LIKE = {
    ord(other): latin
    for latin, others in {
        "-": "\u2010\u2011\u2012\u2013\u2014\u2212",
        "'": "\u2019\u2018",
        '"': "\u201c\u201d",
        "A": "\u0410\u0391",
        "B": "\u0412\u0392",
        "E": "\u0415\u0395",
        "K": "\u041a\u039a",
        "M": "\u041c\u039c",
        "H": "\u041d\u0397",
        "O": "\u041e\u039f",
        "P": "\u0420\u03a1",
        "C": "\u0421",
        "T": "\u0422\u03a4",
        "X": "\u0425\u03a7",
        "a": "\u0430",
        "e": "\u0435",
        "o": "\u043e\u03bf",
        "p": "\u0440",
        "c": "\u0441",
        "y": "\u0443",
        "x": "\u0445",
        "i": "\u0456",
        "Z": "\u0396",
        "I": "\u0399",
        "N": "\u039d",
        "Y": "\u03a5",
    }.items()
    for other in others
}
"""Dashes, quotation marks, and Cyrillic and Greek letters, with the Latin characters that look the same."""
_SEPARATORS = re.compile(r"(?<![\d\W_])[\s_]+|[\s_]+(?![\d\W_])|(?<=[^\W\d_])-(?=\w)|(?<=\w)-(?=[^\W\d_])")
"""Blanks, underscores and hyphens beside a letter. Between digits they are part of a number or a range."""
_BOOLEAN = {
    "yes": True, "y": True, "true": True, "t": True, "1": True, "no": False, "n": False, "false": False, "f": False, "0": False,
}  # fmt: skip
_LETTERS = 5
"""So many pairs of a capital and a small letter are letters to be recognised."""

NOT_A_CLASS = frozenset(
    (
        "", "nan", "-nan", "<na>", "#n/a", "#na", "#n/a n/a", "n/a", "n.a.", "null", "<null>", "(null)", "[null]", "#null!", "nat", "nil",
        "?", ".", "\\n", "1.#qnan", "-1.#qnan", "#value!", "#ref!", "#div/0!", "#name?", "undefined",
    )
)  # fmt: skip
"""Words that tables have where a value is missing, in small letters."""


UNSURE = frozenset(
    ("na", "none", "unknown", "missing", "not available", "not recorded", "no data", "no answer", "n/k", "tbd", "unlabelled", "unlabeled",
     "pending", "withheld", "refused", "declined", "did not answer", "prefer not to say", "prefer not to answer", "not applicable")
)  # fmt: skip
"""Words that may be the name of a class, or stand for a missing value."""


def same_name(cell: str) -> str:
    """The form of a name that all ways to write it have in common, where they certainly mean the same.

    Blanks around a name and their kinds, invisible characters, and composed or decomposed letters make no difference; nor do "1", "1.0",
    "+1" and "1e0". "01" stays, since it may be a code.
    """
    text = " ".join(unicodedata.normalize("NFC", cell.translate(_INVISIBLE)).split())
    if match := _WHOLE.fullmatch(text):
        return ("-" if match[1] == "-" and match[2] != "0" else "") + match[2]
    if _EXPONENT.fullmatch(text) and (number := float(text)).is_integer() and abs(number) < 1e15:
        return str(int(number))
    return text


def unified(cells: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The name that each of several cells stands for, and a sentence for each name that is written in several ways.

    A name that is written in one way only stays as it is.
    """
    forms: dict[str, list[str]] = {}
    for cell in sorted(set(cells)):
        forms.setdefault(same_name(cell), []).append(cell)
    names = {cell: written[0] if len(written) == 1 else name for name, written in forms.items() for cell in written}
    merged = tuple(f"{', '.join(map(ascii_if_alike(written), written))} are one name" for written in forms.values() if len(written) > 1)
    return names, merged


def ascii_if_alike(names: Sequence[str]) -> Callable[[str], str]:
    """How to print names so that a reader sees how they differ: escaped if they look the same."""
    looks = {unicodedata.normalize("NFKC", name.translate(_INVISIBLE)).translate(_LOOKS_LIKE) for name in names}
    return ascii if len(looks) < len(names) else repr


def number_of(name: str) -> float | None:
    """The finite number that a name writes, if it writes one."""
    try:
        number = float(name) if "_" not in name else float("nan")
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def _likeness(name: str) -> str:
    """What names that differ by accident have in common: capitals, separators, marks at the end, forms of a number, lookalikes."""
    text = unicodedata.normalize("NFKC", _decoded(unescape(name)).translate(_INVISIBLE)).translate(_LOOKS_LIKE).casefold()
    text = "".join(character for character in text if unicodedata.category(character) not in ("Cf", "Cc"))
    text = text.strip().rstrip(".,;:!").strip("'\"`").strip()
    if number_of(text) is not None:
        return str(Decimal(text).normalize() + 0)  # whole numbers of any size stay apart
    return _SEPARATORS.sub("", text) or name


def _decoded(name: str) -> str:
    """A name whose UTF-8 was read as Latin-1 or as Windows-1252, as it was written."""
    for encoding in ("cp1252", "latin-1"):
        try:
            return name if name.isascii() else name.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
    return name


def accidental_pairs(names: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Pairs of names that differ as by accident: "Yes" and "yes", "no risk" and "no_risk", "1" and "01", "true" beside "yes".

    Small and capital letters of an alphabet are names of their own.
    """
    alike: dict[str, list[str]] = {}
    for name in sorted(names):
        alike.setdefault(_likeness(name), []).append(name)
    pairs = [(group[0], group[1]) for group in alike.values() if len(group) > 1]
    if len(pairs) >= _LETTERS and all(len(name) == 1 and name.isalpha() for pair in pairs for name in pair):
        return ()
    if not pairs and len(names) > 2 and {_plain(name) for name in names} <= _BOOLEAN.keys() and any(len(name) > 1 for name in names):
        for truth in (True, False):
            words = [name for name in sorted(names) if _BOOLEAN[_plain(name)] is truth]
            pairs += [(words[0], words[1])] if len(words) > 1 else []
    return (*pairs, *_initials(names))


def _initials(names: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Pairs of a letter and the one word that begins with it, where all single letters are such: "m" and "male", "f" and "female"."""
    letters = sorted(name for name in names if len(name) == 1 and name.isalpha())
    words = [name for name in names if len(name) > 2 and name.isalpha()]
    begun = [[word for word in words if word.casefold().startswith(letter.casefold())] for letter in letters]
    if len(letters) < 2 or any(len(group) != 1 for group in begun):
        return ()
    return tuple((group[0], letter) for letter, group in zip(letters, begun, strict=True))


def _plain(name: str) -> str:
    return same_name(name).casefold()


def missing_word(name: str, others: Collection[str]) -> bool:
    """Whether a name stands for a missing value, rather than for a class beside `others`."""
    word = name.strip().casefold()
    if word in NOT_A_CLASS or word.strip("-") == "":
        return word == "" or word.strip("-") != "" or "+" not in others
    numbers = all(number_of(other) is not None for other in others)
    return (word == "na" and not _are_codes(others)) or (word == "none" and bool(others) and numbers)


def _are_codes(names: Collection[str]) -> bool:
    """Whether names are codes of capital letters, such as EU and APAC, among which NA is one, too."""
    return len(names) > 1 and all(
        2 <= len(name) <= 5 and name.isalpha() and name.isupper() and name.casefold() not in _BOOLEAN for name in names
    )


def unsure_word(name: str) -> bool:
    """Whether a name that is taken as a class is also a word for a missing value."""
    return name.strip().casefold() in UNSURE


def strangers(names: Collection[str]) -> tuple[str, ...]:
    """Names that are unlike all others: one or two words among numbers, a number of nines far from the others, one negative number
    beside 0, 1, 2, … or 1, 2, 3, …"""
    words = sorted(name for name in names if number_of(name) is None)
    if 0 < len(words) <= 2 <= len(names) - len(words) and len(words) < len(names) / 2:
        return tuple(words)
    if words or len(names) < 3:
        return ()
    odd = [name for name in names if re.fullmatch(r"9{2,}(\.0*)?|-[1-9][0-9]*(\.0*)?", name)]
    others = sorted(float(name) for name in names if name not in odd)
    if len(odd) != 1 or len(others) < 2:
        return ()
    number, counted = float(odd[0]), len(others) > 2 and others[0] in (0, 1) and others == [others[0] + i for i in range(len(others))]
    far = min(abs(number - others[0]), abs(number - others[-1])) > others[-1] - others[0] and not others[0] < number < others[-1]
    nines = set(odd[0].strip("-").partition(".")[0]) == {"9"}
    return tuple(odd) if (counted and (number < 0 or far)) or (nines and (far or number < 0 <= others[0])) else ()


def misspelt(counts: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """Pairs of a rare name and a common one that differ by a letter: left out, added, changed, or exchanged with the next.

    A name of one row that is the beginning of a common one is a cell that was cut.
    """
    pairs = []
    for rare in counts:
        if counts[rare] == 1 and rare.isalpha() and rare.islower():
            cut = [name for name, count in counts.items() if count >= RARE and name.startswith(rare) and len(name) > max(2, len(rare))]
            if cut:
                pairs.append((rare, cut[0]))
                continue
        if len(rare) < 4 or not rare.replace(" ", "").isalpha():
            continue
        often = (name for name, count in counts.items() if count >= RARE * counts[rare] and name.isprintable())
        pairs += [(rare, name) for name in often if one_letter_apart(rare.casefold(), name.casefold())][:1]
    return tuple(pairs)


RARE = 20
"""A misspelt name occurs this many times less often than the right one."""


def one_letter_apart(one: str, other: str) -> bool:
    """Whether a letter is left out, added or changed, or two neighbours are exchanged."""
    if abs(len(one) - len(other)) > 1:
        return False
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    ends = one[same:], other[same:]
    swapped = len(ends[0]) > 1 and ends[0][:2] == ends[1][:2][::-1] and ends[0][2:] == ends[1][2:]
    return swapped or ends[0][1:] == ends[1][1:] or ends[0][1:] == ends[1] or ends[0] == ends[1][1:]


def combined(names: Collection[str]) -> tuple[str, ...]:
    """Names that are several labels with a mark between them: there are more names than different parts of these."""
    parts = {name: [part.strip() for part in re.split(r"[;|,/]", name)] for name in sorted(names)}
    several = tuple(name for name, of_name in parts.items() if len(of_name) > 1)
    return several if len(several) > 2 and len({part for of_name in parts.values() for part in of_name}) < len(names) else ()


def no_classes(numbers: Array | None, counts: Array) -> tuple[str, bool]:
    """Why labels are a quantity or identifiers rather than classes, as words after "N classes in M rows: ", and whether that is sure.

    Args:
        numbers: the value of each class, float64 (k,), ascending; None if some are no numbers.
        counts: how many rows have each, int64 (k,).

    Returns:
        An empty text if they may well be classes. Sure are values with fractions and many distinct ones, and nearly as many classes as
        rows. Not sure: whole numbers that are no numbers of classes and have few rows each, as years and prices have.
    """
    k, n = len(counts), int(counts.sum())
    if numbers is not None and k > 12 and (k > 25 or n < 5 * k) and (numbers != np.trunc(numbers)).any():
        return "numbers with fractions, a quantity rather than classes", True
    if k > 10 and 2 * k > n:
        return "a quantity or an identifier rather than classes" if numbers is not None else "identifiers rather than classes", True
    if numbers is not None and k > 20:
        numbered, even = numbers[0] in (0, 1) and numbers[-1] - numbers[0] + 1 == k, counts.max() <= counts.min() + 1
        if not numbered and not even and n < 4 * k:
            return "a quantity or an identifier rather than classes", True
        if not numbered and not even and (n < 10 * k or (k > 100 and np.median(counts) < 10)):
            return "few rows each, and not numbered from 0 or 1 without gaps; is it a quantity?", False
    if k > 20 and np.median(counts) < 2:
        return "most of them occur once", False
    return "", False
