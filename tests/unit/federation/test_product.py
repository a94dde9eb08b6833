"""Every algorithm under every protection over both transports: the same models, clusterings and transcript.

The lists are those of the registries, so what is registered anew is in the product by itself. What is refused follows from what algorithms
and protections declare.
"""

import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import isinf
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from fake_carrier import FakeCarrier
from ray_nodes import ray_nodes
from scenes import population

from cflpriv.algorithms import ALGORITHMS
from cflpriv.algorithms.fednova import STEPS_UNIT
from cflpriv.algorithms.interface import Algorithm
from cflpriv.contract.protection import PROTECTIONS, Protection, ProtectionSpec
from cflpriv.errors import InputError
from cflpriv.experiments import parse_config
from cflpriv.experiments.config.config import Config, own_weights
from cflpriv.experiments.run.run import prepare
from cflpriv.federation.client import FederationClient
from cflpriv.protocols.secagg.vectors import largest_levels
from cflpriv.transports.hosts import Carrier, SplitHosts
from cflpriv.transports.ray import ray_hosts
from cflpriv.transports.simulation import Hosted
from cflpriv.types import Array, Clustering

SCENE = population(groups=2, clients_per_group=3, samples=12, test_samples=2, shape=(4,), separation=4.0)
"""Five clients from the start, and a newcomer."""
ROUNDS = 2
CLIP = 8.0
FLOOR = 2
BOUND = 64.0
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "cfl": {"watch": True}, "pfedlia": {"warm_up": 1}, "ifca": {"k": 2}, "hypcluster": {"k": 2},
    "private_clusters": {"k": 1}, "fedsoft": {"smoother": 0.3},
}  # fmt: skip
"""What makes an algorithm use all its operations within these rounds, where it would not by default; IFCA under sums that keep groups
private has to be given k. Private clusters are found in more rounds than these, see `test_private_clusters`. Secure sums over five clients
need a large σ of FedSoft.
"""
STEPS = {"fednova": STEPS_UNIT, "rr_cluster": 64.0, "pina": 64.0, "fedsoft": 64.0}
"""By how many steps of the fixed point a model may be off, if not one a round: FedNova's numbers of local steps travel in such units, and
sums of blocks are divided by counts of the same sum.
"""


def registered(of: str) -> list[ProtectionSpec]:
    return [spec for spec in PROTECTIONS.ready().values() if spec.of == of]


def modes(key: str) -> tuple[str, ...]:
    return get_args(get_type_hints(Protection)[key])


def sums() -> list[Mapping[str, Any]]:
    """`[protection]` of each kind of sum, in each mode that it has."""
    found: list[Mapping[str, Any]] = []
    for spec in registered("sum"):
        more = {"secagg_clip": CLIP, "min_cohort": FLOOR, "relay_updates": True}
        able = ("active",) if spec.helped else modes("secagg_mode")
        found += [{"sum": spec.name, "secagg_mode": mode, **more} for mode in able] if spec.secure else [{"sum": spec.name}]
    return found


def grams() -> list[Mapping[str, Any]]:
    """`[protection]` of each kind of comparison."""
    bounds = {"ckks_bound": BOUND, "share_bound": BOUND}
    return [{"gram": [spec.name], **(bounds if spec.encrypted or spec.shared else {})} for spec in registered("gram")]


def config_of(name: str, protection: Mapping[str, Any], **run: Any) -> Config:
    return parse_config(
        {
            "model": {"name": "mlp", "hidden": 8, "dtype": "float64"},
            "training": {"rounds": ROUNDS, "batch_size": 6, "weights": "equal", "lr": 0.05},
            "algorithm": {"name": name, **SETTINGS.get(name, {})},
            "protection": protection,
            "run": {"insecure_test_entropy": True, **run},
        }
    )


@cache
def algorithm_of(name: str) -> Algorithm:
    return config_of(name, {}, release_policy="off").algorithm_for(SCENE)


def protection_of(options: Mapping[str, Any]) -> Protection:
    """The protection of a cell, without the whole configuration."""
    return Protection(**{**options, "gram": tuple(options.get("gram", ("none",)))})


def compares(name: str) -> bool:
    return "gram" in algorithm_of(name).operations


def two_kinds_of_holders(of_sum: Mapping[str, Any], of_gram: Mapping[str, Any]) -> bool:
    """Whether the roster would have to name both helpers of sums and holders of what is compared, which configurations refuse."""
    return PROTECTIONS[f"sum.{of_sum['sum']}"].helped and PROTECTIONS[f"gram.{of_gram['gram'][0]}"].encrypted


def ruled_out(name: str, protection: Protection) -> bool:
    """Whether declarations rule it out: public groups where sums keep groups private; several groupings in a round where they are secure
    and do not; means that a server computes with, where they are transformed; vectors of a model in the clear, sums hidden; values in
    blocks of clients' own choice, where sums are secure.
    """
    shown = compares(name) and not protection.comparison.hides and not ALGORITHMS[name].compared({}).of_samples
    unread = protection.sums.transformed and algorithm_of(name).reads_means
    regrouped = protection.secure and not protection.sums.oblivious and bool(algorithm_of(name).regroups)
    alone = protection.secure and isinf(algorithm_of(name).spread)
    public = protection.sums.oblivious and algorithm_of(name).public_groups
    return public or unread or regrouped or alone or (shown and protection.sums.hides)


def often(of_sum: str, gram: str) -> bool:
    """Whether a pair is in the default suite: each sum once, with the comparison of its name or else a transform; each comparison."""
    sums_, grams_ = ({spec.name: spec for spec in registered(of)} for of in ("sum", "gram"))
    transform = next(spec.name for spec in grams_.values() if spec.transformed)
    without_sum = gram not in sums_ and of_sum == "none" and not grams_[gram].encrypted
    return without_sum or gram == (of_sum if of_sum in grams_ else transform)


@cache
def cells() -> list[Any]:
    """All that nothing rules out; where clients are compared, most pairs of protections are slow."""
    found = []
    for name, of_sum in product(ALGORITHMS.ready(), sums()):
        for of_gram in grams() if compares(name) else [{"gram": ["none"]}]:
            options = {**of_sum, **of_gram}
            if two_kinds_of_holders(of_sum, of_gram):
                continue
            protection = protection_of(options)
            if not ruled_out(name, protection):
                usual = not compares(name) or (often(protection.sum, *protection.gram) and not protection.sums.helped)
                marks = () if usual else pytest.mark.slow
                mode = f"-{protection.secagg_mode}" if protection.secure else ""
                found.append(pytest.param(name, options, id=f"{name}-{protection.name}{mode}", marks=marks))
    return found


@dataclass(frozen=True)
class Played:
    """What became of a run: what each client would use, opened, who is with whom, and what was said."""

    models: tuple[Array, ...]
    clusterings: tuple[Clustering | None, ...]
    messages: tuple[dict[str, Any], ...]


def play(config: Config, hosted: Hosted | None = None) -> Played:
    """The beginning, the rounds, and a newcomer where the algorithm takes one. `hosted`: where the clients are, if not in this process."""
    newcomers = int(algorithm_of(config.algorithm["name"]).admit is not None)
    simulation = prepare(config.with_("data", newcomers=newcomers), population=SCENE, hosted=hosted)
    algorithm, fed, clusterings = simulation.algorithm, simulation.federation, []
    state = algorithm.init(fed)
    for number in range(ROUNDS):
        fed.begin_round(number)
        state, _ = algorithm.round(fed, state)
        clusterings.append(algorithm.describe(state).get("clustering"))
    if algorithm.admit is not None:
        simulation.simulated.join(simulation.newcomers)
        state, _ = algorithm.admit(fed, state, simulation.newcomers)
        clusterings.append(algorithm.describe(state).get("clustering"))
    served = algorithm.serve(state)
    given = simulation.simulated.resolve(served.task, served.params, served.which, fed.clients)
    arrays = tuple(np.asarray(array) for one in given for array in (*one.params.values(), *one.memory.values()))
    fed.end()
    return Played(arrays, tuple(clusterings), tuple(vars(message) for message in fed.transcript.messages))


@cache
def unprotected(name: str, smallest: int) -> Played:
    return play(config_of(name, {"min_cohort": smallest}, release_policy="off"))


@pytest.mark.filterwarnings("ignore:algorithm 'fedgwc' will form no clusters")
@pytest.mark.parametrize(("name", "options"), cells())
def test_protections_and_transports_change_nothing(name: str, options: Mapping[str, Any]) -> None:
    config = config_of(name, options)
    memory, carried = (play(config.with_("run", transport=transport)) for transport in ("memory", "bytes"))
    # SEAL encrypts with randomness of its own, and compresses what comes of it
    drawn = ("digest", "bytes_each", "total_bytes") if config.protection.encrypted else ("digest",) if config.protection.sums.helped else ()
    said = [[{key: value for key, value in one.items() if key not in drawn} for one in run.messages] for run in (memory, carried)]
    assert said[0] == said[1]
    assert [one["total_bytes"] for one in carried.messages] == pytest.approx([one["total_bytes"] for one in memory.messages], rel=0.01)
    assert carried.clusterings == memory.clusterings
    for one, other in zip(carried.models, memory.models, strict=True):
        np.testing.assert_array_equal(one, other)

    plain, protection = unprotected(name, config.protection.smallest_sum), config.protection
    step = CLIP / largest_levels(len(SCENE.clients), protection.secagg_bits)
    if not protection.sums.oblivious:
        assert memory.clusterings == plain.clusterings
    for one, other in zip(memory.models, plain.models, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=STEPS.get(name, ROUNDS) * step if protection.secure else 1e-12)
    seen = {message["operation"] for message in memory.messages}
    assert set(algorithm_of(name).operations) - seen <= ({"gather"} if protection.sums.oblivious else set())


HOSTS = 3


@pytest.fixture(scope="module", params=["fake", pytest.param("ray", marks=pytest.mark.slow)])
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    """Three hosts: at seats of this process, and as actors on three Ray nodes."""
    if request.param == "fake":
        yield FakeCarrier(HOSTS)
    else:
        with ray_nodes(HOSTS) as address, ray_hosts(HOSTS, address) as started:
            yield started


@cache
def hosted_cells() -> list[Any]:
    """FedAvg under each sum, PACFL under each comparison, and every algorithm in the clear; most are slow."""
    found = []
    for cell in cells():
        name, options = cell.values
        protection = protection_of(options)
        clear = protection.sum == "none" and not protection.comparison.hides
        default = name == "fedavg" or (name == "pacfl" and protection.sum == "none")
        if default or clear:
            marks = () if default and not protection.encrypted else pytest.mark.slow
            found.append(pytest.param(name, options, id=str(cell.id), marks=marks))
    return found


@pytest.mark.filterwarnings("ignore:algorithm 'fedgwc' will form no clusters")
@pytest.mark.parametrize(("name", "options"), hosted_cells())
def test_several_hosts_change_nothing(carrier: Carrier, name: str, options: Mapping[str, Any]) -> None:
    """Up to the last digits: other clients are computed together."""
    config = config_of(name, options)
    memory, split = play(config), play(config, partial(SplitHosts, carrier=carrier))
    drawn = ("digest", "bytes_each", "total_bytes") if config.protection.encrypted else ("digest",)
    said = [[{key: value for key, value in one.items() if key not in drawn} for one in run.messages] for run in (memory, split)]
    assert said[0] == said[1]
    assert split.clusterings == memory.clusterings
    for one, other in zip(split.models, memory.models, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("transport", ["memory", "bytes"])
@pytest.mark.parametrize(("name", "options"), [cell for cell in hosted_cells() if not cell.marks])
def test_the_clients_of_a_run_go_with_it(name: str, options: Mapping[str, Any], transport: str) -> None:
    """At once, as no cycle of references has them: their data can be large, and a search for cycles may be many runs away."""
    made: list[weakref.ref[FederationClient]] = []

    class Remembered(FederationClient):
        def __init__(self, *words: Any, **named: Any) -> None:
            super().__init__(*words, **named)
            made.append(weakref.ref(self))

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cflpriv.transports.hosts.FederationClient", Remembered)
            play(config_of(name, options, transport=transport))
        assert len(made) == len(SCENE.clients)
        assert [client() for client in made] == [None] * len(made)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ALGORITHMS.ready())
def test_what_declarations_rule_out_is_refused_before_anything_runs(name: str) -> None:
    """And nothing else is, but sample counts as weights where sums hide them."""
    for of_sum, of_gram in product(sums(), grams()):
        if two_kinds_of_holders(of_sum, of_gram):
            with pytest.raises(InputError, match="helpers of sums or holders of compared vectors, not both"):
                config_of(name, {**of_sum, **of_gram})
            continue
        config = config_of(name, {**of_sum, **of_gram})
        if ruled_out(name, config.protection):
            with pytest.raises(InputError, match=rf"protection\.(sum|gram) = .*'{name}'"):
                prepare(config, population=SCENE)
        else:
            config.algorithm_for(SCENE)


@pytest.mark.parametrize("name", ALGORITHMS.ready())
def test_updates_are_relayed_under_secure_sums_by_permission_only(name: str) -> None:
    for options in sums():
        config = config_of(name, {**options, "gram": ["haar"], "relay_updates": False})
        if not config.protection.secure or ruled_out(name, config.protection):
            continue
        if "relay" in algorithm_of(name).operations:
            with pytest.raises(InputError, match=rf"clients of '{name}' send each other .* protection\.relay_updates = true"):
                config.algorithm_for(SCENE)
        else:
            config.algorithm_for(SCENE)


@pytest.mark.parametrize("name", ALGORITHMS.ready())
def test_sample_counts_are_no_weights_where_sums_hide_them(name: str) -> None:
    for of_sum in sums():
        protection = Protection(**of_sum)
        with_own = {"algorithm": {"name": name}, "protection": of_sum}
        if protection.sums.hides and own_weights(name) == "examples":
            with pytest.raises(InputError, match=rf"training\.weights = 'examples'.*protection\.sum = '{protection.sum}'"):
                parse_config(with_own)
        else:
            parse_config(with_own)
