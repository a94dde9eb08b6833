"""An answer of a report's first screen, and words that its sentences are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Answer", "Tone", "counted_words", "joined", "listed", "lower", "percent", "upper"]

Tone = Literal["good", "bad", "none", "open"]
SYMBOLS = {"good": "✓", "bad": "▲", "none": "–", "open": "?"}
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
