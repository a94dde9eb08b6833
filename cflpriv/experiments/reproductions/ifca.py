"""IFCA (Ghosh et al. 2020): mixed regressions, rotated MNIST and CIFAR-10, and FEMNIST, which StoCFL has too."""

from typing import Any

from ...algorithms.cfl.cfl import EPS2
from .entry import Published, Reproduction, ReproductionCell, RowFigure, run, shape
from .published import numbers
from .trials import regression_success

__all__ = ["ENTRIES", "FEMNIST", "ROTATED"]


def _regression_cells() -> tuple[ReproductionCell, ...]:
    """Fig. 3: over R and σ for K = 2 and 4, then over m and over n at σ = 0.1, where each curve shares a point with the first panel."""
    cells = []
    figures = (RowFigure("success", shape("0 where R, m, n are small, 1 where they are large")),)

    def add(k: int, m: int, n: int, r: float, noise: float, *places: tuple[str, str, float], scale: str = "norm") -> None:
        settings = {"k": k, "m": m, "n": n, "separation": r, "noise": noise, "d": 1000, "scale": scale}
        thin = {"d": 200, "m": m // 5}  # d/(mn), and with it the error of the parameters, as published
        label = f"K={k} m={m} n={n} R={r:g} s={noise:g}"
        label = label if scale == "norm" else f"multiplied, {label}"
        cells.append(ReproductionCell(label, figures, thin=thin, trial=regression_success, trials=40, settings=settings, places=places))

    for k, m, separations in ((2, 100, (0.1, 0.25)), (4, 400, (0.5, 0.75))):
        for noise in (0.0, 0.1, 0.2, 0.4):
            for r in (0.1, 0.25, 0.5, 0.75, 1.0):
                curve = f"K={k}, R={r:g}"
                shared = (("n", curve, 100), ("m", curve, m)) if noise == 0.1 and r in separations else ()
                add(k, m, 100, r, noise, ("R", f"K={k}, σ={noise:g}", r), *shared)
        for r in separations:
            for size in (50, 200, 400):
                add(k, m, size, r, 0.1, ("n", f"K={k}, R={r:g}", size))
            for machines in (m // 2, 2 * m):
                add(k, machines, 100, r, 0.1, ("m", f"K={k}, R={r:g}", machines))
    for r in (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0):
        add(2, 100, 100, r, 0.1, ("R", "K=2, σ=0.1, multiplied", r), scale="multiply")
    return tuple(cells)


ROTATED = {
    "data.source": "mnist", "data.rotations": [0, 90, 180, 270], "data.repeat_per_group": True, "data.test_samples_per_client": 50,
    "model.name": "mlp", "model.normalise": False, "training.batch_size": 0, "training.lr": 0.1, "training.weights": "equal",
    "run.evaluate_every": 20,
}  # fmt: skip


def _ifca_rotated() -> tuple[ReproductionCell, ...]:
    cells = []
    rows: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("IFCA", "ifca", {"k": 4, "restarts": 3, "decide_after": 5}),
        ("global", "fedavg", {}),
        ("local", "local", {}),
    )
    for m, n in ((1200, 200), (2400, 100), (4800, 50)):
        for name, algorithm, keys in rows:
            metrics: dict[str, Published] = {"shared": numbers("IFCA, Table 1", name, "MNIST")}
            if name == "IFCA":
                metrics |= {"local": None, "ari": "1 after few rounds"}
            sizes = {"data.clients": m, "data.samples_per_client": n}
            cells.append(run(f"{name} m={m}", algorithm, metrics, keys={**keys, **sizes}, places=(("samples a client", name, n),)))
    return tuple(cells)


_CIFAR = {
    "data.source": "cifar10", "data.rotations": [0, 180], "data.repeat_per_group": True, "data.clients": 200,
    "data.test_samples_per_client": 100, "model.name": "cnn", "training.rounds": 200, "training.epochs": 5, "training.batch_size": 50,
    "training.lr": 0.25, "training.lr_decay": 0.99, "training.participation": 0.1, "training.weights": "equal",
    "training.on_divergence": "skip", "run.evaluate_every": 20,
}  # fmt: skip


def _identity_cells() -> tuple[ReproductionCell, ...]:
    """Fig. 4: IFCA as in Table 1, scored in every round."""
    wanted: dict[str, Published] = {"choice_ari": "all identified, in the picture", "identified_from_round": "after few rounds"}
    mnist = {**ROTATED, "model.hidden": 200, "training.epochs": 10, "data.clients": 1200, "data.samples_per_client": 200, "k": 4}
    own = {"training.rounds": 50, "run.evaluate_every": 1}
    return (
        run("Rotated MNIST", "ifca", wanted, keys={**mnist, **own}),
        run("Rotated CIFAR", "ifca", wanted, keys={**_CIFAR, "k": 2, **own}),
    )


def _of_ifca(row: str) -> dict[str, Published]:
    return {"shared": numbers("IFCA, Table 2", row)}


def _of_stocfl(row: str) -> dict[str, Published]:
    return {"shared": numbers("StoCFL, Table 2", row)}


FEMNIST: dict[str, Any] = {
    "data.source": "femnist", "data.partition": "given", "data.clients": 0, "model.name": "femnist_cnn", "training.rounds": 100,
    "training.epochs": 5, "training.batch_size": 10, "training.lr": 0.05, "training.participation": 0.05, "training.weights": "equal",
    "run.evaluate_every": 20,
}  # fmt: skip

ENTRIES: dict[str, Reproduction] = {
    "ifca-synthetic": Reproduction(
        "recovery of mixed linear regressions", "IFCA, Fig. 3",
        "the paper's: d = 1000, 300 rounds, 10 starts, 40 trials, its step sizes, θ* rescaled to norm R (in some rows multiplied by R, as "
        "the authors' code does: a norm of some 22 R); its values of m and n could not be read and are halves, doubles and quadruples here",
        _regression_cells(), over="numbers",
    ),
    "ifca-rotated-mnist": Reproduction(
        "four rotations of MNIST", "IFCA, Table 1",
        "the paper's: MLP with 200 hidden units, 10 full-batch steps of 0.1 a round, everybody, 300 rounds; of the authors' code: pixels "
        "in [0, 1] as they are; set here: of three random starts side by side the one of lowest training loss after 5 rounds goes on; "
        "clients choose on training data (the paper: on test data)", _ifca_rotated(),
        {**ROTATED, "model.hidden": 200, "training.rounds": 300, "training.epochs": 10}, {"training.rounds": 10, "data.clients": 40},
        over="numbers",
    ),
    "ifca-rotated-cifar": Reproduction(
        "two rotations of CIFAR-10", "IFCA, Table 1",
        "the paper's: 200 clients of 500, 10 % sampled, 5 epochs, batch 50, lr 0.25 falling by 0.99 a round; without its flips and crops; "
        "rounds (200, StoCFL's) and network widths are not published; set here: of three starts the one of lowest training loss after 10 "
        "rounds goes on; clients choose on training data (the paper: on test data)",
        (
            run(
                "IFCA", "ifca", {"shared": numbers("IFCA, Table 1", "IFCA", "CIFAR"), "local": None, "ari": "1 after few rounds"},
                keys={"k": 2, "restarts": 3, "decide_after": 10},
            ),
            run("global", "fedavg", {"shared": numbers("IFCA, Table 1", "global", "CIFAR")}),
            run("local", "local", {"shared": numbers("IFCA, Table 1", "local", "CIFAR")}),
        ),
        _CIFAR,
        {"training.rounds": 5, "data.clients": 20},
    ),
    "ifca-identities": Reproduction(
        "how soon clients choose the model of their cluster", "IFCA, Fig. 4 (a picture)",
        "as ifca-rotated-mnist with 1200 machines (which of the three sizes the picture has is not published) and ifca-rotated-cifar; one "
        "start, 50 rounds, set here; the picture has the accuracy of the estimates, here it is their adjusted Rand index: both are 1 where "
        "all are right; the numbers of rounds could not be read",
        _identity_cells(), {}, {"training.rounds": 5, "data.clients": 40}, over="rounds", along="choice_ari",
    ),
    "femnist": Reproduction(
        "FEMNIST's writers", "IFCA, Table 2, and StoCFL, Table 2 and Fig. 7",
        "IFCA's: all layers but the last shared; StoCFL's: 100 rounds, 5 % sampled, tau 0.55, its best; neither publishes epochs (5), "
        "batch (10) and lr (0.05), nor IFCA its rounds and sampling (StoCFL's here); LEAF's network, without StoCFL's dropout of 0.5",
        (
            run("IFCA k=2", "ifca", _of_ifca("IFCA k=2"), keys={"k": 2, "shared": ["all_but_last"]}),
            run("IFCA k=3", "ifca", _of_ifca("IFCA k=3"), keys={"k": 3, "shared": ["all_but_last"]}),
            run("one-shot k=2", "one_shot", _of_ifca("one-shot k=2"), keys={"k": 2}),
            run("one-shot k=3", "one_shot", _of_ifca("one-shot k=3"), keys={"k": 3}),
            run("global", "fedavg", _of_ifca("global")),
            run("local", "local", _of_ifca("local")),
            run("global (StoCFL's table)", "fedavg", _of_stocfl("FedAvg")),
            run(
                "StoCFL", "stocfl",
                {
                    **_of_stocfl("StoCFL tau=0.55"), "clusters": numbers("StoCFL, text", "clusters, FEMNIST"),
                    "two_largest": "two main clusters, in the picture",
                },
                keys={"tau": 0.55, "lam": 0.05},
            ),
            run("StoCFL tau=0.6", "stocfl", _of_stocfl("StoCFL tau=0.60"), keys={"tau": 0.6, "lam": 0.05}),
            run("StoCFL tau=0.65", "stocfl", _of_stocfl("StoCFL tau=0.65"), keys={"tau": 0.65, "lam": 0.05}),
            run("CFL (StoCFL's table)", "cfl", _of_stocfl("CFL"), keys={"training.participation": 1.0, "eps2": EPS2}),
            run("IFCA k=2, nothing shared (StoCFL's table)", "ifca", _of_stocfl("IFCA k=2"), keys={"k": 2}),
            run("IFCA k=3, nothing shared (StoCFL's table)", "ifca", _of_stocfl("IFCA k=3"), keys={"k": 3}),
        ),
        FEMNIST,
        {"training.rounds": 5},
    ),
}  # fmt: skip
"""Name -> what is reproduced."""
