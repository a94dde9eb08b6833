"""Attacks on encrypted comparisons: the server substitutes its own key, or asks the key holder for other functions.

Checks: "Clients check whose key they encrypt under" (aggregation/ckks.py, Guarantee); "An epoch answers only the server's key that opened
it, each step once, at most as many steps as the roster has clients" (aggregation/key_holder.py, Guarantee). What `other_function` learns is
written there under Reveals: a threshold of the server's choice.
"""

import math
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from ...aggregation.ckks_settings import CkksSettings
from ...algorithms.pacfl import ClusterByAngles
from ...clustering.similarity import Gram, angles
from ...contract.handles import Held
from ...errors import InputError
from ...experiments.config.config import Config
from ...federation import messages as m
from ...protocols import ckks
from ...protocols.ckks.messages import LABEL, Announcement, Upload, decode, encode
from ...protocols.ckks.public_key import fresh_key
from ...protocols.ckks.seal import arithmetic
from ...protocols.errors import MalformedMessage, ProtocolError
from ...protocols.keys import Identity, sign
from ...types import Array
from .liar import HOLDER
from .outcome import ActiveAttack, ActiveFigure, ActiveGuess
from .scene import AttackRun

__all__ = ["OTHER_FUNCTION", "REPEATED_STEP", "SWAPPED_HOLDER", "encrypted_comparisons"]

RIGHT_ANGLE = 90.0


def swapped_holder(run: AttackRun) -> ActiveGuess:
    """The server presents a key of its own to the victim as the key holder's."""
    held = run.fed.compute(run.scene.signature)["signature"]
    made: list[tuple[ckks.Setup, Any]] = []
    uploads: list[bytes] = []

    def send(client: int, ask: m.PartyRequest, stage: str) -> m.PartyRequest:
        if client != run.victim or not isinstance(ask, m.Give) or ask.epoch is None:
            return ask
        p, dimension = run.scene.signature.width, math.prod(run.scene.population.shape)
        setup = CkksSettings.of(run.scene.config.protection).setup(ask.session, ask.epoch.number, run.roster, p, dimension)
        secret, key = fresh_key(setup, run.roster.holder)
        made.append((setup, secret))
        announcement = encode(Announcement(setup.digest, key, sign(Identity.create(0), LABEL + "key", setup.digest, key)))
        return msgspec.structs.replace(ask, epoch=m.EpochKey(ask.epoch.number, setup.digest, announcement))

    def receive(client: int, ask: m.PartyRequest, answer: m.Answer, stage: str) -> m.Answer:
        if client == run.victim and stage == "gram" and isinstance(answer, m.Given) and len(answer.values) == 1:
            uploads.append(np.asarray(answer.values[0].value).tobytes())
        return answer

    run.liar.send, run.liar.receive = send, receive
    _compared(run, held)
    guess = None
    for (setup, secret), upload in zip(made, uploads, strict=False):
        guess = _decrypted(setup, secret, upload)
    return ActiveGuess(guess, "signature")


def _compared(run: AttackRun, held: Held) -> None:
    """Compare what clients hold; the comparison may fail."""
    with suppress(ProtocolError, InputError):
        run.fed.gram(held, ClusterByAngles())


def _decrypted(setup: ckks.Setup, secret: Any, upload: bytes) -> Array | None:
    """The vectors (p·d,) of an upload under a key of one's own."""
    ring, packing = arithmetic(setup.parameters), setup.packing
    try:
        message = decode(upload, Upload, setup)
        decryptor = ring.seal.Decryptor(ring.context, secret)
        chunks = []
        for data in message.left:
            plain = ring.seal.Plaintext()
            decryptor.decrypt(ring.load(data, 2), plain)
            numbers = np.array(ring.coefficients(plain, list(range(packing.p * packing.r))), dtype=np.float64)
            chunks.append(numbers.reshape(packing.p, packing.r) / packing.scale)
    except MalformedMessage:
        return None
    return np.ravel(np.concatenate(chunks, axis=1)[:, : setup.dimension])


def other_function(run: AttackRun) -> ActiveFigure:
    """The clustering is run again with thresholds of the server's choice: bisection for the smallest angle between any two clients.

    Two clients merge if their angle is below the threshold, so there are as many clusters as clients while it is above all angles' least.
    """
    held = run.fed.compute(run.scene.signature)["signature"]
    low, high, asked = 0.0, RIGHT_ANGLE, 0
    first = True
    while True:
        middle = (low + high) / 2
        try:
            by = ClusterByAngles(linkage="single", beta=middle)
            released = run.fed.gram(held, by) if first else run.fed.gram(held, by, against=held, on=())
        except (ProtocolError, InputError):
            break
        first, asked = False, asked + 1
        if int(released.result["k"]) < len(run.clients):
            high = middle
        else:
            low = middle
        if asked > 4 * len(run.clients):  # nobody counts
            break
    p = run.scene.signature.width
    rows = np.stack([run.scene.truth("signature", client).reshape(p, -1) for client in run.scene.clients])
    distances = angles(Gram.of_vectors(list(run.scene.clients), rows), "smallest_angle").values
    least = float(distances[~np.eye(len(distances), dtype=bool)].min())
    value = abs((low + high) / 2 - least) if asked else None
    return ActiveFigure(
        "least_angle_error_degrees", value, abs(RIGHT_ANGLE / 2 - least), margin=1.0, note=f"{asked} thresholds in one epoch"
    )  # fmt: skip


def repeated_step(run: AttackRun) -> ActiveFigure:
    """Each step of the key holder is asked for a second time, with the victim's enrolment and products in it again.

    The figure is how many products the holder decrypted a second time.
    """
    held = run.fed.compute(run.scene.signature)["signature"]
    _compared(run, held)
    asks = [exchange.ask for exchange in run.liar.exchanges if exchange.client == HOLDER and isinstance(exchange.ask, m.Decrypt)]
    again = 0
    for ask in asks:
        for first in (True, False):
            for step in (ask.step, ask.step + 1):
                repeated = msgspec.structs.replace(ask, first=first, step=step)
                answer = run.liar.ask({HOLDER: repeated}, "ckks decrypt").get(HOLDER)
                again += len(ask.requests) if isinstance(answer, m.Acknowledged) else 0
    return ActiveFigure("products_decrypted_again", float(again) if again else None, 0.0, lower_is_better=False, margin=0.5)


def encrypted_comparisons(config: Config) -> str:
    """Why there is no key holder."""
    if not config.protection.encrypted:
        return f"there is no key holder under gram = {list(config.protection.gram)}"
    if config.privacy.unit != "none":
        return "clients demand noise in what is compared, which this attack does not handle"
    return ""


def _with_a_key(config: Config) -> str:
    return encrypted_comparisons(config) or ("holders have shares, none has a key" if config.protection.comparison.shared else "")


def _labels(config: Config) -> str:
    return encrypted_comparisons(config) or (
        "" if config.protection.ckks_release == "labels" else "the server is shown similarities by this release"
    )


SWAPPED_HOLDER = ActiveAttack(
    "a key of the server's own in place of the key holder's", "ckks: clients check whose key they encrypt under",
    swapped_holder, _with_a_key, claimed=lambda config: True, accomplices=False,
)  # fmt: skip
OTHER_FUNCTION = ActiveAttack(
    "similarities from thresholds of the server's choice, run by the key holder",
    "key_holder, Reveals: a server that lies may ask for other functions than the algorithm's, such as a threshold of its choice",
    other_function, _labels, claimed=lambda config: False, accomplices=False,
)  # fmt: skip
REPEATED_STEP = ActiveAttack(
    "a step of the key holder asked for twice",
    "key_holder: an epoch answers each step once, at most as many steps as the roster has clients",
    repeated_step, _with_a_key, claimed=lambda config: True, accomplices=False,
)  # fmt: skip
