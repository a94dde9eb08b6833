"""One protection a file, with its client half and its server half side by side, and one line here.

    clear         in the clear, for sums and for comparisons
    transformed   under a transform that the clients share and the server lacks
    secagg        secure aggregation, one sum a group
    oblivious     secure aggregation over blocks: who is in which group stays with the clients
    hidden        the same in one message over blocks
    helped        secure aggregation in one message; `sum_helper`: the parties that unmask, `helped_sums`: the server's runs
    ckks          encrypted inner products; `key_holder`: the third party that decrypts
    shares        inner products of shared vectors; `share_holders`: several parties of which no minority reads anything
    holder_party  what the parties of both have in common
    vector_epochs, encrypted_epochs      clustering epochs of vectors (for `clear` and `transformed`) and of ciphertexts
    secure_sums   the server's runs of secure sums; `spoilers`: how a server finds the client that makes secure sums fail
    buckets       random buckets of the groups of a sum; `robust`: the rules that combine their means

A half is loaded when it is first used, so that a process loads only the protocols that it runs. Its class is named after its file:
`SecaggServerSum` in `secagg`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..contract.protection import ProtectionSpec, register_protection


def _half(module: str, name: str) -> Callable[[Any], Any]:
    def make(parts: Any) -> Any:
        half = getattr(import_module(f".{module}", __name__), module.capitalize() + name)(parts)
        if name == "ServerSum" and parts.protection.robust != "none":
            return import_module(".buckets", __name__).InBuckets(half, parts)
        return half

    return make


def _registered(of: Any, name: str, module: str, reveals: str, **properties: Any) -> None:
    kind = "Sum" if of == "sum" else "Comparison"
    halves = _half(module, f"Server{kind}"), _half(module, f"Client{kind}")
    register_protection(ProtectionSpec(of, name, reveals, *halves, **properties))


for _of, _name, _module, _reveals, _properties in (
    ("gram", "none", "clear", "the server sees every signature", {"hides": False}),
    (
        "gram", "permutation", "transformed", "coordinates in an order shared by the clients: the server sees every value, not its place",
        {"transformed": True},
    ),
    ("gram", "signed_permutation", "transformed", "the same with signs: the server sees the size of every value", {"transformed": True}),
    (
        "gram", "hadamard", "transformed",
        "signs, Walsh-Hadamard mixing, permutation and signs shared by the clients: heuristically only the Gram matrix shows",
        {"transformed": True},
    ),
    (
        "gram", "haar", "transformed", "a Haar rotation shared by the clients: the server sees the Gram matrix and nothing else",
        {"transformed": True},
    ),
    (
        "gram", "ckks", "ckks", "encrypted inner products: a key holder apart sees the Gram matrix, the server what `ckks_release` says",
        {"encrypted": True},
    ),
    (
        "gram", "shares", "shares",
        "vectors shared among several holders, of which no minority learns one: the first sees the Gram matrix, the server labels",
        {"encrypted": True, "shared": True},
    ),
    ("sum", "none", "clear", "the server sees every update", {"hides": False, "robust": True}),
    (
        "sum", "permutation", "transformed",
        "updates in a secret order, averaged unseen (CFL's Algorithm 5): a curious server can read labels off them", {"transformed": True},
    ),
    ("sum", "signed_permutation", "transformed", "the same with signs; broken in the same way", {"transformed": True}),
    (
        "sum", "hadamard", "transformed",
        "updates under a shared Hadamard transform, averaged unseen: heuristically only their Gram matrix shows", {"transformed": True},
    ),
    (
        "sum", "haar", "transformed",
        "updates under a shared Haar rotation, averaged unseen: the server sees their Gram matrix (small models)", {"transformed": True},
    ),
    (
        "sum", "secagg", "secagg", "secure aggregation: the server sees the sum of each group of clients, and who is in it",
        {"secure": True, "robust": True},
    ),
    (
        "sum", "secagg-oblivious", "oblivious",
        "secure aggregation over blocks: clients choose their group (IFCA), the server sees sums and sizes only",
        {"secure": True, "oblivious": True},
    ),
    (
        "sum", "one_message", "helped",
        "secure aggregation in one message: helpers unmask the sum of each group of clients, and the server sees it, and who is in it",
        {"secure": True, "helped": True, "robust": True},
    ),
    (
        "sum", "one_message-oblivious", "hidden",
        "secure aggregation in one message over blocks: clients choose their group (IFCA), server and helpers see sizes, the server sums",
        {"secure": True, "helped": True, "oblivious": True},
    ),
):  # fmt: skip
    _registered(_of, _name, _module, _reveals, **_properties)
