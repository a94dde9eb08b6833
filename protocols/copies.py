"""Objects of another copy of this folder are refused where they would be used: their classes have the same names and are not the same."""

from typing import Any

__all__ = ["check_own"]


def check_own(name: str, value: Any, *kinds: type) -> None:
    """Raises `TypeError` if `value` is of none of the `kinds`, naming both modules where a class of another copy has the same name."""
    if isinstance(value, kinds):
        return
    kind = type(value)
    own = next((own for own in kinds if own.__name__ == kind.__name__), None)
    if own is None:
        raise TypeError(f"{name}: expected {' or '.join(own.__name__ for own in kinds)}, got {kind.__name__}")
    raise TypeError(f"{name}: a {kind.__name__} of {kind.__module__}, another copy of these protocols; make it with {own.__module__}")
