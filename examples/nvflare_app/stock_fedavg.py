"""A stock NVFlare job under the privacy budget of each site.

    python stock_fedavg.py --out runs/nvflare_stock               in the simulator, with the filter in the job
    python stock_fedavg.py --out runs/nvflare_stock_poc --poc     in POC mode: the job unchanged, the filter in each site's privacy.json

NVFlare's own FedAvg over NumPy models asks two sites for six rounds. `PrivacyFilter` stands before everything that leaves a site, with a
budget of ε = 4 for three updates. So the fourth round gets no update, the job ends, and each site's ledger says what was spent. The
simulator does not read a site's privacy.json: there the filter has to be in the job.
"""

import argparse
import json
import os
from pathlib import Path

from launch import allow, poc
from nvflare import FilterType
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.app_common.np.np_trainer import NPTrainer
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob

from cflpriv.federation.client_ledger import ClientLedger
from cflpriv.federation.settings import read_settings, write_identities
from cflpriv.federation.store import DiskStore
from cflpriv.nvflare import PrivacyFilter
from cflpriv.streams import printable_streams

SITES = ("site-1", "site-2")
RELEASES = 3
FILTER = {"path": "cflpriv.nvflare.privacy_filter.PrivacyFilter", "args": {"releases": RELEASES}}
PRIVACY = """
[privacy]
unit = "client"
relation = "replace_one"
epsilon = 4.0
delta = 1e-5
clip_norm = 1.0
"""


def policy() -> str:
    """A site's `local/privacy.json`: no job leaves this scope."""
    scope = {
        "name": "private",
        "task_data_filters": [{**FILTER, "direction": "in"}],
        "task_result_filters": [{**FILTER, "direction": "out"}],
    }
    return json.dumps({"format_version": 2, "default_scope": "private", "scopes": [scope]}, indent=2)


def stock_job(rounds: int) -> FedJob:
    """NVFlare's own components, and nothing else."""
    job = FedJob(name="stock", min_clients=len(SITES))
    job.to_server(NPModelPersistor(), id="persistor")
    job.to_server(FedAvg(num_clients=len(SITES), num_rounds=rounds))
    job.to_clients(NPTrainer(), tasks=["train"])
    return job


def main(arguments: list[str] | None = None) -> dict[str, tuple[int, float]]:
    """Run it; for each site how many updates were sent, and the ε spent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/nvflare_stock"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--poc", action="store_true", help="POC mode instead of the simulator")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    if out.exists():
        raise SystemExit(f"{out}: exists; remove it or choose another --out")
    (out / "settings").mkdir(parents=True)
    write_identities(out / "keys", len(SITES))
    for client, site in enumerate(SITES):
        files = f'identity = "{out}/keys/client{client}.key"\nstate = "{out}/state/{site}"\n[protection]\n'
        (out / "settings" / f"{site}.toml").write_text(files + PRIVACY, encoding="utf-8")
    job = stock_job(options.rounds)
    if options.poc:
        poc(out, job, list(SITES), 600, policy())
    else:
        for kind in (FilterType.TASK_DATA, FilterType.TASK_RESULT):
            job.to_clients(PrivacyFilter(RELEASES), filter_type=kind, tasks=["train"])
        job.set_app_packages(["cflpriv"])
        os.environ["CFLPRIV_SETTINGS"] = str(out / "settings")
        (out / "workspace" / "local").mkdir(parents=True)
        allow(out / "workspace" / "local" / "resources.json")
        job.simulator_run(str(out / "workspace"), n_clients=len(SITES), threads=len(SITES))
    results = {}
    for client, site in enumerate(SITES):
        settings, state, _ = read_settings(out / "settings" / f"{site}.toml")
        assert state is not None
        ledger = ClientLedger(settings.privacy, client, DiskStore(state))
        results[site] = (len(ledger.charges()), ledger.spent())
        print(f"{site}: {results[site][0]} updates were sent, ε = {results[site][1]:.3f} of {settings.privacy.epsilon:g} spent")
    return results


if __name__ == "__main__":
    printable_streams()
    main()
