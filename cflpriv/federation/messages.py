"""The messages between the server and its parties, as objects and as bytes: requests, answers, refusals.

Every request but `Enrol` is refused outside the session that it names. What messages carry (arrays, tasks, sums) is in `message_encoding`.
A decoder takes any bytes and gives a valid message or raises `MalformedMessage`.
"""

from typing import Literal

from ..contract.handles import PartLayout
from ..protocols.events import Relation
from . import message_encoding
from .message_encoding import *  # noqa: F403
from .message_encoding import (
    Addends,
    Bytes16,
    Bytes32,
    Bytes64,
    Carried,
    Count,
    FederationMessage,
    HeldValue,
    Name,
    NamedArray,
    OwnPart,
    Picks,
    SentParameters,
    Value,
    codec,
)  # fmt: skip

__all__ = [
    "Acknowledged", "AddUp", "Answer", "Bounded", "Boxed", "Committed", "Compute", "ComputeAndSum", "Computed", "ComputedAndSummed",
    "Contribute", "Deal", "Decrypt", "Deposits", "Described", "Drop", "Enrol", "Enrolled", "EpochKey", "Finish", "Fold", "Give",
    "Given", "Group", "Help", "Helped", "HolderRelease", "Keys", "LIMIT_BYTES", "NoiseShares", "NoisySteps", "Open", "PartyRequest",
    "Recipient", "Refused", "Seal", "SealedBoxes", "ShareKey", "Stepped", "SumStep", "Take", "ToHolder", "Unusable", "VERSION",
    "decode_answer", "decode_ask", "encode",
]  # fmt: skip
__all__ += message_encoding.__all__

VERSION = 16
LIMIT_BYTES = 1 << 31

# --- noise


class NoisySteps(FederationMessage, frozen=True):
    """The noise of a private task (`privacy.settings.Noise`). These settings are public; the client draws the noise."""

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
    shares: Count
    allocated: bool = False


class Bounded(FederationMessage, frozen=True):
    """A client's whole contribution is clipped to `clip_norm`. The noise has a standard deviation of `noise_multiplier` sensitivities.

    In sums the trusted server adds the noise. Where single clients' rows are compared, each client adds its own.
    """

    relation: Relation
    clip_norm: float
    noise_multiplier: float


class NoiseShares(FederationMessage, frozen=True):
    """Each client adds its share of the noise of a secure sum (`protocols.shared_noise.SharedNoise`) to its vector.

    The vector is clipped to `clip_norm` first; 0 where its samples were. `count`, if above 0, is the scale of one more coordinate, which
    says whether the vector was shorter than `clip_norm`.
    """

    deviation: float
    survivors: Count
    clip_norm: float
    count: float = 0.0


# --- to clients


class Enrol(FederationMessage, frozen=True, tag="enrol"):
    """Enrol into a session. `session` names this federation and never changes; `challenge` is fresh. `contract`: the canonical bytes of a
    session contract (`contract_record`), empty for a session without one. `answered`: a client that was at this place, and the latest
    round in which it answered under the contract; nobody if empty. `signed`: whether the client proves its keys. Where no roster pins them,
    the proof serves the server alone, by which it knows clients again; one whose clients are in its own process needs none."""

    version: Count
    session: Bytes16
    challenge: Bytes16
    contract: bytes = b""
    answered: tuple[tuple[Count, int], ...] = ()
    signed: bool = True


class Compute(FederationMessage, frozen=True, tag="compute"):
    """Run `task`, with `noise` in its private form, and keep its parts as number `held`.

    The client drops the values that it held so far, except the numbers in `live`.
    """

    session: Bytes16
    round: int
    seed: int
    held: Count
    live: tuple[Count, ...]
    task: Carried
    params: SentParameters
    which: Picks | HeldValue | None
    noise: NoisySteps | None = None


class EpochKey(FederationMessage, frozen=True):
    """An epoch of encrypted vectors: its number, the digest of its terms, and the announcement of the key holder's key, or of all
    holders' keys.
    """

    number: Count
    setup: Bytes32
    announcement: bytes


class Give(FederationMessage, frozen=True, tag="give"):
    """Release parts of `held` for an operation ("gram" takes one part), under the client's own protection.

    `transform` is the purpose of the shared transform ("gram/EPOCH", "sum/…"), empty in the clear. `weigh` asks for the sample count of a
    sum. `noise` bounds a whole client's contribution. `epoch` has the key for encrypted vectors.
    """

    session: Bytes16
    operation: Literal["gram", "gather", "sum"]
    held: Count
    parts: tuple[Name, ...]
    transform: Name
    weigh: bool
    noise: Bounded | None = None
    epoch: EpochKey | None = None


class SumStep(FederationMessage, frozen=True, tag="step"):
    """One message of a secure sum over parts of `held`; `message` is one of `cflpriv.protocols.secagg`, encoded.

    `models`: how many models the algorithm declares in public.
    `groups`: the client's groups in an oblivious sum ("counts", then "blocks"). `noise`: the share of noise that the client adds.
    """

    session: Bytes16
    slot: tuple[Count, Count]
    held: Count
    parts: tuple[Name, ...]
    models: Count
    kind: Literal["sum", "counts", "blocks"]
    groups: HeldValue | Picks | None
    message: bytes
    noise: NoiseShares | None = None


class ComputeAndSum(FederationMessage, frozen=True, tag="compute and sum"):
    """A computation, and the only message of the sum over its result. The client answers as if it had got one after the other."""

    compute: Compute
    step: SumStep

    @property
    def session(self) -> bytes:
        """That of the computation; the sum's is checked with it."""
        return self.compute.session


class Committed(FederationMessage, frozen=True):
    """A client's commitment to its nonce in a dealing."""

    client: Count
    commitment: Bytes32


class Deal(FederationMessage, frozen=True, tag="deal"):
    """One message of a dealing into buckets. An empty list asks for a commitment, a list for the nonce, a list with `nonces` ends it.

    `slot`: the slot of the buckets' sums, and the attempt.
    """

    session: Bytes16
    slot: tuple[Count, Count, Count]
    listed: tuple[Committed, ...]
    nonces: tuple[Bytes32, ...]


class Recipient(FederationMessage, frozen=True):
    """A client and its encryption key, with its signature."""

    client: Count
    encryption_key: Bytes32
    signature: Bytes64


class Seal(FederationMessage, frozen=True, tag="seal"):
    """Seal parts of `held` for each recipient, who will hold them as number `arrives`."""

    session: Bytes16
    held: Count
    parts: tuple[Name, ...]
    arrives: Count
    recipients: tuple[Recipient, ...]


class Boxed(FederationMessage, frozen=True):
    """A sealed box and who sent it."""

    sender: Recipient
    box: bytes


class Take(FederationMessage, frozen=True, tag="take"):
    """Open the boxes of other clients and keep the values as number `held`."""

    session: Bytes16
    held: Count
    parts: tuple[Name, ...]
    boxes: tuple[Boxed, ...]


class Fold(FederationMessage, frozen=True, tag="fold"):
    """Open a sum, multiply it by `times` (none or one), and send the result back under a fresh transform."""

    session: Bytes16
    transform: Name
    value: Addends
    times: tuple[Addends, ...]


class AddUp(FederationMessage, frozen=True, tag="add-up"):
    """Add up own parts and keep the total as number `held`, part "own"."""

    session: Bytes16
    held: Count
    addends: tuple[OwnPart, ...]


class Group(FederationMessage, frozen=True, tag="group"):
    """One message of the agreement on the clients' secret; `message` is one of `cflpriv.protocols.group`, encoded."""

    session: Bytes16
    message: bytes


# --- to the key holder


class Keys(FederationMessage, frozen=True, tag="keys"):
    """Make keys for a clustering epoch over clients' rows (p, dimension), and drop those of epochs other than `live`.

    `setup`: the digest of the server's terms; the key holder computes its own. `server`: the public key that will sign requests.
    """

    session: Bytes16
    epoch: Count
    p: Count
    dimension: Count
    setup: Bytes32
    server: Bytes32
    live: tuple[Count, ...]


class Decrypt(FederationMessage, frozen=True, tag="decrypt"):
    """Enrolments and requests of `cflpriv.protocols.ckks` for one step of an epoch. `first` starts the step, or restarts it."""

    session: Bytes16
    epoch: Count
    step: Count
    first: bool
    enrolments: tuple[bytes, ...]
    requests: tuple[bytes, ...]


class Finish(FederationMessage, frozen=True, tag="finish"):
    """End a step that added `clients`: run `then` and release what the settings allow. The same request again gets the same answer."""

    session: Bytes16
    epoch: Count
    step: Count
    clients: tuple[Count, ...]
    then: bytes


class Drop(FederationMessage, frozen=True, tag="drop"):
    """Drop the keys of all epochs but `live`."""

    session: Bytes16
    live: tuple[Count, ...]


# --- to the holders of shares


class ShareKey(FederationMessage, frozen=True, tag="share-key"):
    """Announce a key for a clustering epoch over clients' rows (p, dimension), and drop epochs other than `live`.

    `terms`: the digest of the server's terms; the holder computes its own.
    """

    session: Bytes16
    epoch: Count
    p: Count
    dimension: Count
    terms: Bytes32
    live: tuple[Count, ...]


class Deposits(FederationMessage, frozen=True, tag="deposits"):
    """Deliveries of `cflpriv.protocols.shared_gram` under the announced `keys` of all holders of an epoch."""

    session: Bytes16
    epoch: Count
    keys: bytes
    deliveries: tuple[bytes, ...]


class Contribute(FederationMessage, frozen=True, tag="contribute"):
    """Contribute to the inner products of all `clients` with the last `new` of them. `contributors` are numbers of holders."""

    session: Bytes16
    epoch: Count
    clients: tuple[Count, ...]
    new: Count
    contributors: tuple[Count, ...]


class Open(FederationMessage, frozen=True, tag="open"):
    """End a step that added `clients`: open their inner products and run `then`. The same step again gets the same answer."""

    session: Bytes16
    epoch: Count
    step: Count
    clients: tuple[Count, ...]
    then: bytes
    contributors: tuple[Count, ...]
    contributions: tuple[bytes, ...]


# --- to the helpers of sums in one message


class Help(FederationMessage, frozen=True, tag="help"):
    """Messages of `cflpriv.protocols.one_message`, one of each sum; none asks for the helper's key of a round."""

    session: Bytes16
    round: Count
    messages: tuple[bytes, ...]


ToHolder = Keys | Decrypt | Finish | Drop | ShareKey | Deposits | Contribute | Open | Help
PartyRequest = (
    Enrol | Compute | Give | SumStep | ComputeAndSum | Deal | Seal | Take | Fold | AddUp | Group | Keys | Decrypt | Finish | Drop
    | ShareKey | Deposits | Contribute | Open | Help
)  # fmt: skip


# --- answers


class Enrolled(FederationMessage, frozen=True, tag="enrolled"):
    """A client's number and keys. The signature covers the session, the number and the encryption key. The key holder's number is 0.

    The server shows all this to other clients, but not `proof`: it covers the challenge, too, and authenticates the sender. Without
    signatures (`Enrol.signed`) they and the signing key are zeros.
    """

    version: Count
    client: Count
    signing_key: Bytes32
    encryption_key: Bytes32
    signature: Bytes64
    proof: Bytes64
    role: Literal["client", "key-holder"] = "client"


class Described(FederationMessage, frozen=True):
    """Name, dtype and shape of a part that the client holds. Shapes are public."""

    name: Name
    dtype: Name
    shape: tuple[Count, ...]


class Computed(FederationMessage, frozen=True, tag="computed"):
    """Whether the client has a result (without one it drops out), and the parts that it now holds."""

    result: bool
    parts: tuple[Described, ...]

    @property
    def layout(self) -> PartLayout:
        return PartLayout(tuple((part.name, part.dtype, part.shape) for part in self.parts))


class Given(FederationMessage, frozen=True, tag="given"):
    """The values that a client releases. `samples`: its sample count if the request says `weigh`, else 0."""

    values: tuple[NamedArray, ...]
    samples: Count


class Stepped(FederationMessage, frozen=True, tag="stepped"):
    """The client's message of a secure sum, a dealing or the agreement; empty if there is none. The key holder's announcement."""

    message: bytes


class SealedBoxes(FederationMessage, frozen=True, tag="sealed"):
    """One box for each recipient, in order."""

    boxes: tuple[bytes, ...]


class HolderRelease(FederationMessage, frozen=True, tag="released"):
    """What the key holder releases: labels and small integers, noisy evidence, or noisy blocks by pair."""

    result: tuple[NamedArray, ...]
    evidence: tuple[NamedArray, ...]
    blocks: tuple[tuple[Count, Count, Value], ...]


class Unusable(FederationMessage, frozen=True, tag="unusable"):
    """A holder of shares cannot use what these clients deposited. The deposits of others are kept."""

    clients: tuple[Count, ...]


class Acknowledged(FederationMessage, frozen=True, tag="done"):
    """The request was carried out; nothing leaves the client."""


class Refused(FederationMessage, frozen=True, tag="refused"):
    """A refusal: an opaque error code, see `error_codes`."""

    code: Name


class ComputedAndSummed(FederationMessage, frozen=True, tag="computed and summed"):
    """Both answers. A refusal of the sum is none of the computation."""

    computed: Computed
    stepped: Stepped | Refused


class Helped(FederationMessage, frozen=True, tag="helped"):
    """A helper's answers, in order: a refusal of one sum's message is none of the others'."""

    answers: tuple[Stepped | Refused, ...]


Answer = (
    Enrolled | Computed | Given | Stepped | ComputedAndSummed | SealedBoxes | HolderRelease | Unusable | Acknowledged | Refused | Helped
)


# --- as bytes


def encode(message: FederationMessage) -> bytes:
    """The canonical encoding of a message. Raises `InputError` for an array or a task that cannot be encoded."""
    return codec.encode(message)


def decode_ask(data: bytes) -> PartyRequest:
    """A request. Raises `MalformedMessage`."""
    return codec.decode(data, PartyRequest, LIMIT_BYTES)  # type: ignore[arg-type]


def decode_answer(data: bytes, limit: int = LIMIT_BYTES) -> Answer:
    """An answer of at most `limit` bytes. Raises `MalformedMessage`."""
    return codec.decode(data, Answer, limit)  # type: ignore[arg-type]
