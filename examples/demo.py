"""The demo: PACFL with and without protection, beside FedAvg and local training, on real digits; then audit, report and a small sweep.

Half of the clients see the digits upright, half turned by 90 degrees. The server is not given the number of groups.
"""

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from cflpriv import InputError, load_config, run_experiment
from cflpriv.attacks.audit import audit_run
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.sweep.sweep import load_sweep
from cflpriv.experiments.sweep.sweep_runs import run_sweep
from cflpriv.streams import printable_streams

HERE = Path(__file__).parent
OUT = Path("runs/demo")
PRIVATE = ['protection.gram=["haar"]', "protection.sum=secagg", 'run.audit_parties=["server", "client:0"]']
RUNS = {
    "pacfl": ("pacfl_digits.toml", []),
    "private": ("pacfl_digits.toml", PRIVATE),
    "fedavg": ("fedavg_digits.toml", []),
    "local": ("fedavg_digits.toml", ["algorithm.name=local"]),
}


def compared(out: Path) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Make and audit the runs; of each its name, its summary, and the attacked likeness of average images by adversary."""
    table = []
    for name, (file, changes) in RUNS.items():
        summary = run_experiment(load_config(HERE / file, changes), out / name, report=print)
        is_pacfl = summary["algorithm"] == "pacfl"
        cells = audit_run(out / name, attacks=["signature_inversion"], budget="quick", report=print) if is_pacfl else []
        table.append((name, summary, {cell.adversary: cell for cell in cells if cell.metric == "mean_image_cosine"}))
    return table


def main() -> None:
    began = time.perf_counter()
    if OUT.exists() and not (OUT / ".demo").exists():
        raise InputError(f"{OUT}: exists and is not a demo's folder; move it away")
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    (OUT / ".demo").touch()
    table = compared(OUT)
    print()
    print(
        f"{'run':<12}{'accuracy':>10}{'worst':>8}{'own model':>11}{'clusters':>10}{'ARI':>7}   attacker's image: cosine with the real one"
    )
    for name, summary, seen in table:
        ari = "–" if summary["ari"] is None else f"{summary['ari']:.2f}"
        sent = [(adversary, cell) for adversary, cell in seen.items() if cell.status not in ("nothing_to_see", "not_applicable")]
        leak = ", ".join(f"{adversary} {'not attempted' if cell.value is None else f'{cell.value:.2f}'}" for adversary, cell in sent)
        accuracy, worst, own = (f"{100 * summary[f'{key}']:.1f} %" for key in ("accuracy_mean", "accuracy_worst", "local_accuracy_mean"))
        print(
            f"{name:<12}{accuracy:>10}{worst:>8}{own:>11}{summary['clusters'] or '–':>10}{ari:>7}   {leak or 'nothing is sent to invert'}"
        )
    print("\n(without any view an attacker's guess, the average image, has the baseline in the report; a secret rotation leaves inner")
    print("products of the vectors only, so that there is nothing to read as an image: the attack gram_geometry reads them)")
    print(f"report: {write_report(OUT)}   ({time.perf_counter() - began:.0f} s)")

    print("\nPrivacy against utility: two systems under four protections, two seeds each")
    sweep = load_sweep(HERE / "sweeps" / "small_front.toml")
    failed = run_sweep(sweep, OUT / "front", audit=audit_run, report=print)
    for name, error in failed.items():
        print(f"failed: {name}: {error}")
    print(f"its pictures and tables: {write_report(OUT / 'front')}   ({time.perf_counter() - began:.0f} s in all)")


if __name__ == "__main__":
    printable_streams()
    try:
        main()
    except InputError as error:
        sys.exit(f"demo: {error}")
