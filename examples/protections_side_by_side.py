"""One experiment under several protections, side by side: accuracy, clusters, what an attacker gets, bytes and seconds.

    python examples/protections_side_by_side.py [CONFIG.toml] [FOLDER]

CONFIG is any experiment (default: pacfl_digits.toml beside this file), FOLDER where the runs and their report go. It is a sweep made in
Python; the same in a file, with several seeds and algorithms, is examples/sweeps/digits_front.toml.
"""

import sys
import tomllib
from pathlib import Path

from cflpriv import InputError
from cflpriv.attacks.audit import audit_run
from cflpriv.experiments.report.front import attack_points, read_results, table_rows
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.sweep.sweep import parse_sweep
from cflpriv.experiments.sweep.sweep_runs import run_sweep
from cflpriv.streams import printable_streams

HERE = Path(__file__).parent
PROTECTIONS = [
    "none",
    {"label": "secagg", "sum": "secagg"},  # updates are added unseen; signatures stay in the clear
    {"label": "haar", "gram": ["haar"], "sum": "haar"},  # signatures and updates under secret rotations
    {"label": "haar + secagg", "gram": ["haar"], "sum": "secagg"},
]


def main() -> None:
    config = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "pacfl_digits.toml"
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path("runs/protections")
    tree = tomllib.loads(config.read_text(encoding="utf-8"))
    tree.setdefault("run", {})["record"] = "full"  # or there is nothing to attack
    tree.setdefault("training", {})["weights"] = "equal"  # sample counts stay private, under every protection
    tree.pop("protection", None)  # compared are those below, and nothing of the file's own
    tree["sweep"] = {"protections": PROTECTIONS, "attacks": ["signature_inversion"], "budget": "quick"}

    sweep = parse_sweep(tree, str(config))
    failed = run_sweep(sweep, folder, audit=audit_run, report=print)
    results, _ = read_results(folder, sweep)
    leaks = {
        point.setting: point.leakage.mean
        for (_, metric, adversary, _), points in attack_points(results).items()
        for point in points
        if (metric, adversary) == ("mean_image_cosine", "server")
    }
    print(f"\n{'protection':<16}{'accuracy':>9}{'own model':>11}{'ARI':>6}{'attacker':>10}{'up MB':>8}{'down MB':>9}{'seconds':>9}")
    for row, setting in zip(table_rows(results, sweep), dict.fromkeys(result.cell.setting for result in results), strict=True):
        leak = f"{leaks[setting]:.2f}" if setting in leaks else "–"
        ari = "–" if row["ari"] is None else f"{row['ari']:.2f}"
        print(
            f"{setting.protection:<16}{row['accuracy_mean']:>9.1%}{row['local_accuracy_mean']:>11.1%}{ari:>6}{leak:>10}"
            f"{row['upload_bytes'] / 1e6:>8.2f}{row['download_bytes'] / 1e6:>9.2f}{row['seconds']:>9.1f}"
        )
    print("\n(attacker: cosine of the recovered and the real mean image of a client; – where nothing is sent to invert)")
    for name, error in failed.items():
        print(f"failed: {name}: {error}")
    print(f"report: {write_report(folder)}")


if __name__ == "__main__":
    printable_streams()
    try:
        main()
    except (InputError, OSError) as error:
        sys.exit(f"protections_side_by_side: {error}")
