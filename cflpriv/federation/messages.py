"""What a server asks and a client answers: typed messages, and their one encoding as bytes.

Every request names the session. Messages hold arrays and tasks as they are, so that parties in one process hand them over without
serialising. As bytes, arrays travel as (dtype, shape, bytes), sums with their transformed and own parts as they are, tasks as the names and
fields of frozen dataclasses from a fixed list. A decoder takes any bytes and gives a valid message or raises `MalformedMessage`.
"""

from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from ..contract.handles import Blind, Shared
from ..errors import InputError
from ..protocols.codec import Codec
from ..protocols.errors import MalformedMessage
from ..types import Array
from .task_encoding import task_from_bytes, task_to_bytes

__all__ = [
    "REFUSALS", "VERSION", "AddUp", "Addends", "Answer", "Ask", "Bounded", "Boxed", "Carried", "Committed", "Compute", "Computed", "Deal",
    "Decrypt", "Described", "Done", "Drop", "Enrol", "Enrolled", "Epoch", "Finish", "Fold", "Give", "Given", "Group", "Keys", "Many",
    "Message", "Mine", "Named", "NoisySteps", "One", "OwnPart", "Parameter", "Picks", "Recipient", "Refused", "Released", "Said", "Seal",
    "Sealed", "Shares", "Step", "Stepped", "Take", "ToHolder", "blind_terms", "codec", "decode_answer", "decode_ask", "encode", "to_one",
]  # fmt: skip

VERSION = 7
LIMIT_BYTES = 1 << 31
DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
MOST_AXES = 8

REFUSALS: dict[str, str] = {
    "malformed": "the message is not one of this protocol",
    "version": "server and client speak different versions of this protocol",
    "wrong-session": "the client has not been enrolled into this session (enrol it again), or has left it for another, for good",
    "forbidden": "the client's own settings forbid this: its protection, or the privacy it demands, differs from the server's",
    "bad-dealing": "the nonces and commitments of a dealing into buckets do not fit each other, or the list that the client was shown",
    "wrong-bucket": "the cohort of a secure sum is not within the bucket that this client was dealt into",
    "over-budget": "the client has released all that its own privacy budget allows",
    "second-sum": "the client has contributed a value of this round to a sum already, and the server asks for another over other clients",
    "used-transform": "the client has used this transform already: each serves one clustering epoch or one sum",
    "no-secret": "the client has no part in the agreement on the clients' secret yet",
    "not-held": "the client does not hold the value asked for (it lost its state, or the value was dropped)",
    "unknown-task": "the client does not know this task; both sides need the same version",
    "bad-input": "the client's data or parameters do not fit the task",
    "not-on-roster": "the client's identity is not the one pinned on its roster",
    "bad-settings": "the client's settings file cannot be used; its own log says why",
    "internal": "the client failed; its own log says why",
}
"""What a client may answer instead, besides the words of the protocols it speaks (`cflpriv.protocols.errors`): code -> what it means."""

Bytes16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Bytes64 = Annotated[bytes, msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Name = Annotated[str, msgspec.Meta(max_length=200)]


if TYPE_CHECKING:
    Value = Array
else:
    Value = np.ndarray
"""An array, or in one process what `numpy.asarray` makes one of (`engine.Deferred`)."""


class Carried:
    """A task as a message carries it: the object itself, and its bytes when they are asked for."""

    def __init__(self, task: Any) -> None:
        self.task = task

    @cached_property
    def data(self) -> bytes:
        """The task as bytes. Raises `InputError` for one that cannot be encoded."""
        return task_to_bytes(self.task)


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Any message. Two of them with arrays are compared by their bytes, not by `==`."""


class Named(Message, frozen=True):
    """An array and its name."""

    name: Name
    value: Value


class Said(Message, frozen=True):
    """What one sender's part is, in a relayed value: `sender` and the array."""

    sender: Count
    value: Value


# --- sums and parameters ------------------------------------------------------------------------------------------------------------


class BlindPart(Message, frozen=True):
    transform: Name
    value: Value
    start: Count
    stop: Count
    shape: tuple[Count, ...]
    dimension: Count


class OwnPart(Message, frozen=True):
    held: Count
    part: Name
    factor: float


class Addends(Message, frozen=True):
    """A `Shared`: its clear part (none or one), its blind parts, its own parts."""

    clear: tuple[Value, ...]
    blind: tuple[BlindPart, ...]
    own: tuple[OwnPart, ...]


class One(Message, frozen=True, tag="one"):
    """One value for the client."""

    value: Addends


class Many(Message, frozen=True, tag="many"):
    """A list, from which a client picks or which it is given whole."""

    values: tuple[Addends, ...]


class Mine(Message, frozen=True, tag="mine"):
    """What the client itself holds."""

    held: Count
    part: Name


class Parameter(Message, frozen=True):
    name: Name
    value: One | Many | Mine


class Picks(Message, frozen=True, tag="picks"):
    """The positions that a client's labels name; `several` says that a list of them is meant, even if it has one."""

    labels: tuple[Count, ...]
    several: bool


# --- noise --------------------------------------------------------------------------------------------------------------------------

Relation = Literal["add_remove", "replace_one"]


class NoisySteps(Message, frozen=True):
    """How a task is made private (`privacy.Noise`): all of it is public, the noise is drawn at the client."""

    relation: Relation
    training: float
    signature: float
    choice: float
    clip_norm: float
    sampling_rate: float
    samples: Count
    sketch_dim: Count
    loss_cap: float
    seed: int


class Bounded(Message, frozen=True):
    """A client's whole contribution is clipped to `clip_norm`. `noise_multiplier` is that of the noise, in sensitivities.

    In sums the server adds it, which is trusted with the contributions; where single clients' rows are compared, the client itself.
    """

    relation: Relation
    clip_norm: float
    noise_multiplier: float


class Shares(Message, frozen=True):
    """Each client adds its share of noise inside a secure sum (`mechanisms.SkellamPlan`); `seed` is that of the public flattening signs."""

    relation: Relation
    clip_norm: float
    levels_per_unit: float
    local_variance: float
    survivors: Count
    seed: int


# --- requests -----------------------------------------------------------------------------------------------------------------------


class Enrol(Message, frozen=True, tag="enrol"):
    """Says hello. `session` names this federation for good; `challenge` is fresh."""

    version: Count
    session: Bytes16
    challenge: Bytes16


class Compute(Message, frozen=True, tag="compute"):
    """Run `task`, in its private form where there is `noise`, and keep its parts as number `held`.

    Of what is held already only the numbers `live` are still wanted.
    """

    session: Bytes16
    round: int
    seed: int
    held: Count
    live: tuple[Count, ...]
    task: Carried
    params: tuple[Parameter, ...]
    which: Picks | Mine | None
    noise: NoisySteps | None = None


class Epoch(Message, frozen=True):
    """An epoch of encrypted vectors: its number, the digest of its terms, and the key holder's announcement of its key."""

    number: Count
    setup: Bytes32
    announcement: bytes


class Give(Message, frozen=True, tag="give"):
    """Release parts of `held`: "gram" (one part), "gather" or "sum"; under the client's own protection, whatever that is.

    `transform` names the purpose that a shared transform is for ("gram/EPOCH", "sum/…"), empty in the clear. `weigh` asks for the sample
    count along with a sum. `noise` bounds a whole client's contribution. A vector is encrypted under the key of `epoch`.
    """

    session: Bytes16
    operation: Literal["gram", "gather", "sum"]
    held: Count
    parts: tuple[Name, ...]
    transform: Name
    weigh: bool
    noise: Bounded | None = None
    epoch: Epoch | None = None


class Step(Message, frozen=True, tag="step"):
    """One message of a secure sum over parts of `held`; `said` are the bytes of `cflpriv.protocols.secagg`.

    `weight` is the public weight, 0 for the client's own sample count. `models` is how many models the algorithm speaks of in public.
    `groups` are the client's groups in a sum over blocks (a count of them first), where it does not choose them itself. `noise` is the
    share of noise that the client adds.
    """

    session: Bytes16
    slot: tuple[Count, Count]
    held: Count
    parts: tuple[Name, ...]
    weight: float
    models: Count
    kind: Literal["sum", "counts", "blocks"]
    groups: Mine | Picks | None
    said: bytes
    noise: Shares | None = None


class Committed(Message, frozen=True):
    """A client's commitment to its nonce in a dealing."""

    client: Count
    commitment: Bytes32


class Deal(Message, frozen=True, tag="deal"):
    """One message of a dealing into buckets: commit to a nonce; open it for this list; here are the `nonces` of all on the list.

    `slot` is that of the sums of the buckets, and the attempt.
    """

    session: Bytes16
    slot: tuple[Count, Count, Count]
    listed: tuple[Committed, ...]
    nonces: tuple[Bytes32, ...]


class Recipient(Message, frozen=True):
    """Who wants a value, and the encryption key with its owner's signature."""

    client: Count
    encryption_key: Bytes32
    signature: Bytes64


class Seal(Message, frozen=True, tag="seal"):
    """Seal parts of `held` for each recipient; they will know it as number `arrives`."""

    session: Bytes16
    held: Count
    parts: tuple[Name, ...]
    arrives: Count
    recipients: tuple[Recipient, ...]


class Boxed(Message, frozen=True):
    sender: Recipient
    box: bytes


class Take(Message, frozen=True, tag="take"):
    """Boxes from others, to be kept as number `held`."""

    session: Bytes16
    held: Count
    parts: tuple[Name, ...]
    boxes: tuple[Boxed, ...]


class Fold(Message, frozen=True, tag="fold"):
    """Open a sum and send its value, times that of `times` if there is one, back under a transform of its own."""

    session: Bytes16
    transform: Name
    value: Addends
    times: tuple[Addends, ...]


class AddUp(Message, frozen=True, tag="add-up"):
    """Add up own parts and keep the total as number `held`, part "own"."""

    session: Bytes16
    held: Count
    addends: tuple[OwnPart, ...]


class Group(Message, frozen=True, tag="group"):
    """One message of the agreement on the clients' secret; `said` are the bytes of `cflpriv.protocols.group`."""

    session: Bytes16
    said: bytes


# --- requests to the key holder ------------------------------------------------------------------------------------------------------


class Keys(Message, frozen=True, tag="keys"):
    """Make keys for a clustering epoch over clients' rows (p, dimension), and drop those of epochs other than `live`.

    The holder makes the epoch's terms by itself; `setup` is the digest of those that the server has. `server` will sign requests.
    """

    session: Bytes16
    epoch: Count
    p: Count
    dimension: Count
    setup: Bytes32
    server: Bytes32
    live: tuple[Count, ...]


class Decrypt(Message, frozen=True, tag="decrypt"):
    """Enrolments and requests of `cflpriv.protocols.ckks` for one step of an epoch; `first` starts that step (again)."""

    session: Bytes16
    epoch: Count
    step: Count
    first: bool
    enrolments: tuple[bytes, ...]
    requests: tuple[bytes, ...]


class Finish(Message, frozen=True, tag="finish"):
    """The step is complete with the new `clients`: run `then`, and say what the release allows. Asked again alike, it is said again."""

    session: Bytes16
    epoch: Count
    step: Count
    clients: tuple[Count, ...]
    then: bytes


class Drop(Message, frozen=True, tag="drop"):
    """Drop the keys of all epochs but `live`."""

    session: Bytes16
    live: tuple[Count, ...]


ToHolder = Keys | Decrypt | Finish | Drop
Ask = Enrol | Compute | Give | Step | Deal | Seal | Take | Fold | AddUp | Group | Keys | Decrypt | Finish | Drop


# --- answers ------------------------------------------------------------------------------------------------------------------------


class Enrolled(Message, frozen=True, tag="enrolled"):
    """A client's number and keys; the signature covers the session, the number and the encryption key. The key holder's number is 0.

    Other clients are shown all that. `proof` covers the challenge besides, and goes no further: by it who answers is who it says.
    """

    version: Count
    client: Count
    signing_key: Bytes32
    encryption_key: Bytes32
    signature: Bytes64
    proof: Bytes64
    role: Literal["client", "key-holder"] = "client"


class Described(Message, frozen=True):
    """The name, dtype and shape of a part that the client holds. Shapes are public."""

    name: Name
    dtype: Name
    shape: tuple[Count, ...]


class Computed(Message, frozen=True, tag="computed"):
    """Whether the client has a result (without one it takes no further part), and the parts that it now holds."""

    result: bool
    parts: tuple[Described, ...]


class Given(Message, frozen=True, tag="given"):
    """What a client releases; `samples` only where it was asked to weigh (else 0)."""

    values: tuple[Named, ...]
    samples: Count


class Stepped(Message, frozen=True, tag="stepped"):
    """The client's message of a secure sum, a dealing or the agreement (empty where it says nothing)."""

    said: bytes


class Sealed(Message, frozen=True, tag="sealed"):
    """One box for each recipient, in order."""

    boxes: tuple[bytes, ...]


class Released(Message, frozen=True, tag="released"):
    """What the key holder releases: labels and small integers, noised evidence, or noised blocks by pair."""

    result: tuple[Named, ...]
    evidence: tuple[Named, ...]
    blocks: tuple[tuple[Count, Count, Value], ...]


class Done(Message, frozen=True, tag="done"):
    """It is done; nothing leaves the client."""


class Refused(Message, frozen=True, tag="refused"):
    """An opaque word why not."""

    code: Name


Answer = Enrolled | Computed | Given | Stepped | Sealed | Released | Done | Refused


def encode(message: Message) -> bytes:
    """The one encoding of a message. Raises `InputError` for an array or a task that cannot be encoded."""
    return codec.encode(message)


def decode_ask(data: bytes) -> Ask:
    """A request. Raises `MalformedMessage`."""
    return codec.decode(data, Ask, LIMIT_BYTES)  # type: ignore[arg-type]


def decode_answer(data: bytes, limit: int = LIMIT_BYTES) -> Answer:
    """An answer of at most `limit` bytes. Raises `MalformedMessage`."""
    return codec.decode(data, Answer, limit)  # type: ignore[arg-type]


# --- arrays and sums ----------------------------------------------------------------------------------------------------------------


def _encoded(value: Any) -> Any:
    """An array as [dtype, shape, bytes], a task as its bytes. Raises `InputError` for what cannot be encoded."""
    if isinstance(value, Carried):
        return value.data
    array = np.ascontiguousarray(value)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.dtype.str not in DTYPES or array.ndim > MOST_AXES:
        raise InputError(f"an array of dtype {array.dtype} with {array.ndim} axes cannot be encoded")
    return [array.dtype.str, np.shape(value), array.data if array.size else b""]


def _decoded(kind: Any, said: Any) -> Any:
    """What `_encoded` made, arrays read-only. Raises `MalformedMessage` if dtype, shape and bytes do not fit each other."""
    if kind is Carried:
        return Carried(task_from_bytes(said))
    match said:
        case [str(name), [*shape], bytes(data)] if name in DTYPES and len(shape) <= MOST_AXES:
            dtype = np.dtype(name)
            if all(type(size) is int and 0 <= size <= 1 << 53 for size in shape) and prod(shape) * dtype.itemsize == len(data):
                return _shaped(np.frombuffer(data, dtype), tuple(shape))
    raise MalformedMessage


codec = Codec(_encoded, _decoded)


def to_one(value: Array | Shared, numbers: Mapping[Any, int]) -> Addends:
    """A value or sum as a message; `numbers` gives the number of each held value by its key."""
    if not isinstance(value, Shared):
        return Addends((np.asarray(value),), (), ())
    return Addends(
        () if value.clear is None else (value.clear,),
        tuple(
            BlindPart(term.transform, term.value, term.start, term.stop, term.shape, term.dimension or len(term.value))
            for term in value.blind
        ),
        tuple(OwnPart(numbers[term.held.key], term.held.part, term.factor) for term in value.own),
    )


def blind_terms(addends: Addends) -> tuple[Blind, ...]:
    """The blind parts of a sum. Raises `MalformedMessage` for parts that do not fit."""
    terms = []
    for part in addends.blind:
        value = part.value
        if value.ndim != 1 or not part.start <= part.stop <= part.dimension <= len(value) or len(part.shape) > MOST_AXES:
            raise MalformedMessage
        _shaped(value[part.start : part.stop], part.shape)
        terms.append(Blind(part.transform, value, part.start, part.stop, part.shape, part.dimension))
    return tuple(terms)


def _shaped(value: Array, shape: tuple[int, ...]) -> Array:
    """`value` in another shape. Raises `MalformedMessage` for one of another size, or that no array can have, such as (2⁵³, 2⁵³, 0)."""
    if prod(shape) != value.size:  # numpy's own product may overflow
        raise MalformedMessage
    try:
        return value.reshape(shape)
    except ValueError:
        raise MalformedMessage from None
