"""The example configs: each parses, and each whose files are here gives clients and a model."""

import os
from pathlib import Path

import pytest
from checkout import EXAMPLES

from cflpriv.data import build_population
from cflpriv.data.named import LOADERS
from cflpriv.data.raw_tables import TABLES
from cflpriv.data.text import TEXTS
from cflpriv.experiments import load_config

FOLDER = Path(os.environ.get("CFLPRIV_DATA") or "absent")
CONFIGS = sorted(EXAMPLES.glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_example_parses(path: Path) -> None:
    config = load_config(path)
    assert config.data.source in {*LOADERS, *TEXTS, *TABLES, "mixture"}
    assert load_config(path, [f"data.seed={config.data.seed + 1}"]).data != config.data


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="CFLPRIV_DATA names no folder of real data sets")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_example_has_clients(path: Path) -> None:
    config = load_config(path)
    if config.data.source in TABLES:
        pytest.skip("tables are made by their own scripts; see tests/unit/experiments/run/test_own_data_runs.py")
    if config.data.source == "femnist":
        pytest.skip("LEAF's files are not here")
    population = build_population(config.data, FOLDER)
    assert len(population.clients) == config.data.clients
    assert config.model_for(population).dimension > 0
