"""Every file of a run folder with its schema. `python -m cflpriv.experiments.run.folder_reference` prints docs/reference/run_folder.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...generated_pages import generated_page
from ...streams import print_file

__all__ = ["FILES", "ROW_NAMES", "File", "page"]


@dataclass(frozen=True)
class File:
    """A file, or files, of a run folder: a `pattern` as for `fnmatch`, what it has, its format, and the meaning of its keys.

    `others` says what keys are besides that are not listed.
    """

    pattern: str
    what: str
    form: str
    keys: Mapping[str, str] = field(default_factory=dict)
    others: str = ""


_ACCURACY = {
    "accuracy_mean, accuracy_std, accuracy_worst": "Test accuracy of deployed models: mean, deviation and lowest over the clients "
    "that were evaluated.",
    "local_accuracy_mean, local_accuracy_std, local_accuracy_worst": "The same of clients' last locally trained models.",
    "evaluated_clients, accuracy_mean_interval, local_accuracy_mean_interval": "How many clients were drawn at random and evaluated, and "
    "95 % intervals for the means over all clients; only with `run.evaluate_clients`.",
}
_BY_CLASS = {
    "balanced_accuracy, macro_f1": "Mean recall and mean F1 over classes, of all evaluated clients' test samples together, each with the "
    "model that its client uses; null or absent where clients show no counts by class.",
    "majority_accuracy, majority_balanced_accuracy": "What always predicting the majority class of the training labels gets (in "
    "deployments, which do not show them: of the test labels).",
    "local_balanced_accuracy": "Balanced accuracy of the clients' last locally trained models (simulations).",
    "by_class": "The number of the `majority` class; `counts` of samples by true class (rows) and predicted class (columns), for more than "
    "100 classes three rows (samples, predictions, right predictions); `recall` of each class; the same of `clusters`.",
    "metric_NAME": "Own metrics (`run.metrics`).",
}
_NUMBERS = {
    "error_mean, error_std, error_worst, local_error_mean, local_error_std, local_error_worst": "Where the label is a number: clients' "
    "errors in its unit (the root of the mean square, or with `model.error` absolute the mean absolute error); the worst is the largest.",
    "error_mean_interval, local_error_mean_interval": "As for accuracies.",
    "r2, local_r2, root_mean_square_error, mean_absolute_error": "Of all evaluated clients' test samples together.",
    "constant_error": "The root mean square error of always predicting the mean training label (in deployments the mean test label).",
    "numbers": "The label's `range`; of the whole and by cluster the `count` of samples and `sums` of squared errors, absolute errors, "
    "labels, their squares, predictions and their squares, in the model's unit.",
}
_TRAFFIC = {
    "upload_bytes, download_bytes": "Bytes that travelled so far, all clients together.",
    "protection_upload_bytes, protection_download_bytes": "The part of these that protections add.",
}
_ROW = {
    "round": "Number of the round, from 0.",
    "cohort": "Clients that were asked.",
    "labels": "Their clusters, in the same order; null where the server does not learn them.",
    "admitted": "Clients that joined in this round.",
    "lost": "Clients that have dropped out by its end.",
    "skipped": "Why the round changed nothing; null if it did.",
    **_ACCURACY,
    **_BY_CLASS,
    **_NUMBERS,
    "per_client": "By client: accuracies, and what else was scored.",
    **_TRAFFIC,
    "upload_numbers, download_numbers": "Numbers, in place of bytes, that travelled so far without protection.",
    "client_upload_bytes, client_download_bytes": "Means of this round over the clients that took part.",
    "clipped_clients": "Clients whose contribution was clipped.",
    "unchanged_clusters": "Clusters without a sum in this round.",
    "placements": "`changed`: clients whose data changed; `moved`: `[client, from, to]` (from null: no cluster); `unplaced`: clients in no "
    "cluster; `opened`: by new cluster its first clients; `merged`: by cluster that was too small the one that it joined; "
    "`found_anew`: the number of groups where most clients changed. Each only if it happened.",
    "admissions": "The same of clients that joined in this round.",
    "epsilon": "Privacy spent so far (`[privacy]` only).",
    "experimenter_clipped_share, experimenter_noise_to_signal": "Share of clipped samples, and noise beside gradients, in some rounds "
    '(simulations with `privacy.unit = "sample"`): computed without noise, for the experimenter alone.',
    "clip_norm": "Clip norm of the next sum (`privacy.clip_quantile` only).",
    "seconds, scoring_seconds": "Duration of the round; what evaluation took of it.",
    "protection_seconds": "Time spent in protections since the start.",
}
_NOTED = {"clipped_clients", "unchanged_clusters", "placements"}
ROW_NAMES = frozenset(name for names in _ROW for name in names.split(", ")) - _NOTED
"""What a row of rounds has from the run itself. An algorithm's notes take other names."""
_SUMMARY = {
    "algorithm, dataset, protection, release_policy": "What was run.",
    **_ACCURACY,
    **_BY_CLASS,
    **_NUMBERS,
    "accuracy_mean_last_rounds, local_accuracy_mean_last_rounds, error_mean_last_rounds, last_rounds": "Means over the last rounds that "
    "were evaluated; how many.",
    "clusters, true_groups, ari, choice_ari": "Clusters in use, true groups, and their adjusted Rand index; that of clients' own choices. "
    "The last three are null where true groups are unknown.",
    "advice": "What to deploy (`run.advise`): `advice`, whether it is `decided` and `clear`, options that "
    "`cannot_be_told_apart`, `score` (balanced accuracy; accuracy with over 1,000 classes), `held_out_accuracy` by option, `differences` "
    "with simultaneous intervals, `allowed` options, `reasons`, `stability` of the groups over three searches, `clients`, `passes` (a "
    "client's passes over its training samples, beside those of the run alone), `client_epochs` (the same over a run that holds nothing "
    "out), `numbers_in_sums` besides updates, `test_accuracy` by option (the experimenter's). Null without.",
    "clear_structure, cut_rule, knowledge": "Whether groups were found, by which rule, and what was known of them before.",
    "placements": "What happened to clients that were placed again, or that joined, with the `round`: as in rounds.",
    "unplaced": "Clients that belong to no cluster at the end; they use the model of the nearest.",
    "mixture": "Clients' own mixtures (`training.mixture`): scores of local models, models of the run and own mixtures, their "
    "`differences`, `client_epochs` and `numbers_in_sums` as under `advice`; why there are none (`reason`). Null without.",
    "rounds, rounds_planned, rounds_skipped": "Rounds that ran, were planned, changed nothing.",
    "group_rounds_without_sum, clipped_client_rounds": "Sums that a cluster missed; contributions that were clipped.",
    "clients, parameters": "Number of clients; size of the model.",
    **_TRAFFIC,
    "setup_bytes, megabits, megabits_a_client": "Traffic before the rounds; of all rounds, without protection, in all and for one client.",
    "experimenter_clipped_share, experimenter_noise_to_signal": "The same as in rounds, for the whole run.",
    "epsilon, delta": "Privacy spent, and its δ; null without `[privacy]`.",
    "newcomers": "Scores of clients that joined after training; null without.",
    "messages": "Entries of the transcript.",
    "data_digest": "Digest of all clients' data.",
    "notes, warnings": "Remarks on the data; what a reader should know of the setting and of the result, "
    "such as a model that always predicts one class.",
    "engine_paths": "How often each way of computing was taken.",
    "seconds": "Duration of the run.",
}
FILES = (
    File(
        "config.toml",
        "The configuration, every key with its value. `cflpriv run` takes it.",
        "TOML, see [configuration](../configuration.md)",
    ),
    File(
        "environment.json",
        "What the run was made with.",
        "JSON object",
        {
            "cflpriv, python, system, machine, cores": "Versions and machine.",
            "packages": "Versions of numerical packages.",
            "command": "Name of the program.",
            "data_directory": "Folder of data sets, an absolute path.",
            "plugins": "The BLAKE2b-128 digest of each plugin file, by path; `--trust` runs no other text.",
        },
    ),
    File(
        "rounds.jsonl", "A row for each round, written when it ends.", "JSON, an object a line", _ROW, "what the algorithm notes of a round"
    ),
    File(
        "summary.json",
        "The result, written at the end.",
        "JSON object",
        _SUMMARY,
        "perplexities of text models, and details of `[privacy]`",
    ),
    File(
        "measured.json",
        "What only the experimenter sees; no attack reads it.",
        "JSON object",
        {
            "truth, labels": "By client: the true group and the cluster.",
            "evidence, evidence_source": "Numbers that the clustering was made from; whether the server saw them.",
            "class_names": "Names of the classes, if there are any.",
            "client_names": "Names of a table's clients, by their numbers from 0.",
        },
        "what the algorithm says of its state, such as p-values",
    ),
    File(
        "evidence.npz",
        "Distances and tree that a clustering was cut from.",
        "NumPy arrays `distance` (clients × clients), `tree` (linkage matrix)",
    ),
    File("ledger.json", "Charges to the privacy ledger (`[privacy]` only); `examples/check_ledger.py` computes ε from it.", "JSON object"),
    File(
        "digests.json",
        "BLAKE2b digest of each file that reports, audits, `--resume` and `cflpriv export` read.",
        "JSON object: path → 32 hexadecimal digits",
    ),
    File(
        "transcript/messages.jsonl",
        "Everything that crossed a trust boundary.",
        "JSON, an object a line",
        {"header": "The message as JSON text: parties, kind, clients, sizes, digest.", "chain": "Digest of this and all earlier headers."},
    ),
    File("transcript/payloads_*.safetensors", "Payloads, as far as `run.record` keeps them.", "safetensors, an array a part"),
    File("secrets/*.json", "Secrets of `run.audit_parties`, for attacks (simulations only).", "JSON object"),
    File(
        "checkpoints/*.json", "The last checkpoint, for `--resume` and `cflpriv export`.", "JSON object, of types that algorithms declare"
    ),
    File("checkpoints/*.safetensors", "Its arrays: the server's, and apart from them the clients'.", "safetensors"),
    File(
        "resumes.jsonl",
        "A line for each time the run was resumed.",
        "JSON, an object a line",
        {"number": "From 1.", "from": "Checkpoint; null for the start."},
    ),
    File("interrupted/*", "Rows and messages of rounds that were cut short, by number of the interruption.", "As the files above"),
    File("stages.jsonl", "Stages of each step and their outcome (deployments only).", "JSON, an object a line"),
    File(
        "audit.json",
        "Result of `cflpriv audit`.",
        "JSON object",
        {
            "verdicts": "For each adversary one sentence, and what would reduce the leak; `colluders` as in `cells`.",
            "learns": "By attack that leaks, what it shows its adversary.",
            "risks": "The leaks by risk: singling out, linkability, inference.",
            "risk_words": "What was found of each risk, for people: leaks, open figures, or that no attack was made.",
            "about": "Software, date, digests of run and data, budget, seeds, adversaries, attacks, and what was not run.",
            "remedies_accepted": "By attack or attack/metric the first remedy that the configuration accepts: `words`, `changes`.",
            "remedies_measured": "With `--measure-remedies`: each leak before and after its remedy.",
            "most_exposed": "Training samples that a leaking membership attack singles out: `client`, `row` of its training data, and the "
            "share of samples outside that score as high.",
            "evidence_doubtful, assumed": "Of another system: the checks that failed; what the audit assumed.",
            "attacks, source": "Of another system: the attacks `run` and `not_run`; `folder` or `python`, which gave the updates.",
            "family": "How all figures are judged together.",
            "cells": "Figures: `attack`, `adversary`, `metric`, `value`, `low`, `high`, `baseline`, `reference`, `status`, `p`, `note`; "
            "`colluders`: how many clients collude beside the adversary's own.",
        },
    ),
    File("audit/*", "What attacks recovered, and finished parts of an audit.", "NumPy arrays (`.npz`), JSON"),
    File("active_audit.json", "Result of `cflpriv audit --active`; `active_audit.txt` has it as text.", "JSON, a list of rows"),
    File("tensorboard/*", "Events of the callback `tensorboard`.", "TensorFlow event files"),
    File("trackers.json", "The run's number in MLflow and Weights & Biases, of their callbacks.", "JSON"),
    File("report.html", "The report of `cflpriv report`.", "HTML, one file"),
    File("results.csv", "A line for each run of the report.", "CSV with a header"),
    File(".lock", "Held by the process that runs or audits; always empty.", "empty"),
)

_COMMAND = "python -m cflpriv.experiments.run.folder_reference > docs/reference/run_folder.md"
_HEAD = """For people who read run folders with their own code.

Reports and audits read these files only. `cflpriv verify RUN` checks them, and names what it could not check:
`checkpoints/` may be left out of a folder that is handed on, because it holds what clients keep to themselves.

A sweep's folder has a run folder for each run, `sweep.toml`, tables (`*.csv`, `*.parquet`) and pictures.
"""


def page() -> str:
    """docs/reference/run_folder.md."""
    lines = [_HEAD, "| file | content | format |", "|---|---|---|"]
    lines += [f"| `{file.pattern}` | {file.what} | {file.form} |" for file in FILES]
    for file in FILES:
        if file.keys:
            lines += [f"\n## {file.pattern}\n", "| key | meaning |", "|---|---|"]
            lines += [f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {meaning} |" for names, meaning in file.keys.items()]
            lines += [f"\nOther keys: {file.others}."] if file.others else []
    return generated_page("Files of a run folder", _COMMAND, "\n".join(lines) + "\n")


if __name__ == "__main__":
    print_file(page())
