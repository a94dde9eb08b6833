"""An answer of a report's first screen, and words that its sentences are made of."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Answer", "Tone", "counted_words", "headed", "joined", "listed", "lower", "percent", "upper"]

Tone = Literal["good", "bad", "none", "open"]
SYMBOLS = {"good": "✓", "bad": "▲", "none": "–", "open": "?"}
SHORTEST_CLAUSE, LONGEST_SHOWN = 30, 130
NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve")


@dataclass(frozen=True)
class Answer:
    """The answer to a question: a verdict of a few words with its tone, sentences, and smaller ones on how far to trust them."""

    question: str
    tone: Tone
    verdict: str
    text: str
    small: str = ""
    symbol: str = ""

    @property
    def mark(self) -> str:
        """The symbol before the verdict: with the words it says what the colour says."""
        return self.symbol or SYMBOLS[self.tone]


def counted_words(number: int) -> str:
    return NUMBERS[number] if number < len(NUMBERS) else str(number)


def headed(words: str) -> tuple[str, str]:
    """What a page shows of a long text, its first clause and its last after a semicolon, the remedy; and the rest, which it folds.

    The rest of a short text is empty.
    """
    if len(words) <= LONGEST_SHOWN:
        return words, ""
    cut = next((at.end() for at in re.finditer(r"[:;.] ", words) if at.end() > SHORTEST_CLAUSE), len(words))
    fact, rest = words[:cut].rstrip(" :;."), words[cut:]
    middle, mark, remedy = rest.rpartition("; ")
    return (f"{fact}; {remedy}", middle) if mark else (f"{fact}; {rest}", "") if words[:cut].endswith("; ") else (fact, rest)


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def joined(sentences: Sequence[str]) -> str:
    return " ".join(filter(None, sentences))


def listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def upper(words: str) -> str:
    return words[:1].upper() + words[1:]


def lower(words: str) -> str:
    return words[:1].lower() + words[1:]
