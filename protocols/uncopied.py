"""Objects with secrets that are neither copied nor pickled.

A protocol machine answers one question once, and a key serves once. Two copies of one object could each answer, and a pickle is a second
place where the secrets lie. What has to be stored has `to_bytes`.

Guarantee: `copy.copy`, `copy.deepcopy` and `pickle` raise TypeError for objects of a class under `uncopied`. Reveals: nothing is
hidden from code in the same process, which reads attributes and calls constructors as it likes. Source: ours.
"""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

__all__ = ["uncopied"]

Class = TypeVar("Class", bound=type[Any])


def uncopied(why: str) -> Callable[[Class], Class]:
    """A class decorator: objects of the class refuse `copy.copy`, `copy.deepcopy` and `pickle`.

    Args:
        why: the reason and what to do instead; ends the message of the TypeError.
    """

    def decorate(cls: Class) -> Class:
        def refuse(self: object, *args: object) -> NoReturn:
            raise TypeError(f"{type(self).__name__}: is neither copied nor pickled: {why}")

        # `copy` asks for `__copy__` and `__deepcopy__` first (structs of msgspec have one), then as `pickle` does for `__reduce_ex__`.
        for name in ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"):
            setattr(cls, name, refuse)
        return cls

    return decorate
