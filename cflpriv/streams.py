"""Text on any terminal: a character that the terminal's encoding lacks is replaced, so that printing never fails.

`ascii`, `latin-1`, `cp1252` and `cp437` lack some of the characters that this package prints, such as – and ε. A name of a file that is not
UTF-8 lacks an encoding everywhere: Python reads its bytes as lone surrogates (PEP 383).
"""

import codecs
import io
import sys
import unicodedata

__all__ = ["READABLE", "encode_readably", "print_file", "printable_streams", "readable"]

READABLE = "cflpriv.readable"
"""The error handler of `codecs` that `encode_readably` uses."""

_LOOKS_LIKE = {
    "✓": "+", "✗": "x", "▲": "!", "○": "o", "è": "e",
    "–": "-", "—": "-", "−": "-", "×": "x", "·": "*", "±": "+/-", "≥": ">=", "≤": "<=", "→": "->", "↓": "v", "’": "'", "°": " degrees",
    "∞": "inf", "λ": "lambda", "‖": "||", "⟨": "<", "⟩": ">", "\u0302": "^", "û": "u^",
}  # fmt: skip


def printable_streams() -> None:
    """Let standard output and standard error replace what their encoding lacks. For the entry of a program: it changes `sys.stdout`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=READABLE)


def print_file(text: str) -> None:
    """Print the text of a file, in UTF-8 whatever the terminal takes: it is redirected into a file that is read as UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors=READABLE)
    print(text, end="")


def encode_readably(text: str, encoding: str = "utf-8") -> bytes:
    """Encode text; what the encoding lacks is written in ASCII: "epsilon" for ε, `\\xe9` for a byte of a file's name that is not UTF-8."""
    return text.encode(encoding, READABLE)


def readable(text: str) -> str:
    """Text that every library takes: the bytes of a file's name that are not UTF-8 are escaped, `\\xe9`."""
    return encode_readably(text).decode("utf-8")


def _in_ascii(character: str) -> str:
    """ASCII that reads like a character, or the escape of its code."""
    if character.isascii() or character in _LOOKS_LIKE:
        return _LOOKS_LIKE.get(character, character)
    if "\udc80" <= character <= "\udcff":  # a byte, see PEP 383
        return f"\\x{ord(character) - 0xDC00:02x}"
    if unicodedata.decomposition(character).startswith("<"):  # a variant, such as a superscript; an accent is part of a name
        return "".join(map(_in_ascii, unicodedata.normalize("NFKD", character)))
    kind, _, letter = unicodedata.name(character, "").rpartition(" LETTER ")
    if kind.startswith("GREEK"):
        return letter.capitalize() if kind.endswith("CAPITAL") else letter.lower()
    return character.encode("ascii", "backslashreplace").decode("ascii")


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_ascii, error.object[error.start : error.end])), error.end


codecs.register_error(READABLE, _replaced)
