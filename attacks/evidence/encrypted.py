"""The blocks of an encrypted Gram that a key holder decrypts, recomputed from the requests it received and its secret key.

Not an attack of its own: `gram_geometry` and `sybil_span` start from these inner products when the adversary is the key holder.
Source: `protocols.ckks`; the key holder sees the Gram matrix by design, and this shows what that is worth. What bare products would show
it is in `ckks_products`.
"""

from collections.abc import Sequence

import numpy as np

from ...aggregation.ckks_settings import CkksSettings
from ...contract.transcript import Message
from ...protocols import ckks, codec
from ...protocols.ckks.messages import Request
from ...types import Array
from ..adversary import AdversaryView

__all__ = ["Blocks", "decrypted_blocks"]

Blocks = dict[tuple[int, int], Array]
"""Inner products (p, p) by pair of clients."""
KEY = "ckks_secret_key_0"
MOST_BYTES = 1 << 26


def decrypted_blocks(view: AdversaryView, everyone: Sequence[int], shape: tuple[int, int]) -> Blocks:
    """Blocks of the first clustering epoch, by clients' ids; none where the adversary has no key. `shape` (p, d) is what clients send.

    `everyone` are all ids in ascending order: the roster's numbers count them.
    """
    secret = next((party[KEY] for party in view.secrets.values() if KEY in party), None)
    requests = [message for message in view.select("gram", "ckks request") if message.context.get("epoch") == 0]
    if secret is None or not requests or "ckks" not in view.protection.gram:
        return {}
    settings = CkksSettings.of(view.protection)
    packing = settings.packing(*shape)
    ring = ckks.arithmetic(settings.parameters())
    decryptor = ring.seal.Decryptor(ring.context, ring.load_secret_key(bytes.fromhex(secret)))
    blocks: Blocks = {}
    for data in (data for message in requests for data in _bytes_in(message)):
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


def _bytes_in(message: Message) -> list[bytes]:
    payload = message.payload or {}
    rows = payload["bytes"]
    lengths = payload.get("bytes.length", np.full(len(rows), rows.shape[1]))
    return [np.asarray(row[: int(length)], np.uint8).tobytes() for row, length in zip(rows, lengths, strict=True)]
