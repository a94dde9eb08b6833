"""Objects with secrets are neither copied nor pickled."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import pytest

from cflpriv.protocols.keys import Identity
from cflpriv.protocols.uncopied import uncopied


@uncopied("it serves once; see to_bytes")
class Plain:
    def __init__(self) -> None:
        self.secret = b"s"


@uncopied("it serves once; see to_bytes")
class Slotted:
    __slots__ = ("secret",)


@uncopied("it serves once; see to_bytes")
@dataclass(frozen=True)
class Data:
    secret: bytes = b"s"


@uncopied("it serves once; see to_bytes")
class Struct(msgspec.Struct):
    secret: bytes = b"s"


@uncopied("it serves once; see to_bytes")
class Child(Plain):
    pass


PICKLES: list[Callable[[object], object]] = [partial(pickle.dumps, protocol=protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, *PICKLES])
@pytest.mark.parametrize("cls", [Plain, Slotted, Data, Struct, Child])
def test_no_copy_and_no_pickle(cls: type, duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=rf"^{cls.__name__}: is neither copied nor pickled: it serves once; see to_bytes$"):
        duplicate(cls())
    if duplicate is not copy.copy:
        with pytest.raises(TypeError, match="serves once"):
            duplicate([cls()])


def test_an_identity_is_neither_copied_nor_pickled() -> None:
    one = Identity.create(3)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Identity: is neither copied nor pickled"):
            duplicate(one)
    assert Identity(one.client, one.signing_seed, one.encryption_seed) == one
