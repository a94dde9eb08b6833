"""The blocks of an encrypted Gram that a key holder decrypts, recomputed from the requests it received and its secret key.

Not an attack of its own: the inner products that `gram_geometry` and `sybil_span` start from when the adversary is the key holder, and
the vectors themselves where a server colludes with a client in mode "symmetric", whose clients share the secret key.
Source: `protocols.ckks`; the key holder sees the Gram matrix by design, and this shows what that is worth. What bare products would show
it is in `ckks_products`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..aggregation.ckks_settings import CkksSettings
from ..contract.transcript import Message
from ..protocols import ckks, codec
from ..protocols.ckks.messages import Request, Upload
from ..protocols.ckks.parameters import Packing
from ..protocols.ckks.seal import Arithmetic
from ..types import Array
from .adversary import AdversaryView

__all__ = ["Blocks", "decrypted_blocks", "with_opened_uploads"]

Blocks = dict[tuple[int, int], Array]
"""Inner products (p, p) by pair of clients."""
KEY = "ckks_secret_key_0"
MOST_BYTES = 1 << 26


def decrypted_blocks(view: AdversaryView, everyone: Sequence[int], shape: tuple[int, int]) -> Blocks:
    """Blocks of the first clustering epoch, by clients' ids; none where the adversary has no key. `shape` (p, d) is what clients send.

    `everyone` are all ids in ascending order: the roster's numbers count them.
    """
    secret = next((party[KEY] for party in view.secrets.values() if KEY in party), None)
    requests = [one for one in view.select("gram", "ckks request") if one.context.get("epoch") == 0]
    if secret is None or not requests or "ckks" not in view.protection.gram:
        return {}
    settings = CkksSettings.of(view.protection)
    packing = settings.packing(*shape)
    ring = ckks.arithmetic(settings.parameters())
    decryptor = ring.seal.Decryptor(ring.context, ring.load_secret_key(bytes.fromhex(secret)))
    blocks: Blocks = {}
    for data in (one for message in requests for one in _bytes_in(message)):
        request = codec.decode(data, Request, MOST_BYTES)
        plain = ring.seal.Plaintext()
        decryptor.decrypt(ring.load(request.ciphertext, 3), plain)
        for slot, right in enumerate(request.rights):
            if right is None:
                continue
            values = np.array(ring.coefficients(plain, packing.targets(slot)), np.float64) / packing.scale**2
            block = values.reshape(packing.p, packing.p)
            if right == request.left:
                block = np.triu(block) + np.triu(block, 1).T
            blocks[everyone[request.left], everyone[right]] = block
    return blocks


def with_opened_uploads(view: AdversaryView, shape: tuple[int, int]) -> AdversaryView:
    """The view with encrypted vectors (p, d) as "rows" where the adversary has their uploads and the key: a server with one client, in
    mode "symmetric". `shape` (p, d) is what clients send. Any other view as it is."""
    keys = {one.context.get("epoch"): one for one in view.select("gram", "ckks secret key")}
    if not keys or "ckks" not in view.protection.gram or not all(shape):
        return view
    settings = CkksSettings.of(view.protection)
    packing, ring = settings.packing(*shape), ckks.arithmetic(settings.parameters())
    messages = []
    for message in view.messages:
        key = keys.get(message.context.get("epoch"))
        upload = message.operation == "gram" and message.source == "clients" and "bytes" in (message.payload or {})
        if key is not None and upload and view.adversary.startswith("server"):
            assert key.payload is not None  # selected
            secret = np.asarray(key.payload["bytes"], np.uint8).tobytes()
            rows = np.stack([_opened(ring, packing, secret, data) for data in _bytes_in(message)])
            kept = {name: array for name, array in (message.payload or {}).items() if name == "clients"}
            message = replace(message, payload={"rows": rows, **kept})
        messages.append(message)
    return replace(view, messages=tuple(messages))


def _opened(ring: Arithmetic, packing: Packing, secret: bytes, data: bytes) -> Array:
    """The vectors (p, dimension) of one upload."""
    decryptor = ring.seal.Decryptor(ring.context, ring.load_secret_key(secret))
    chunks = []
    for cipher in codec.decode(data, Upload, MOST_BYTES).left:
        plain = ring.seal.Plaintext()
        decryptor.decrypt(ring.load(cipher, 2), plain)
        chunks.append(ring.coefficients(plain, list(range(packing.p * packing.r))))
    values = np.array(chunks, dtype=np.float64).reshape(packing.chunks, packing.p, packing.r)
    return np.asarray(values.transpose(1, 0, 2).reshape(packing.p, -1)[:, : packing.dimension] / packing.scale)


def _bytes_in(message: Message) -> list[bytes]:
    payload = message.payload or {}
    rows = payload["bytes"]
    lengths = payload.get("bytes.length", np.full(len(rows), rows.shape[1]))
    return [np.asarray(row[: int(length)], np.uint8).tobytes() for row, length in zip(rows, lengths, strict=True)]
