"""The server's machine for one clustering epoch: keeps ciphertexts and requests each block of the Gram matrix once."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from threading import RLock

from ..entropy import Entropy, system_entropy
from ..errors import RemoteError
from ..keys import Identity, Roster, frame, sign, verify, verify_key
from ..uncopied import uncopied
from .messages import LABEL, Announcement, Request, Setup, Upload, decode, encode, signed_request, signed_upload
from .products import Job, Output, Products
from .workers import CkksWorkers

__all__ = ["CkksServer", "landmarks_of"]

_LEFTS_A_JOB = 16


def landmarks_of(setup: Setup, first: Sequence[int], most: int) -> tuple[int, ...]:
    """The `most` landmarks among the clients that came first, ascending: those whose hash with the epoch is smallest."""
    keyed = sorted(first, key=lambda client: sha256(frame("landmark", setup.digest, client.to_bytes(8, "big"))).digest())
    return tuple(sorted(keyed[:most]))


@uncopied("it has the server's identity, and answers each client once")
class CkksServer:
    """Takes uploads, makes requests.

    With `landmarks` = m > 0 only pairs with one of m landmark clients are computed: those of the first clients whose hash with the epoch is
    smallest, so that no order of ids decides.

    Guarantee: it sees ciphertexts only. Reveals: who takes part, and what the key holder sends back.
    """

    def __init__(
        self, setup: Setup, announcement: bytes, holder: bytes, roster: Roster, identity: Identity, *, landmarks: int = 0,
        entropy: Entropy = system_entropy,
    ) -> None:  # fmt: skip
        message = decode(announcement, Announcement, setup)
        verify_key(holder, 0, message.signature, LABEL + "key", message.setup, message.public_key)
        self.setup = setup
        self.products = Products(setup, holder, message.public_key, entropy=entropy)
        self.public_key, self._holder, self._lock = message.public_key, holder, RLock()
        self._roster = roster
        self._identity = identity
        self._most_landmarks = landmarks
        self._uploads: dict[int, Upload] = {}
        self.landmarks: tuple[int, ...] = ()

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients whose ciphertexts it has, in order of arrival."""
        return tuple(self._uploads)

    def receive(self, data: bytes) -> bytes:
        """A client's upload; the enrolment for the key holder. A refused one changes nothing. Threads come one after the other.

        Raises:
            RemoteError: "malformed" for anything but ciphertexts of this epoch (random bytes, truncated or overlong ciphertexts, other
            parameters, compressed data that would inflate), "bad-signature" for a sender outside the roster and for ciphertexts under
            another key, "enrolled-before" for a second upload.
        """
        with self._lock:
            upload = self._checked(data)
            self._uploads[upload.client] = upload
        return encode(upload.enrolment())

    def check(self, data: bytes, client: int) -> None:
        """Whether `receive` would take an upload, and it is this client's. Raises `RemoteError` as that does, or "wrong-sender"."""
        if self._checked(data).client != client:
            raise RemoteError("wrong-sender", client)

    def _checked(self, data: bytes) -> Upload:
        upload = decode(data, Upload, self.setup)
        client = upload.client
        statement = signed_upload(self.public_key, client, upload.digest)
        verify(self._roster, client, upload.signature, LABEL + "upload", upload.setup, statement)
        if client in self._uploads:
            raise RemoteError("enrolled-before", client)
        chunks = self.setup.packing.chunks
        if (len(upload.left), len(upload.right)) != (chunks, chunks):
            raise RemoteError("malformed", client)
        for ciphertext in (*upload.left, *upload.right):
            self.products.load(ciphertext)
        return upload

    def withdraw(self, clients: Iterable[int]) -> None:
        """Forget uploads, for a step that is not finished and is taken again with other ones."""
        for client in clients:
            self._uploads.pop(client, None)

    def ahead(self, new: int) -> AbstractContextManager[None]:
        """Make masks for the outputs that so many `new` clients will lead to while the caller waits for their uploads."""
        blocks, size, before = new // self.setup.group, self.setup.group, len(self._uploads)
        outputs = blocks * before + size * blocks * (blocks - 1) // 2 + blocks  # of those with all slots asked for
        return self.products.ahead(min(outputs, blocks * self._most_landmarks) if self._most_landmarks else outputs)

    def jobs(self, new: Sequence[int]) -> list[Job]:
        """What is to be computed for `new` clients: their blocks with those before them (or with the landmarks), and with themselves."""
        if self._most_landmarks and not self.landmarks:
            self.landmarks = landmarks_of(self.setup, new, self._most_landmarks)
        place = {client: number for number, client in enumerate(self._uploads)}
        lefts = self.landmarks or self.clients
        jobs = []
        size = self.setup.group
        for start in range(0, len(new), size):
            rights = tuple(new[start : start + size])
            asked = {left: tuple(self._asked(left, right, place) for right in rights) for left in lefts}
            useful = [left for left in lefts if any(asked[left])]
            for first in range(0, len(useful), _LEFTS_A_JOB):
                some = useful[first : first + _LEFTS_A_JOB]
                jobs.append(
                    Job(
                        tuple((left, self._uploads[left].left) for left in some),
                        tuple((right, self._uploads[right].right) for right in rights),
                        tuple(asked[left] for left in some),
                    )
                )
        return jobs

    def _asked(self, left: int, right: int, place: dict[int, int]) -> bool:
        """Each unordered pair once: in order, or from the landmark where only one is."""
        return place[left] <= place[right] or (bool(self.landmarks) and right not in self.landmarks)

    def requests(self, jobs: Sequence[Job], workers: CkksWorkers | None = None) -> Iterator[bytes]:
        """The signed requests of some jobs, as they get done, in their order, computed here or in worker processes."""
        if workers is None:
            for job in jobs:
                yield from map(self._request, self.products.compute(job))
        else:
            for outputs in workers.map(self.setup, self._holder, self.public_key, jobs):
                yield from map(self._request, outputs)

    def _request(self, output: Output) -> bytes:
        digest = self.setup.digest
        statement = signed_request(self.public_key, output.left, output.rights, output.ciphertext)
        signature = sign(self._identity, LABEL + "request", digest, statement)
        return encode(Request(digest, output.left, output.rights, output.ciphertext, signature))
