"""Next-word models end to end: from sentences in files to a run folder with perplexities."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkout import EXAMPLES

from cflpriv.data import build_population
from cflpriv.experiments import advance, load_config, parse_config, run_experiment, start

FOLDER = Path(os.environ.get("CFLPRIV_DATA") or "absent")
needs_files = pytest.mark.skipif(not FOLDER.is_dir(), reason="CFLPRIV_DATA names no folder of real data sets")


@pytest.fixture
def texts_folder(tmp_path: Path) -> Path:
    """Three invented languages of four words each, in which the next word follows from the last; the same start, different orders."""
    (tmp_path / "nordic_wiki").mkdir()
    for language, order in (("nb", "abcd"), ("sv", "acdb"), ("da", "adbc")):
        for part, count in (("train", 24), ("test", 6)):
            lines = [" ".join(order[(i + j) % 4] for j in range(9)) for i in range(count)]
            (tmp_path / "nordic_wiki" / f"{language}_{part}.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


def tree(**algorithm: Any) -> dict[str, Any]:
    return {
        "data": {"source": "nordic_wiki", "partition": "kinds", "clients": 6, "vocabulary": 8, "sequence_length": 4},
        "model": {"name": "lstm", "hidden": 12},
        "training": {"rounds": 6, "epochs": 3, "batch_size": 16, "lr": 1.0},
        "algorithm": algorithm,
    }


@pytest.mark.slow
def test_a_run_reports_perplexity(texts_folder: Path, tmp_path: Path) -> None:
    summary = run_experiment(parse_config(tree(name="fedavg")), tmp_path / "out", texts_folder)
    rows = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    words = 6  # four, and two that stand for no word and for an unknown one
    assert summary["parameters"] == words * 12 + 2 * (4 * 12 * 26) + 12 * words + words
    assert all(row["perplexity_worst"] >= row["perplexity_mean"] >= 1 for row in rows)
    assert summary["perplexity_mean"] == rows[-1]["perplexity_mean"]
    assert summary["local_perplexity_mean"] == rows[-1]["local_perplexity_mean"]
    # One model for three languages cannot know the next word, but it can know that there are three it may be.
    assert 2 < summary["perplexity_mean"] < 4.5
    assert any("test words are outside it" in note for note in summary["notes"])


@pytest.mark.slow
def test_perplexity_is_exp_of_the_mean_loss_and_falls_with_true_groups(texts_folder: Path) -> None:
    simulation = start(parse_config(tree(name="oracle")), texts_folder)
    rows = [advance(simulation) for _ in range(6)]
    s = simulation
    served = s.algorithm.serve(s.state)
    inputs = s.simulated.resolve(served.task, served.params, served.which, s.federation.clients)
    found = []
    for given in inputs:
        module = s.config.model_for(s.population).load(given.array("model"))
        with torch.no_grad():
            scores = torch.log_softmax(module(torch.from_numpy(given.data.x_test)), dim=1)
        truth = torch.from_numpy(given.data.y_test)[:, None]
        found.append(float(np.exp(-float(scores.gather(1, truth).mean()))))
    assert rows[-1]["perplexity_mean"] == pytest.approx(np.mean(found), rel=1e-5)
    assert rows[-1]["perplexity_worst"] == pytest.approx(np.max(found), rel=1e-5)
    # Within a language the next word is certain after one word.
    assert rows[-1]["perplexity_mean"] < 2


def test_images_have_no_perplexity() -> None:
    config = parse_config({"data": {"source": "digits", "clients": 4}, "training": {"rounds": 1}, "model": {"hidden": 4}})
    assert not any("perplexity" in name for name in advance(start(config)))


def test_pictures_of_text_are_refused(texts_folder: Path) -> None:
    from cflpriv.errors import InputError

    with pytest.raises(InputError, match="needs images"):
        start(parse_config(tree(name="fedavg") | {"model": {"name": "lenet5"}}), texts_folder)


@needs_files
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cfl_ag_news", "pfedlia_nordic"])
def test_the_text_examples_run(name: str, tmp_path: Path) -> None:
    changes = ["training.rounds=3", "data.samples_per_client=500", "data.test_samples_per_client=100"]
    config = load_config(EXAMPLES / f"{name}.toml", [*changes, *(["algorithm.warm_up=1"] if name == "pfedlia_nordic" else [])])
    summary = run_experiment(config, tmp_path / "out", FOLDER)
    assert summary["true_groups"] == {"cfl_ag_news": 4, "pfedlia_nordic": 3}[name]
    assert 1 < summary["perplexity_mean"] < len(build_population(config.data, FOLDER).clients) * 2000
