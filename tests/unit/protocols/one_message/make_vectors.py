"""Writes tests/vectors/one_message.json: `python -m tests.unit.protocols.one_message.make_vectors` from the repository root.

Sums of three clients with three helpers. Everything but the randomness of the boxes comes from public, fixed entropy. Regenerate only
when the protocol version changes.
"""

import json
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np
from checkout import ROOT

from cflpriv.protocols import codec
from cflpriv.protocols.entropy import public_entropy
from cflpriv.protocols.one_message import Contribution, Helper, SumRecord, accept, agreeable, upload
from cflpriv.protocols.one_message.helper import _Key

from .scene import SESSION, Scene

__all__ = ["PATH", "vectors"]

PATH = ROOT / "tests" / "vectors" / "one_message.json"
LEVELS = {0: [1, -2], 1: [30, 40], 2: [-500, 600]}
CHOICES = {0: (1,), 1: (1,), 2: (0, 1)}
"""Which of two blocks each client fills, in the sum over blocks."""
KINDS = ("UploadDelivery", "CloseSet", "OpenSet")


def vectors() -> dict[str, Any]:
    """The contents of the file: one sum, with one over blocks and one with noise under it."""
    return _sum("one-message vectors") | {
        "blocks": _sum("one-message vectors of blocks", clusters=2, weight_limit=1.0, least_weight=1.0, levels=5000),
        "noised": _sum("one-message vectors with noise", noise=24, cohort=(0, 1, 2)),
    }


def _sum(label: str, **changes: Any) -> dict[str, Any]:
    scene = Scene(3, 3, 1)
    entropy = public_entropy(label)
    helpers = {number: Helper(scene.holders[number], scene.roster, scene.policy, scene.stores[number], entropy) for number in range(3)}
    announced = {number: helper.announcement(7) for number, helper in helpers.items()}
    terms = scene.terms(announced, **{"slot": (7, 0), "dimension": 2, "bits": 16, "models": [sha256(b"the model").digest()]} | changes)
    server = scene.server(terms, announced)
    uploads = {}
    policy = msgspec.structs.replace(agreeable(terms), names=(7,))
    for identity in scene.identities:
        accepted = accept(server.invite, identity, policy, 1, scene.roster)
        own, blocks = np.array(LEVELS[identity.client]), CHOICES[identity.client] if terms.clusters else (None,)
        inputs = [Contribution(own, cluster=block, is_levels=True) for block in blocks]
        uploads[identity.client] = upload(accepted, identity, policy, SumRecord(), inputs, entropy)[0]
        server.receive(identity.client, uploads[identity.client])
    stages = []
    messages = server.deliver()
    answers = {number: helpers[number].receive(data) for number, data in messages.items()}
    stages.append((messages, answers))
    server.delivered(answers)
    messages = server.close()
    while messages:
        answers = {number: helpers[number].receive(data) for number, data in messages.items()}
        stages.append((messages, answers))
        messages = server.advance(answers)

    def hexed(some: dict[int, bytes]) -> list[str]:
        return [some[number].hex() for number in sorted(some)]

    return {
        "note": "made by tests/unit/protocols/one_message/make_vectors.py from public entropy; nothing here is secret",
        "session": SESSION.hex(),
        "roster": {"clients": [key.hex() for key in scene.roster.keys], "helpers": [key.hex() for key in scene.roster.holders]},
        "roster_digest": scene.roster.digest.hex(),
        "helper_seeds": [codec.decode(scene.stores[number]["key"], _Key, 1 << 12).seed.hex() for number in range(3)],
        "levels": [LEVELS[client] for client in range(3)],
        "announcements": hexed(announced),
        "invite": server.invite.hex(),
        "uploads": hexed(uploads),
        "helpers": [
            {"kind": kind, "messages": hexed(sent), "answers": hexed(got)}
            for kind, (sent, got) in zip((*KINDS, "OpenSet")[: len(stages)], stages, strict=True)
        ],
        "sum": server.result.levels.tolist(),
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n", encoding="utf-8")
