"""Every algorithm of the papers' tables on one federation: Fashion-MNIST, 20 % label skew, both accuracies side by side.

    CFLPRIV_DATA=DIR python examples/label_skew_table.py            # bounded: minutes on two cores
    CFLPRIV_DATA=DIR python examples/label_skew_table.py --paper    # PACFL's setting: hours

"shared" is the model each client would use (the shared, cluster or personal one), "local" each client's last locally trained model: the
papers print the second for clustered and personal methods and the first for FedAvg and its kin. All runs have the same clients, sampling
and batches; means weigh clients as each method's paper prints. Hyper-parameters are PACFL's (Tables 12 and 13), or the papers' own where it
has none; none is chosen by test accuracy.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from cflpriv.algorithms import ALGORITHMS
from cflpriv.data import build_population
from cflpriv.experiments import Config, load_config, parse_config, start
from cflpriv.experiments.run.run import admit, advance, finish
from cflpriv.streams import printable_streams
from cflpriv.types import Population

PAPER: dict[str, dict[str, Any]] = {
    "data": {"clients": 100, "samples_per_client": 0, "test_samples_per_client": 0},
    "training": {"rounds": 200, "epochs": 10, "participation": 0.1},
}
HEAVY = {"momentum": 0.9}
"""Table 12: FedAvg and its kin have momentum 0.9, all others 0.5."""
TRAINING: dict[str, dict[str, Any]] = dict.fromkeys(("fedavg", "fedprox", "fednova", "scaffold"), HEAVY)
HYPER: dict[str, dict[str, Any]] = {
    "pacfl": {"p": 3, "k": 2}, "ifca": {"k": 2}, "fesem": {"k": 2}, "one_shot": {"k": 2}, "r_dpcfl": {"k": 2}, "rr_cluster": {"k": 2},
    "flexcfl": {"k": 2}, "fedsoft": {"k": 2}, "fedrc": {"k": 2},
    "pina": {"k": 2}, "fedprox": {"mu": 0.01}, "per_fedavg": {"alpha": 0.01, "beta": 0.001}, "lg_fedavg": {"global_layers": 2},
    "cfl": {"eps2": 0.75},
}  # fmt: skip
PRINTED: dict[str, dict[str, Any]] = {"pfedlia": {"warm_up": 20, "min_samples": 10}}
"""At the paper's scale only."""
BOUNDED: dict[str, dict[str, Any]] = {"pfedlia": {"warm_up": 5, "min_samples": 4}}
"""Away from the paper's scale: pFedLIA's 20 rounds of warm-up would be all there are."""
PUBLISHED = {
    "local": 95.92, "fedavg": 77.3, "fedprox": 74.9, "fednova": 70.4, "scaffold": 42.8, "lg_fedavg": 96.80, "per_fedavg": 95.95,
    "ifca": 97.15, "cfl": 77.93, "pacfl": 97.54,
}  # fmt: skip
"""PACFL's Table 1, at its own scale."""
ROWS = [name for name in ALGORITHMS if name not in ("hypcluster", "oracle", "shuffled")]
"""The true groups of label skew are the label sets, so fixed clusterings mean little here; hypcluster is ifca."""


def config_for(name: str, base: Config, paper: bool) -> Config:
    """The one config with the algorithm `name` in it, its hyper-parameters checked."""
    changed = base
    for section, values in PAPER.items() if paper else ():
        changed = changed.with_(section, **values)
    changed = changed.with_("training", **TRAINING.get(name, {}))
    hyper = {**(PRINTED if paper else BOUNDED).get(name, {}), **HYPER.get(name, {})}
    checked = parse_config({"algorithm": {"name": name, **hyper}}).algorithm
    return replace(changed, algorithm=checked)


def run(config: Config, population: Population) -> dict[str, Any]:
    """One run in memory; its summary."""
    simulation = start(config, population=population)
    while len(simulation.rows) < config.training.rounds:
        advance(simulation)
    admit(simulation)
    summary = finish(simulation)
    simulation.simulated.engine.close()
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=ROWS, metavar="ALGORITHM", help="which (default: all of the table)")
    parser.add_argument("--paper", action="store_true", help="PACFL's scale")
    parser.add_argument("--rounds", type=int, default=0, help="another number of rounds")
    parser.add_argument("--newcomers", type=int, default=0, help="so many clients join after training")
    parser.add_argument("--data-dir", default=None)
    options = parser.parse_args()
    base = load_config(Path(__file__).with_name("label_skew_all_fmnist.toml"))
    base = base.with_("data", newcomers=options.newcomers)
    population = None
    head = ("shared", "last 10", "local", "last 10", "paper", "clusters")
    print(f"{'':12}{''.join(f'{word:>9}' for word in head)}{'Mb':>9}{'to 75 %':>16}{'s':>6}", flush=True)
    for name in options.names:
        config = config_for(name, base, options.paper)
        if options.rounds:
            config = config.with_("training", rounds=options.rounds)
        population = population or build_population(config.data, options.data_dir)
        s = run(config, population)
        cells = [s["accuracy_mean"], s["accuracy_mean_last_rounds"], s["local_accuracy_mean"], s["local_accuracy_mean_last_rounds"]]
        figures = "".join(f"{'–' if value is None else f'{100 * value:.1f}':>9}" for value in cells)
        paper = f"{PUBLISHED[name]:.1f}" if name in PUBLISHED else "–"
        reached = "never" if s["rounds_to_target"] is None else f"{s['rounds_to_target']} ({s['megabits_to_target']:.0f} Mb)"
        clusters = "–" if s["clusters"] is None else s["clusters"]
        print(f"{name:12}{figures}{paper:>9}{clusters:>9}{s['megabits']:>9.1f}{reached:>16}{s['seconds']:>6.0f}", flush=True)
        if s["newcomers"]:
            new = [s["newcomers"].get(f"newcomer_{kind}accuracy_mean") for kind in ("", "tuned_")]
            print(f"{'':12}newcomers " + ", fine-tuned ".join("–" if value is None else f"{100 * value:.1f}" for value in new), flush=True)


if __name__ == "__main__":
    printable_streams()
    main()
