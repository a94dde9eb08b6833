"""CFL's Algorithm 5 with a secret permutation, recorded, and broken by the server that lacks the key; every seed printed.

    python examples/break_the_permutation.py                      the claims: 2 networks × 2 partitions × 5 seeds
    python examples/break_the_permutation.py --variants           what else was tried, one seed each
    python examples/break_the_permutation.py --variants --rows Adam,swap --seeds 3      some of it, seeds 101, 102, ...
    python examples/break_the_permutation.py --seeds 1 --only mlp/two

Needs MNIST and Fashion-MNIST (CFLPRIV_DATA). The attacker knows the initial model, the training settings, the number of samples a
client has, and 2 000 labelled samples of the clients' test distribution; with two labels a client also that number. It never sees key or
truth.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import comb
from typing import Any

import numpy as np
from torch import nn

import cflpriv
from cflpriv.algorithms.cfl.cfl import cfl
from cflpriv.attacks import labels_from_gram
from cflpriv.attacks.adversary import AdversaryView, view_of
from cflpriv.attacks.evidence.fresh_runs import case_of, fresh_scene
from cflpriv.attacks.evidence.sums import models_sent
from cflpriv.attacks.figures.leakage import Prior, Truth, cosine, popular_set, prior_of, truth_of
from cflpriv.attacks.key_recovery import ABSTAIN_BELOW, KeyRecoveryGuess, Knowledge, cells, recover_labels, transformed_rounds
from cflpriv.attacks.key_recovery.cells import (
    TransformedUpdates,
    exact_share,
    guess_of,
    knowledge,
    score_histograms,
    score_label_sets,
    score_structure,
)
from cflpriv.attacks.key_recovery.naming import own_proportions, simulate_updates
from cflpriv.contract.protection import Protection
from cflpriv.contract.transcript import Transcript, payload_rows
from cflpriv.data import build_population
from cflpriv.engine import Engine, Streams, TaskInput
from cflpriv.engine.models import build_module
from cflpriv.experiments import Config, parse_config
from cflpriv.experiments.run.run import start
from cflpriv.federation.transforms import sketched
from cflpriv.randomness import stream
from cflpriv.streams import printable_streams
from cflpriv.types import Array, ClientData

CLIENTS, SAMPLES, LABELS = 20, 300, 10
SETTINGS: dict[str, tuple[str, str, int, float]] = {"mlp": ("mnist", "mlp", 10, 0.01), "lenet5": ("fashion_mnist", "lenet5", 5, 0.05)}
"""network -> (data set, model, rounds, learning rate). LeNet-5 hardly moves in 5 rounds at 0.01."""
SEEDS = (201, 202, 203, 204, 205)
VARIANT_SEED = 101
SKETCHED = 2048
"""Numbers of a sketch under Haar: a rotation of all 50 890 would not fit in memory."""
OWN_PER_SET = 4
"""The attacker's own clients for each label set, in the attack on Grams."""


@dataclass(frozen=True, eq=False)
class Run:
    """A recorded run: what the server saw, the same with the key (for scoring), the attacker's prior, the truth."""

    view: AdversaryView
    opened: AdversaryView
    prior: Prior
    truth: Truth


def configured(network: str, partition: str, seed: int, protection: dict[str, Any] | None = None, **training: Any) -> Config:
    """CFL on 20 clients of 300 samples. partition: "two" (a random pairing of the labels), "dirichlet" (0.3) or "swap" (two labels
    exchanged, a pair for each of four groups)."""
    source, model, rounds, lr = SETTINGS[network]
    data: dict[str, Any] = {"source": source, "clients": CLIENTS, "samples_per_client": SAMPLES, "seed": seed}
    if partition == "two":
        pairs = stream(seed, "pairs of labels").permutation(LABELS).reshape(-1, 2)
        data |= {"partition": "pathological", "groups": [sorted(map(int, pair)) for pair in pairs]}
    elif partition == "swap":
        data |= {"label_swaps": [[0, 1], [2, 3], [4, 5], [6, 7]]}
    else:
        data |= {"partition": "dirichlet", "alpha": 0.3}
    return parse_config({
        "data": data, "model": {"name": model, "hidden": 64},
        "training": {"rounds": rounds, "lr": lr, "batch_size": 10, "weights": "equal"} | training,
        "algorithm": {"name": "cfl", "eps2": 0.75} | ({"watch": True} if protection and protection["sum"] == "secagg" else {}),
        "protection": protection or {"gram": ["permutation"], "sum": "permutation", "transform": "fixed"},
        "run": {"seed": seed, "record": "full", "audit_parties": ["server", "client:0"]},
    })  # fmt: skip


def record(network: str, partition: str, seed: int, protection: dict[str, Any] | None = None, **training: Any) -> Run:
    """A recorded run of Algorithm 5, or of CFL under another protection, with its similarities in view in every round."""
    config = configured(network, partition, seed, protection, **training)
    population = build_population(config.data)
    simulation = start(config, population=population)
    for number in range(config.training.rounds):
        simulation.federation.begin_round(number)
        simulation.state, _ = simulation.algorithm.round(simulation.federation, simulation.state)
    messages, secrets = simulation.federation.transcript.messages, {"client:0": simulation.simulated.secrets("client:0")}
    views = [view_of(messages, adversary, secrets, config.protection) for adversary in ("server", "server+1")]
    return Run(views[0], views[1], prior_of(population, seed, config=config), truth_of(population))


def score(guessed: KeyRecoveryGuess, run: Run) -> tuple[float, float, float]:
    """Label-set accuracy, L1 of histograms (equal shares where the attacker abstains), L1 of the structure under the best renaming."""
    clients = sorted(run.truth.label_sets)
    sets = score_label_sets(guessed, run.truth, run.prior, clients).mean()
    return (
        float(sets),
        float(score_histograms(guessed, run.truth, clients, LABELS).mean()),
        float(score_structure(guessed, run.truth, clients, LABELS).mean()),
    )


def cosines(guessed: KeyRecoveryGuess, seen: TransformedUpdates, clear: TransformedUpdates) -> tuple[float, float]:
    """Mean cosine to the true first updates: of those rebuilt at the coordinates placed, and of those predicted from the labels alone."""
    recovery = guessed.recovery
    if recovery is None or recovery.histograms is None or recovery.response is None:
        return float("nan"), float("nan")
    truth = clear.rounds[0]
    rebuilt = np.zeros_like(truth)
    for place, coordinate in guessed.coordinates.items():
        rebuilt[:, coordinate] = seen.rounds[0][:, place]
    predicted = recovery.response.predict(recovery.histograms)
    return tuple(float(np.mean([cosine(a, b) for a, b in zip(truth, rows, strict=True)])) for rows in (rebuilt, predicted))  # type: ignore[return-value]


def claims(networks: Sequence[str], partitions: Sequence[str], seeds: Sequence[int]) -> list[dict[str, float]]:
    """Every seed printed; its figures."""
    every: list[dict[str, float]] = []
    for network in networks:
        for partition in partitions:
            source, _, rounds, lr = SETTINGS[network]
            print(f"\n{network} on {source}, {partition}, {CLIENTS} clients, {rounds} rounds, lr {lr}", flush=True)
            print(
                "seed  structure   confidence  label sets (popular | other view | wrong θ0)   L1 of histogram (uniform | other | wrong θ0)"
                "   structure L1   exact coordinates   cosine rebuilt / predicted from labels   seconds"
            )
            before: KeyRecoveryGuess | None = None
            rows = []
            for seed in seeds:
                row, before = _claim(network, partition, seed, before)
                rows.append(row)
            summary(partition, rows)
            every += rows
    return every


def _claim(network: str, partition: str, seed: int, before: KeyRecoveryGuess | None) -> tuple[dict[str, float], KeyRecoveryGuess]:
    """One seed. `before` is the guess about another seed's clients, a baseline."""
    began = time.perf_counter()
    run = record(network, partition, seed)
    dimension = knowledge(run.prior, None).theta0.size
    seen, clear = transformed_rounds(run.view, dimension), transformed_rounds(run.opened, dimension)
    assert seen is not None
    assert clear is not None
    known = knowledge(run.prior, seen.theta0, seen.local)
    recovery = recover_labels(seen.rounds, known, stream(seed, "key recovery"))
    guessed = guess_of(recovery, seen)
    sets, l1, structure = score(guessed, run)
    wrong = knowledge(run.prior, known.train.model.init(seed + 1))
    misled_recovery = recover_labels(seen.rounds, wrong, stream(seed, "key recovery"))
    # scored as if it did not abstain
    shares = misled_recovery.histograms
    misled = KeyRecoveryGuess({} if shares is None else dict(zip(seen.clients, shares, strict=True)))
    everyone = list(run.truth.label_sets.values())
    popular = float(np.mean([labels == popular_set(everyone) for labels in everyone]))
    _, uniform, _ = score(KeyRecoveryGuess(), run)
    other = score(before, run) if before is not None else (float("nan"),) * 3
    wrong_sets, wrong_l1, _ = score(misled, run)
    exact = exact_share(guessed, seen, clear, list(seen.clients))
    rebuilt, predicted = cosines(guessed, seen, clear)
    print(
        f"{seed}  {recovery.structure.by:<11} {recovery.confidence:5.2f}{' abstains' if recovery.abstains else '         '}"
        f"  {sets:.2f} ({popular:.2f} | {other[0]:.2f} | {wrong_sets:.2f}, confidence {misled_recovery.confidence:.2f})"
        f"   {l1:.2f} ({uniform:.2f} | {other[1]:.2f} | {wrong_l1:.2f})   {structure:.2f}"
        f"   {exact:.2f} of {len(guessed.coordinates)}   {rebuilt:.2f} / {predicted:.2f}"
        f"   {time.perf_counter() - began:.0f}",
        flush=True,
    )
    return {"sets": sets, "l1": l1, "uniform": uniform}, guessed


def summary(partition: str, rows: Sequence[dict[str, float]]) -> None:
    if partition == "two":
        print(f"label-set accuracy ≥ .9 in {sum(row['sets'] >= 0.9 for row in rows)} of {len(rows)} seeds")
    else:
        l1, uniform = np.mean([row["l1"] for row in rows]), np.mean([row["uniform"] for row in rows])
        print(f"mean L1 {l1:.2f}, of the uniform guess {uniform:.2f}: ratio {l1 / uniform:.2f}")


# --- what else was tried ------------------------------------------------------------------------------------------------------------


def hadamard(rows: Array) -> Array:
    """The public orthonormal Walsh-Hadamard transform of rows, padded with zeros to a power of two."""
    size = 1 << (rows.shape[1] - 1).bit_length()
    mixed = np.pad(rows, ((0, 0), (0, size - rows.shape[1]))).reshape(len(rows), -1)
    half = 1
    while half < size:
        pairs = mixed.reshape(len(rows), -1, 2, half)
        mixed = np.concatenate([pairs[:, :, :1] + pairs[:, :, 1:], pairs[:, :, :1] - pairs[:, :, 1:]], axis=2).reshape(len(rows), -1)
        half *= 2
    return np.asarray(mixed / np.sqrt(size))


Row = tuple[str, Callable[[], None]]


def variants(network: str, partition: str, seed: int, wanted: Sequence[str]) -> None:
    """The rows whose names have one of the words `wanted` (none: all)."""
    truth = truth_of(build_population(configured(network, partition, seed).data))
    uniform = score_histograms(KeyRecoveryGuess(), truth, sorted(truth.label_sets), LABELS).mean()
    columns = f"structure, confidence, label sets, L1 (equal shares {uniform:.2f}), structure L1"
    print(f"\n{network}, {partition}, seed {seed}: {columns}", flush=True)
    rows = [*_of_one_run(network, partition, seed), *_of_other_runs(network, partition, seed)]
    for name, row in rows:
        if not wanted or any(word in name for word in wanted):
            row()


def _of_one_run(network: str, partition: str, seed: int) -> list[Row]:
    """One run in the clear of the key, and the same updates under other transforms."""

    @cache
    def clear() -> tuple[Run, TransformedUpdates, Knowledge]:
        run = record(network, partition, seed)
        d = knowledge(run.prior, None).theta0.size
        seen = transformed_rounds(run.opened, d)
        assert seen is not None
        return run, replace(seen, rounds=tuple(rows[:, :d] for rows in seen.rounds)), knowledge(run.prior, seen.theta0, seen.local)

    @cache
    def keys() -> tuple[Array, Array, Array, Array]:
        rng, d = stream(seed, "variants"), clear()[2].theta0.size
        order, signs = rng.permutation(d), rng.choice([-1.0, 1.0], d)
        size = len(hadamard(np.zeros((1, d)))[0])
        return order, signs, rng.permutation(size), rng.choice([-1.0, 1.0], size)

    def permuted() -> list[Array]:
        return [rows[:, keys()[0]] for rows in clear()[1].rounds]

    def mixed() -> list[Array]:
        return [hadamard(rows * keys()[1]) for rows in clear()[1].rounds]

    def undone() -> list[Array]:
        return [hadamard(rows)[:, : len(keys()[0])] for rows in mixed()]

    def attacked(name: str, made: Callable[[], list[Array]], signed: bool = False, to: Callable[[], Knowledge] | None = None) -> Row:
        def row() -> None:
            run, seen, known = clear()
            _variant(name, run, TransformedUpdates(seen.clients, tuple(made()), None, signed), to() if to else known, seed)

        return name, row

    def shifted() -> Knowledge:
        known = clear()[2]
        return replace(known, x=np.ascontiguousarray(np.roll(known.x, 2, axis=-1)) * np.float32(0.8))

    return [
        attacked("permutation", permuted),
        attacked("a fresh permutation a round (first round only)", lambda: permuted()[:1]),
        attacked("signed permutation", lambda: [rows * keys()[1] for rows in permuted()], True),
        attacked("signs, then public Hadamard (undone)", undone, True),
        attacked("signs, Hadamard, then permutation", lambda: [rows[:, keys()[2]] for rows in mixed()]),
        attacked("signs, Hadamard, permutation and signs", lambda: [rows[:, keys()[2]] * keys()[3] for rows in mixed()], True),
        attacked("secret θ0", permuted, to=lambda: knowledge(clear()[0].prior, None)),
        attacked("shifted auxiliary data (2 pixels right, 80 % contrast)", permuted, to=shifted),
    ]


def _of_other_runs(network: str, partition: str, seed: int) -> list[Row]:
    """Runs with other training, another model or other data."""

    def again(name: str, protection: dict[str, Any] | None = None, **training: Any) -> Row:
        def row() -> None:
            run = record(network, partition, seed, protection, **training)
            seen = transformed_rounds(run.view, knowledge(run.prior, None).theta0.size)
            assert seen is not None
            _variant(name, run, seen, knowledge(run.prior, seen.theta0, seen.local), seed)

        return name, row

    return [
        again("momentum 0.9, a tenth of the rate", momentum=0.9, lr=SETTINGS[network][3] / 10),
        again("weight decay 0.01", weight_decay=0.01),
        again("Adam, rate 0.001", optimizer="adam", lr=0.001),
        ("no head biases", lambda: unbiased(network, partition, seed, record(network, partition, seed, rounds=1))),
        again("[protection] sum = 'hadamard'", {"gram": ["hadamard"], "sum": "hadamard", "transform": "fixed"}),
        ("a sketch, then haar, for Grams; secure sums", lambda: sketch_and_haar(network, partition, seed)),
        ("label swap (instead of the partition)", lambda: swapped(network, seed)),
    ]


def sketch_and_haar(network: str, partition: str, seed: int) -> None:
    """Sums are secure, and the similarities of the first round are seen under a Haar rotation of public sketches: this attack, and the
    attack on the Gram matrix with k clients whose data are known."""
    name = "a sketch, then haar, for Grams; secure sums"
    hidden = {"gram": ["sketch", "haar"], "sketch_dim": SKETCHED, "sum": "secagg", "transform": "fixed"}
    run = record(network, partition, seed, hidden, rounds=1)
    (message,) = [message for message in run.view.select("gram") if message.payload is not None and "rows" in message.payload]
    assert message.payload is not None
    rows, clients = np.asarray(message.payload["rows"], np.float64)[:, 0], payload_rows(message)
    (theta0,) = next(models_sent(run.view, message).values() for message in run.view.select("compute", "parameters"))
    known = knowledge(run.prior, theta0)
    _variant(name, run, TransformedUpdates(clients, (rows,), None), known, seed)
    size = known.labels_per_client
    if size is None:
        return
    rng, reduce = stream(seed, "gram of updates"), sketched(int(message.context["epoch"]), SKETCHED)
    own = own_proportions(np.eye(LABELS), OWN_PER_SET * comb(LABELS, size), rng, size)
    held, updates = [frozenset(np.argsort(-row)[:size].tolist()) for row in own], reduce(simulate_updates(known, own, rng))
    templates = {
        own_labels: np.mean([row for row, labels in zip(updates, held, strict=True) if labels == own_labels], axis=0)[None]
        for own_labels in set(held)
    }
    truth = [run.truth.label_sets[client] for client in clients]
    popular = float(np.mean([labels == popular_set(truth) for labels in truth]))
    for k in (0, 3, 10):
        right = []
        for draw in range(4 if k else 1):
            places = stream(seed, f"known clients {k}", draw).permutation(len(clients))[:k].tolist()
            theirs = {place: reduce(trained(known, *run.truth.data[clients[place]])) for place in places}
            label_sets = labels_from_gram((rows @ rows.T)[:, None, :, None], theirs, templates, seed=seed)
            right.append(np.mean([label_sets[i] == truth[i] for i in range(len(clients)) if i not in places]))
        print(f"    its Gram, {k:2} known clients: label sets {np.mean(right):.2f} (popular label set {popular:.2f})", flush=True)


def trained(known: Knowledge, x: Array, y: Array) -> Array:
    """The first update (1, d) of a client with these samples, in batches of the attacker's own order."""
    data = TaskInput(ClientData(0, x, y, x[:1], y[:1]), {"model": known.theta0}, {}, Streams(7, 0, 0))
    return np.asarray(Engine().run(known.train, [data])[0]["update"], np.float64)[None]


def swapped(network: str, seed: int) -> None:
    """Clients with all labels, of which each group exchanges two: what an audit says of such a run."""
    config = configured(network, "swap", seed)
    case = case_of(fresh_scene(config, build_population(config.data), config.training.rounds), "server")
    for cell in cells(case)[0]:
        print(f"    label swap: {cell.line()}", flush=True)


def unbiased(network: str, partition: str, seed: int, run: Run) -> None:
    """The same run with a head that has no biases: only the weights out of hidden units add up to zero."""
    biased = knowledge(run.prior, None)
    _, _, rounds, _ = SETTINGS[network]

    def build() -> nn.Module:
        whole = build_module(replace(biased.train.model))
        layers = list(whole.children())
        head = layers[-1]
        assert isinstance(head, nn.Linear)
        fresh = [type(layer)(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else layer for layer in layers[:-1]]
        fresh = [
            nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size) if isinstance(layer, nn.Conv2d) else layer
            for layer in fresh
        ]  # type: ignore[arg-type]
        return nn.Sequential(*fresh, nn.Linear(head.in_features, head.out_features, bias=False))

    model = replace(biased.train.model, name=f"{biased.train.model.name} without head biases", factory=build)
    train = replace(biased.train, model=model)
    assert run.prior.config is not None
    population = build_population(run.prior.config.data)
    protection = Protection(gram=("permutation",), sum="permutation", transform="fixed")
    federation = cflpriv.simulate(population.clients, protection=protection, seed=seed, transcript=Transcript("full")).federation
    algorithm = cfl(train, eps2=0.75, weights="equal", seed=seed)
    state = algorithm.init(federation)
    for number in range(rounds):
        federation.begin_round(number)
        state, _ = algorithm.round(federation, state)
    seen = transformed_rounds(view_of(federation.transcript.messages, "server", {}, protection), model.dimension)
    assert seen is not None
    assert seen.theta0 is not None
    theta0 = seen.theta0.astype(np.float32)
    _variant("no head biases", run, seen, replace(biased, train=train, theta0=theta0), seed)


def _variant(name: str, run: Run, seen: TransformedUpdates, known: Any, seed: int) -> None:
    recovery = recover_labels(seen.rounds, known, stream(seed, "key recovery"), signed=seen.signed)
    sets, l1, structure = score(guess_of(recovery, seen), run)
    print(
        f"  {name:<58} {recovery.structure.by:<11} {recovery.confidence:5.2f}{' abstains' if recovery.abstains else '         '}"
        f" {sets:.2f}  {l1:.2f}  {structure:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds; default 5, of variants 1")
    parser.add_argument("--only", default="", help="NETWORK/PARTITION, as in mlp/two or lenet5/dirichlet")
    parser.add_argument("--variants", action="store_true", help="other transforms, models and knowledge, one seed each")
    parser.add_argument("--rows", default="", help="of the variants only those with one of these words, with commas between")
    options = parser.parse_args()
    network, _, partition = options.only.partition("/")
    networks, partitions = [network] if network else list(SETTINGS), [partition] if partition else ["two", "dirichlet"]
    print(f"the attacker abstains below confidence {ABSTAIN_BELOW}; an abstention counts as a failure")
    if options.variants:
        words = [word.strip() for word in options.rows.split(",") if word.strip()]
        for name in networks:
            for kind in partitions:
                for seed in range(VARIANT_SEED, VARIANT_SEED + (options.seeds or 1)):
                    variants(name, kind, seed, words)
    else:
        count = options.seeds or len(SEEDS)
        claims(networks, partitions, [*SEEDS, *range(SEEDS[-1] + 1, SEEDS[0] + count)][:count])


if __name__ == "__main__":
    printable_streams()
    main()
