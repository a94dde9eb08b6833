"""What the server charges for private tasks (unit = "sample") before it asks any client.

Sums under unit = "client" are charged in `privacy.client_level`, by the protection that takes them. The clients' own ledgers are in
`client_ledger`.
"""

from collections.abc import Iterable, Sequence

from ..contract.calls import SumCall
from ..contract.handles import Held
from ..contract.operations import Then
from ..engine import Task
from ..errors import InputError
from ..privacy.receipts import PrivacyLedger, sources
from ..privacy.settings import SumNoise
from . import messages as m
from .parameters import TaskParameters

__all__ = ["ServerLedger"]


class ServerLedger:
    """Charges releases to `accounts` (None: nothing is charged). `without_form` lists operations that have no private form.

    `restored`: the run was resumed, so clients may remember results of an interrupted round that no receipt covers.
    """

    def __init__(self, accounts: PrivacyLedger | None, without_form: tuple[str, ...]) -> None:
        self._accounts, self._without_form = accounts, without_form
        self.restored = False

    def private(self, task: Task) -> tuple[Task, m.NoisySteps | None]:
        """The private form of a task, and the noise that clients need for it. Raises `InputError` for a task without one."""
        if self._accounts is None:
            return task, None
        private = self._accounts.private(task)
        if not self._accounts.harmless(private, self._accounts.noise.relation):
            raise InputError(f"compute: {type(task).__name__} has no noise here; clients that demand privacy refuse to compute it")
        return private, m.NoisySteps(**vars(self._accounts.noise))

    def with_noise(self, then: Then) -> Then:
        """What is run on a Gram, with the law of the noise in the vectors where it asks for it (`private`)."""
        make = getattr(then, "private", None)
        return then if self._accounts is None or make is None else make(self._accounts.noise)

    def begin(self, task: Task, given: TaskParameters, clients: Sequence[int], round: int) -> None:
        """Charge clients for a private task before they are asked to run it, because they show whether it gives a result."""
        if self._accounts is not None:
            self._accounts.begin(task, sources(given.values, given.which), self._remembered(task, clients), clients, round)

    def enter(self, held: Held, task: Task, given: TaskParameters) -> None:
        """Note what releasing the results of a task costs beside what was paid when it began."""
        if self._accounts is not None:
            self._accounts.enter(held, task, sources(given.values, given.which), self._remembered(task, held.clients))

    def settle(self, held: Held, clients: Sequence[int], operation: str, round: int) -> None:
        """Charge a release of single values. Raises `InputError` for an operation that has no private form."""
        if operation in self._without_form:
            raise InputError(
                f"{operation}: releases single clients' values, which have no private form under privacy.unit = 'client'; means have, and "
                "rows to be compared with privacy.local = ['gram']"
            )
        if self._accounts is not None and clients:
            self._accounts.settle(held, clients, operation, round)

    def inside(self, held: Held, how: str) -> SumNoise | None:
        """What clients have to add to `held` inside secure sums, if anything. Raises `InputError` where sums are taken in another way."""
        noise = None if self._accounts is None else self._accounts.inside(held)
        if noise is not None and how != "secagg":
            raise InputError(
                f"mean: {held.key.name} carries no noise of its own (privacy.noise = 'shared'); it leaves in secure sums only, not under "
                f"protection.sum = {how!r}"
            )
        return noise

    def settle_sums(
        self, held: Held, call: SumCall, choices: Held | None, small_clusters: str, round: int, noise: SumNoise | None
    ) -> None:  # fmt: skip
        """Charge a mean with `noise` on its sums; `choices` are the groups that clients keep private."""
        if self._accounts is not None:
            self._accounts.settle_sums(held, call, choices, small_clusters, round, noise)

    def public(self, held: Held) -> None:
        """`held` was released before."""
        if self._accounts is not None:
            self._accounts.public(held)

    def derive(self, held: Held, sources: Sequence[Held]) -> None:
        """`held` is a public function of `sources`."""
        if self._accounts is not None:
            self._accounts.derive(held, sources)

    def _remembered(self, task: Task, clients: Iterable[int]) -> list[tuple[int, str]]:
        """What clients remember of what a task reads. After a restart all of it counts as remembered."""
        reads = [(client, name) for client in clients for name in getattr(task, "reads", ())]
        return [one for one in reads if self.restored or (self._accounts is not None and self._accounts.remembers(*one))]
