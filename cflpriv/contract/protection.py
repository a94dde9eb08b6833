"""The section `[protection]` as data: which protections stand between clients and the server.

Implementations are registered in `PROTECTIONS`; the package's own are in `cflpriv.aggregation`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import comb
from typing import Annotated, Any, Literal

from ..errors import InputError, near
from ..keys import Key, check_ranges, readable
from ..plugins import Registry
from ..protocols.shared_noise import helper_shares

SKETCH_SMALLEST = 8
MOST_HOLDERS = 16
MOST_SEEDS = 256
"""Of one client in a sum with helpers: one for each set of helpers that may collude."""
FEWEST_BUCKETS = 3
"""With two buckets a rule cannot decide which is bad."""

__all__ = ["PROTECTIONS", "ROBUST", "Protection", "ProtectionSpec", "SecureSum", "listed", "register_protection"]

SmallClusters = Literal["wait", "local", "merge"]


@dataclass(frozen=True)
class ProtectionSpec:
    """A protection of clients' values against the server, for sums ("sum") or for comparisons ("gram").

    `reveals`: one line for `cflpriv list`. `server` makes its server half of `federation.protections.ServerParts`, `client` its client half
    of `ClientParts`; both are called on first use. `hides`: single values do not leave clients readable. `transformed`: it
    needs the secret that clients share. `secure`: sums bind to what their members were sent, and no single value leaves. `oblivious`: who
    is in which group stays with the clients. `encrypted`: it needs a key holder; `shared`: or several holders, each with a share.
    `helped`: it needs helpers. `robust`: its sums may be over buckets (`ServerParts` with `protection.robust` make a half that deals them).
    """

    of: Literal["sum", "gram"]
    name: str
    reveals: str
    server: Callable[[Any], Any]
    client: Callable[[Any], Any]
    hides: bool = True
    transformed: bool = False
    secure: bool = False
    oblivious: bool = False
    encrypted: bool = False
    shared: bool = False
    helped: bool = False
    robust: bool = False


def register_protection(spec: ProtectionSpec) -> None:
    """Register a protection under its name in `[protection] sum` or `gram`. Raises `InputError` if the name is that of another."""
    PROTECTIONS.add(f"{spec.of}.{spec.name}", spec)


PROTECTIONS: Registry[ProtectionSpec] = Registry(
    "protection", lambda spec: spec.server, lambda name, spec: register_protection(spec), home=".aggregation"
)
"""The registered protections, by "sum.NAME" and "gram.NAME", as in entry points of the group `cflpriv.protections`."""


def listed(of: Literal["sum", "gram"]) -> dict[str, str]:
    """The names that `[protection]` takes for sums or comparisons, and what each reveals."""
    specs = (spec for spec in PROTECTIONS.ready().values() if spec.of == of)
    return {spec.name: spec.reveals for spec in specs} | ({"sketch": SKETCH} if of == "gram" else {})


ROBUST = {
    "none": "the server combines nothing: a group has one mean",
    "trimmed_mean": "means of random buckets, coordinate by coordinate without the extremes: the server sees the mean of each bucket",
    "geometric_median": "the point nearest to the means of random buckets in all: the server sees the mean of each bucket",
    "centred_clipping": "means of random buckets, clipped around their centre: the server sees the mean of each bucket",
}
"""What `[protection] robust` takes, and what each reveals."""
SKETCH = "a first stage for long vectors: a public random sketch of `sketch_dim` numbers; protects nothing by itself"


@dataclass(frozen=True)
class SecureSum:
    """Settings of secure sums: the `secagg_*` keys of `[protection]` and `max_weight`."""

    mode: Literal["active", "passive"]
    bits: Literal[16, 32]
    clip: float
    max_weight: float


@readable
@dataclass(frozen=True)
class Protection:
    """The section `[protection]`; field names are its keys. Single values that an algorithm gathers are released as they are.

    `min_cohort` holds for every sum. Under a robust rule a group is dealt into random buckets of at least that size, and the rule combines
    their means; a group of fewer than three buckets gets no sum, so it counts as small.
    """

    gram: Annotated[
        tuple[str, ...],
        Key("How signatures and other compared vectors reach the server, in order; empty: in the clear.", known=lambda: listed("gram")),
    ] = ()
    sum: Annotated[str, Key("How updates are averaged.", known=lambda: listed("sum"))] = "none"
    min_cohort: Annotated[
        int, Key("No sum is formed over fewer clients; 0: 3 under secure aggregation, where 2 is the least, else 1.", "[0, inf)", "clients")
    ] = 0
    cohort_change: Annotated[
        Literal["any", "min_cohort"],
        Key(
            "Under secure aggregation, how the clients of a client's next sum may differ from those of its last: in any way (`any`), or by "
            "`min_cohort` clients at least that leave or come, or none (`min_cohort`)."
        ),
    ] = "any"
    small_clusters: Annotated[
        SmallClusters,
        Key(
            "What happens to a group below the minimum: its model waits (`wait`), its members train alone (`local`), or clusters join "
            "the nearest while clustering and after moves (`merge`)."
        ),
    ] = "wait"
    robust: Annotated[
        Literal["none", "trimmed_mean", "geometric_median", "centred_clipping"],
        Key("A rule that limits the influence of a few bad clients, over the means of random buckets; `none`: the mean."),
    ] = "none"
    buckets: Annotated[
        int,
        Key("Buckets under a robust rule; 0: as many as the minimum cohort size allows.", f"0 or [{FEWEST_BUCKETS}, inf)", "buckets"),
    ] = 0
    sketch_dim: Annotated[
        int, Key("Length to which the stage `sketch` of `gram` brings longer vectors.", f"[{SKETCH_SMALLEST}, inf)", "numbers")
    ] = 4096
    transform: Annotated[
        Literal["per_round", "fixed"],
        Key('`sum = "haar"` and other transforms: a fresh one for each sum, or one for all (CFL\'s Algorithm 5 as printed).'),
    ] = "per_round"
    relay_updates: Annotated[
        bool,
        Key(
            "Under secure aggregation, let clients seal updates for other clients (pFedLIA, FedFomo). These see each other's, and so does "
            "a server that lies and has an accomplice among them."
        ),
    ] = False
    secagg_mode: Annotated[
        Literal["active", "passive"],
        Key("The assumed server: it may deviate (`active`: signatures against a client registry, complete graph) or is curious only."),
    ] = "active"
    secagg_bits: Annotated[Literal[16, 32], Key("The modulus of secure sums is two to this power.", unit="bits")] = 32
    secagg_clip: Annotated[float, Key("Values beyond ± this are clipped before a secure sum, and reported.", "(0, inf)")] = 1.0
    max_weight: Annotated[
        float,
        Key(
            'Public maximum of a client\'s weight, for `weights = "examples"` under secure aggregation; 0: all weigh equally. Clients with '
            "few samples count as more, where else a sum could be in effect over fewer than `min_cohort` clients. Where no more than "
            "`min_cohort` clients may be left, as in small blocks of oblivious sums, all weigh equally.",
            "[0, inf)",
        ),
    ] = 0.0
    ckks_release: Annotated[
        Literal["gram", "distances", "labels"],
        Key(
            "What the server learns of encrypted similarities: the result of clustering, also distances, or the Gram matrix (both noised)."
        ),
    ] = "labels"
    ckks_ring: Annotated[int, Key("Degree of the CKKS ring; 0: the smallest that serves.", "0 or 4096 or 8192")] = 0
    ckks_bound: Annotated[float, Key("Public bound on the norm of a compared vector.", "[2^-20, 2^20]")] = 1.0
    ckks_group: Annotated[
        int,
        Key("Pairs that share an output: more takes more upload and less of all else; 0: as many as fit.", "[0, inf)", "pairs"),
    ] = 0
    ckks_workers: Annotated[int, Key("Processes for encrypted products; 0: one per core where that pays.", "[0, inf)", "processes")] = 0
    landmarks: Annotated[int, Key("Under `ckks`, compare clients with so many of them only; 0: all pairs.", "[0, inf)", "clients")] = 0
    most_epochs: Annotated[
        int,
        Key(
            "Under `ckks` and `shares`, clustering epochs that a client lets its vectors into, over all sessions. A run opens one each "
            "time that it compares clients anew: PACFL and crossfit once, CFL before each split.",
            "[1, inf)",
            "epochs",
        ),
    ] = 100
    share_holders: Annotated[
        int,
        Key(
            "Under `shares`, parties that hold a share of each compared vector; the first on the roster leads.",
            f"[3, {MOST_HOLDERS}]",
            "holders",
        ),
    ] = 3
    share_colluding: Annotated[
        int,
        Key("Of so many of them together, and the server, none learns a vector; twice as many and one must answer.", "[1, 7]", "holders"),
    ] = 1
    share_bound: Annotated[
        float,
        Key(
            "Public bound on the norm of a vector that is compared under `shares`, which is rounded to multiples of 2^-29 of it. The "
            "default has room for updates and gradients, which are not of unit norm.",
            "[2^-20, 2^20]",
        ),
    ] = 64.0

    helpers: Annotated[
        int,
        Key(
            "Under `one_message`, parties that unmask sums and add the noise of `[privacy]`; with four of them one may fail, and one that "
            "sends false masks is named.",
            f"[2, {MOST_HOLDERS}]",
            "helpers",
        ),
    ] = 4
    helpers_colluding: Annotated[
        int,
        Key("So many of the helpers, with the server and any clients, read no single update.", "[1, 7]", "helpers"),
    ] = 1

    def __post_init__(self) -> None:
        check_ranges(type(self), vars(self), "protection")
        given: object = self.gram
        if isinstance(given, str):
            raise InputError(f"protection.gram = {given!r}: expected several names, such as ({given!r},)")
        for stage in self.gram:
            _known("gram", stage)
        if "sketch" in self.gram[1:]:
            raise InputError(f"protection.gram: {list(self.gram)}: the sketch comes first, once")
        if len(self.gram) - self.gram.count("sketch") > 1:
            raise InputError(f"protection.gram: {list(self.gram)} names more than one transform; give one, perhaps after 'sketch'")
        _known("sum", self.sum)
        if self.secure and 0 < self.min_cohort < 2:
            raise InputError(
                f"protection.min_cohort: {self.min_cohort} under sum = {self.sum!r}: a sum over one client is its value; "
                "2 at least, 3 is the default"
            )
        self._check_robust()
        self._check_helpers()
        if self.share_holders < 2 * self.share_colluding + 1:
            raise InputError(
                f"protection.share_holders: {self.share_holders} with share_colluding = {self.share_colluding}: it takes "
                f"{2 * self.share_colluding + 1} holders at least (2 × share_colluding + 1)"
            )
        if self.landmarks and "ckks" not in self.gram:
            raise InputError(f"protection.landmarks: {self.landmarks} spares encrypted products; it goes with gram = ['ckks']")

    def _check_helpers(self) -> None:
        if comb(self.helpers, self.helpers_colluding) > MOST_SEEDS or self.helpers_colluding >= self.helpers:
            raise InputError(
                f"protection.helpers: {self.helpers} with helpers_colluding = {self.helpers_colluding}: a client deals a seed for each set "
                f"of so many helpers, at most {MOST_SEEDS}; use fewer that may collude than there are, or fewer helpers"
            )
        if not self.sums.helped:
            return
        if self.secagg_mode == "passive":
            raise InputError(
                f"protection.secagg_mode: 'passive' under sum = {self.sum!r}: helpers do not trust the server; leave it out, or use "
                "sum = 'secagg'"
            )
        if self.comparison.encrypted:
            raise InputError(
                f"protection.gram: {list(self.gram)} under sum = {self.sum!r}: the clients' roster names helpers of sums or holders of "
                "compared vectors, not both; use a transform such as 'haar', or sum = 'secagg'"
            )

    def _check_robust(self) -> None:
        if self.robust == "none":
            return
        if not self.sums.robust:
            fit = " or ".join(repr(name) for name in listed("sum") if PROTECTIONS[f"sum.{name}"].robust)
            raise InputError(f"protection.robust: {self.robust!r} under sum = {self.sum!r}: the server must see buckets' means; use {fit}")
        if self.max_weight:
            raise InputError(
                f"protection.max_weight: {self.max_weight:g} with robust = {self.robust!r}: a private weight is not verified, and "
                "with a large one it would own its bucket; leave it out, and weigh equally"
            )

    @property
    def sums(self) -> ProtectionSpec:
        """How updates are averaged."""
        return PROTECTIONS[f"sum.{self.sum}"]

    @property
    def comparison(self) -> ProtectionSpec:
        """How compared vectors reach the server, after a sketch if there is one."""
        return PROTECTIONS[f"gram.{next((stage for stage in self.gram if stage != 'sketch'), 'none')}"]

    @property
    def secure(self) -> bool:
        """Whether sums go through secure aggregation."""
        return self.sums.secure

    @property
    def transformed(self) -> bool:
        """Whether clients share a secret transform, for what is compared or for updates."""
        return self.sums.transformed or self.comparison.transformed

    @property
    def encrypted(self) -> bool:
        """Whether comparisons need a key holder, or several holders."""
        return self.comparison.encrypted

    @property
    def holders(self) -> int:
        """How many holders the roster names."""
        if self.sums.helped:
            return self.helpers
        return 0 if not self.encrypted else self.share_holders if self.comparison.shared else 1

    @property
    def fewest_holders(self) -> int:
        """How many of them a sum needs, or a comparison, the first among them."""
        if self.sums.helped:
            return (self.helpers + self.helpers_colluding) // 2 + 1
        return 2 * self.share_colluding + 1 if self.comparison.shared else self.holders

    @property
    def sketched(self) -> int | None:
        """To how many numbers longer vectors are sketched first, if they are."""
        return self.sketch_dim if "sketch" in self.gram else None

    @property
    def idle(self) -> tuple[str, ...]:
        """Keys that were set but have no effect here, because their feature is off."""
        on = {
            "secagg_": self.secure, "helper": self.sums.helped, "max_weight": self.secure, "ckks_": "ckks" in self.gram, "sketch_dim":
            "sketch" in self.gram, "transform": self.sums.transformed, "buckets": self.robust != "none",
            "relay_updates": self.secure, "cohort_change": self.secure, "share_": "shares" in self.gram, "most_epochs": self.encrypted,
        }  # fmt: skip
        changed = [attribute.name for attribute in fields(self) if getattr(self, attribute.name) != attribute.default]
        return tuple(name for name in changed if any(name.startswith(what) and not used for what, used in on.items()))

    @property
    def smallest_sum(self) -> int:
        """The minimum cohort size in force."""
        return self.min_cohort or (3 if self.secure else 1)

    @property
    def noise_shares(self) -> int:
        """Of how many shares the noise inside a secure sum is made: others' in the smallest sum, or so fine that helpers' noise is all of
        it. 0: sums have none."""
        if self.sums.helped:
            return helper_shares(self.secagg_bits)
        return self.smallest_sum - 1 if self.secure else 0

    @property
    def helper_sets(self) -> int:
        """How many sets of helpers may collude: each adds noise to a sum once. 0 without helpers."""
        return comb(self.helpers, self.helpers_colluding) if self.sums.helped else 0

    @property
    def smallest_group(self) -> int:
        """The fewest clients of a group that gets a mean: a cohort, or under a robust rule three of them."""
        return self.smallest_sum * (1 if self.robust == "none" else FEWEST_BUCKETS)

    @property
    def secure_sum(self) -> SecureSum:
        """The settings of secure aggregation."""
        return SecureSum(self.secagg_mode, self.secagg_bits, self.secagg_clip, self.max_weight)

    @property
    def name(self) -> str:
        """A short name for tables: "none", "haar", or "gram=…, sum=…"."""
        gram, robust = "+".join(self.gram) or "none", self.robust
        if gram == self.sum and robust == "none":
            return gram
        return ", ".join(f"{key}={value}" for key, value in (("gram", gram), ("sum", self.sum), ("robust", robust)) if value != "none")


def _known(of: Literal["sum", "gram"], name: str) -> None:
    if not (of == "gram" and name == "sketch") and PROTECTIONS.find(f"{of}.{name}") is None:
        raise InputError(f"protection.{of}: {name!r} is not known{near(name, list(listed(of)))}")
