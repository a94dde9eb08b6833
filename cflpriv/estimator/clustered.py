"""`ClusteredFL`: find groups of clients in a table, train a model for each, predict, and measure what leaks.

It does what `cflpriv run`, `predict`, `audit` and `report` do, with the same settings, in scikit-learn's conventions: `to_config` gives the
configuration, `from_config` takes one.
"""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import balanced_accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from ..algorithms import ALGORITHMS
from ..console import counted
from ..contract.protection import Protection
from ..data.class_names import same_name
from ..data.column_guesses import guessed_columns, is_usual
from ..data.columns import cell_name
from ..data.population import table_population
from ..data.raw_tables import FRAME, TABLES
from ..errors import CflprivWarning, DataWarning, InputError
from ..experiments.config.config import SECTIONS, Config, load_config, parse_config
from ..experiments.config.sections import DataSection, ModelSection, RunSection, TrainingSection
from ..experiments.config.table_starter import TABLE_KEYS
from ..experiments.report.shown import AuditFindings, ReportPage, temporary_folder
from ..experiments.run.export import models_of_clients
from ..experiments.run.folder import run_experiment
from ..experiments.run.pipeline import Predictions, joined, predict
from ..privacy.settings import Privacy
from ..progress import run_progress
from ..protocols.bounded_files import read_json
from ..types import Array, Population
from .frames import FrameRows, as_columns, cells_of, numeric, one_client, rows_of
from .saved import SavedClient, read_estimator, write_estimator

__all__ = ["ClusteredFL"]

LOG = logging.getLogger("cflpriv")
FEWEST_ROWS = 2
"""A client standardises its features by this many rows or more: with one row all of them would be 0."""
SHORT = {
    "rounds": "training", "epochs": "training", "lr": "training", "batch_size": "training", "record": "run", "seed": "run",
}  # fmt: skip
"""Keys of sections that are parameters, too, so that searches over them need no section."""

Keys = Mapping[str, Any]
MOST_CLIPPED = 0.5
"""Above so many clipped values a row, predictions are warned of: a column in another unit has about one."""
FEWEST_CLIPPED, MOST_SHOWN = 5, 3
_SHOWN: set[str] = set()
"""The warnings that this process has shown or logged. `summary_` has those of each fit."""


def _log(line: str) -> None:
    """A line of a run or an audit, for whoever listens to the logger "cflpriv"; Python prints warnings to those who do not."""
    words = line.removeprefix("warning: ")
    if words == line:
        LOG.info(line)
    elif words not in _SHOWN:
        _SHOWN.add(words)
        LOG.warning(words)


def _warn_once(lines: Sequence[str]) -> None:
    """Doubts about the data of a fit, as warnings that this process has not had. A run only prints them among its notes."""
    for line in lines:
        if line not in _SHOWN:
            _SHOWN.add(line)
            warnings.warn(line, DataWarning, stacklevel=3)


def _shares(parts: Mapping[str, Predictions]) -> Array:
    """The probabilities of the predictions for each client.

    Warns if more than `MOST_CLIPPED` clipped values a row of a client with `FEWEST_CLIPPED` of them are outside the ranges of the training.
    """
    beyond = {
        name: part for name, part in parts.items()
        if part.clipped > MOST_CLIPPED * max(1, len(part.rows)) and (part.clipped >= FEWEST_CLIPPED or len(parts) == 1)
    }  # fmt: skip
    if beyond:
        clipped, rows = sum(part.clipped for part in beyond.values()), sum(len(part.rows) for part in beyond.values())
        some = ", ".join(map(repr, [*beyond][:MOST_SHOWN])) + (", …" if len(beyond) > MOST_SHOWN else "")
        of = "" if len(beyond) == len(parts) else f" of client{'s' if len(beyond) > 1 else ''} {some}"
        words = f"X: {counted(clipped, 'value')} in {counted(rows, 'row')}{of} are outside the ranges of the training, and were clipped"
        warnings.warn(f"{words}; are all columns in the units that fit had?", CflprivWarning, stacklevel=3)
    return joined(list(parts.values())).shares


@contextmanager
def _each_once() -> Iterator[None]:
    """Without the warnings that were shown before: each fold of a cross-validation would repeat them."""
    with warnings.catch_warnings():
        for words in _SHOWN:
            warnings.filterwarnings("ignore", re.escape(words), CflprivWarning)
        yield


class ClusteredFL(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Cluster clients by protected evidence, train a model for each cluster, and measure what leaks.

    Every parameter but `folder` and `verbose` is a section or a key of a configuration. A section is an object, such as
    `Protection(sum="secagg")`, or a mapping of the keys that differ from those of a new experiment on a table (`cflpriv init --data`).

    Args:
        algorithm: an algorithm's name, or a mapping with `name` and its keys.
        rounds, epochs, lr, batch_size: keys of `[training]`. They take the place of those in `training`.
        record, seed: keys of `[run]`. An audit needs record="attackable" or "full".
        data, model, training, protection, privacy, run: the sections. `model` may be an architecture's name.
        folder: where each `fit` makes its run folder; by default a temporary one, which is removed when the process ends.
        verbose: whether `fit` draws its progress on a terminal or in a notebook.

    Attributes:
        classes_: the classes (n,), sorted. clients_: the clients (n,). labels_: the cluster of each client.
        n_clusters_: number of clusters. p_value_: of the test for groups; None without such a test.
        epsilon_: what was spent; None without differential privacy.
        summary_: the run's results. folder_: its run folder. config_: its configuration.
        n_features_in_, feature_names_in_ (of a data frame): the features.

    The features of each client are standardised by its own rows, which stay with it. Columns of texts, dates or blanks are encoded by a
    schema that is guessed from the table and is public from then on (`data={"columns": ...}` gives one). A share of each client's rows
    (`data.test_share`, 0.2) is held out for the results in `summary_`.

    A warning is shown once in a process; `summary_` has those of each fit, and doubts about data (`errors.DataWarning`) as notes. Methods
    raise `InputError`, which is a `ValueError`, naming what cannot be used.
    """

    __metadata_request__fit: ClassVar = {"client": True}
    __metadata_request__predict: ClassVar = {"client": True}
    __metadata_request__predict_proba: ClassVar = {"client": True}
    __metadata_request__score: ClassVar = {"client": True}
    _names: tuple[str, ...]

    def __init__(
        self,
        algorithm: str | Keys = "crossfit",
        *,
        rounds: int | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        batch_size: int | None = None,
        record: str | None = None,
        seed: int | None = None,
        data: DataSection | Keys | None = None,
        model: ModelSection | Keys | str | None = None,
        training: TrainingSection | Keys | None = None,
        protection: Protection | Keys | None = None,
        privacy: Privacy | Keys | None = None,
        run: RunSection | Keys | None = None,
        folder: str | Path | None = None,
        verbose: bool = True,
    ) -> None:
        self.algorithm = algorithm
        self.rounds = rounds
        self.epochs = epochs
        self.lr = lr
        self.batch_size = batch_size
        self.record = record
        self.seed = seed
        self.data = data
        self.model = model
        self.training = training
        self.protection = protection
        self.privacy = privacy
        self.run = run
        self.folder = folder
        self.verbose = verbose

    # --- the configuration

    @classmethod
    def from_config(cls, config: Config | Mapping[str, Any] | str | Path, **others: Any) -> "ClusteredFL":
        """The estimator of a configuration: a file, a mapping of sections, or a `Config`. `others`: `folder` and `verbose`."""
        if isinstance(config, str | Path):
            config = load_config(config)
        elif not isinstance(config, Config):
            config = parse_config(config)
        return cls(dict(config.algorithm), **{name: getattr(config, name) for name in SECTIONS}, **others)

    def to_config(self) -> Config:
        """The configuration, with every key resolved. Its data are those of `fit`, if no other were given."""
        algorithm = {"name": self.algorithm} if isinstance(self.algorithm, str) else dict(self.algorithm)
        spec = ALGORITHMS.find(algorithm.get("name", ""))
        begins: dict[str, dict[str, Any]] = {"data": {"source": FRAME, "partition": "given"}}
        for path, value in {**TABLE_KEYS, **({} if spec is None else spec.begins)}.items():
            section, _, key = path.partition(".")
            begins.setdefault(section, {})[key] = value
        own = begins.get("algorithm", {}) if isinstance(self.algorithm, str) else {}
        tree: dict[str, Any] = {"algorithm": {**own, **algorithm}}
        for name in SECTIONS:
            given = {"name": self.model} if name == "model" and isinstance(self.model, str) else getattr(self, name)
            short = {key: value for key, section in SHORT.items() if section == name and (value := getattr(self, key)) is not None}
            if given is None or isinstance(given, Mapping):
                tree[name] = {**begins.get(name, {}), **(given or {}), **short}
            else:
                tree[name] = replace(given, **short) if short else given
        return parse_config(tree, type(self).__name__)

    # --- fit and predict

    def fit(self, X: Any, y: Any = None, *, client: Any = None, label: str | None = None) -> "ClusteredFL":
        """Find clusters and train their models.

        Args:
            X: a data frame (pandas, polars, pyarrow, …), a mapping of columns by name, or an array (rows, features).
            y: labels (rows,), unless `label` names their column.
            client: the column that names each row's client, or clients (rows,); None: that of `data`, else all rows are of one client.
            label: the column of labels; None: that of `data`.
        """
        config = self.to_config()
        columns = as_columns(X) or {}
        client = config.data.client_column if client is None and config.data.client_column in columns else client
        label = config.data.label_column if label is None and y is None and config.data.label_column in columns else label
        if config.data.label_type != "class":
            raise InputError(
                f"data.label_type = {config.data.label_type!r}: {type(self).__name__} predicts classes; for a regression write the rows "
                "into a file, and give it to cflpriv init --data FILE and cflpriv run"
            )
        rows = self._rows(X, y, client, label, reset=True)
        alone = () if client is not None else (one_client(rows),)
        config, remarks = self._of_rows(config, rows)
        population = table_population(config.data, [rows.table])
        left_out = {column.name for column in config.data.columns if column.type == "ignore"}
        doubts = [f"column {name!r} is left out: {remark}" for name, remark in remarks.items() if name in left_out and not is_usual(remark)]
        notes = [f"column {name!r}: {remark}" for name, remark in remarks.items()]
        population = replace(population, warnings=(*doubts, *population.warnings), notes=(*alone, *population.notes, *notes))
        base = temporary_folder() if self.folder is None else Path(self.folder)
        base.mkdir(parents=True, exist_ok=True)
        self.folder_ = Path(mkdtemp(prefix="run-", dir=base)) / "run"
        self.config_ = config
        for line in alone:
            _log(f"warning: {line}")
        _warn_once(population.doubts)
        with run_progress(config.training.rounds, Console(), shown=bool(self.verbose)) as progress, _each_once():
            self.summary_ = run_experiment(
                config, self.folder_, population=population, report=_log, tick=progress.tick, step=progress.step
            )  # fmt: skip
        self._population = population
        with _each_once():
            self._describe(rows, population)
        return self

    def _of_rows(self, config: Config, rows: FrameRows) -> tuple[Config, Mapping[str, str]]:
        """The configuration with the columns of a table, and a schema if cells are no numbers; and remarks on its columns."""
        data = config.data
        if data.source not in TABLES or data.partition != "given":
            raise InputError(
                f"data.source = {data.source!r}, partition = {data.partition!r}: fit takes a table with its clients, so leave them out; "
                "run_experiment(fl.to_config(), folder) runs on the configuration's own data"
            )
        changes: dict[str, Any] = {"source": FRAME, "paths": (), "client_column": rows.client, "label_column": rows.label}
        features, remarks = _features(rows.features, config), dict[str, str]()
        if not data.columns and data.standardise == "auto" and not numeric(rows.table, features):
            changes["columns"], remarks = guessed_columns(rows.table, set(rows.table.columns).difference(features))
            LOG.info("the ranges and categories of the schema were taken from the table and are public from now on")
        if not data.class_names and rows.labels is not None and rows.labels.dtype.kind in "biuf":
            changes["class_names"] = tuple(cell_name(value) for value in np.unique(rows.labels).tolist())
        return config.with_("data", **changes), remarks

    def _describe(self, rows: FrameRows, population: Population) -> None:
        """What a fitted estimator shows, and the model of each client."""
        assert rows.labels is not None
        assert rows.owners is not None
        self.classes_ = _original(population.class_names, rows.labels)
        self.clients_ = _original(population.client_names, rows.owners)
        self._columns = {"client": rows.client, "label": rows.label}
        exported = models_of_clients(self.folder_, population.client_names, population=population)
        self._models = {
            same_name(name): SavedClient(exported[name].name, _there(exported[name].pipeline), exported[name].state)
            for name in population.client_names
        }
        measured = read_json(self.folder_ / "measured.json")
        self.labels_ = self._clusters(measured["labels"], [client.id for client in population.clients])
        self.n_clusters_ = int(self.labels_.max()) + 1
        self.p_value_ = measured.get("p", measured.get("p_at_least"))
        self.epsilon_ = self.summary_["epsilon"]

    def _clusters(self, known: Mapping[str, int] | None, clients: Sequence[int]) -> Array:
        """The cluster of each client; where the server does not know it, by the models that clients use, unless each has its own."""
        if known is not None:
            return np.array([known.get(str(client), 0) for client in clients])
        used = [model.whose for model in self._models.values()]
        distinct = list(dict.fromkeys(used))
        return np.array([distinct.index(whose) if len(distinct) < len(used) else 0 for whose in used])

    def predict(self, X: Any, *, client: Any = None, cluster: int | None = None) -> Array:
        """The class of each row (rows,), by the model of its client's cluster.

        Args:
            client: as in `fit`; it may be left out if the model needs no client's own statistics.
            cluster: a number of `labels_`. The model of this cluster predicts all rows. A new client needs it: choose the cluster that
                `score`s best on labelled rows of the client. Features that clients standardise by their own rows are standardised by each
                client's rows in `X`, so give many rows at once.

        Raises `InputError` for a client that was not there in `fit`, if no `cluster` is given.
        """
        shares = self.predict_proba(X, client=client, cluster=cluster)
        return np.asarray(self.classes_[shares.argmax(1)])

    def predict_proba(self, X: Any, *, client: Any = None, cluster: int | None = None) -> Array:
        """The probability of each class (rows, classes). For the arguments and errors see `predict`."""
        check_is_fitted(self)
        rows = self._rows(X, None, client, None, reset=False)
        if not rows.table.rows:
            raise InputError("X: has no rows")
        if cluster is not None:
            return self._by_cluster(rows, cluster)
        if rows.owners is None:
            shared = self._shared()
            return _shares({"": predict(shared.pipeline, shared.state, rows.table)})
        names = [same_name(name) for name in rows.table.names("client_column", rows.client)]
        parts: dict[str, Predictions] = {}
        for name in dict.fromkeys(names):
            if name not in self._models:
                raise InputError(
                    f"client {name!r}: was not there in fit, so no cluster is known to be its own; predict(rows, cluster=K) takes the "
                    f"model of cluster K, 0 to {self.n_clusters_ - 1}; there are {self._known()}"
                )
            own = [row for row, owner in enumerate(names) if owner == name]
            parts[name] = predict(self._models[name].pipeline, self._models[name].state, rows.table.only(own))
        return _shares(parts)

    def _by_cluster(self, rows: FrameRows, cluster: int) -> Array:
        """The probabilities by the model of a cluster; if the model needs clients' statistics, those of their rows here are taken."""
        members = [self._models[same_name(str(name))] for name in self.clients_[self.labels_ == cluster].tolist()]
        if not members or len({member.whose for member in members}) > 1:
            why = "its clients have models of their own" if members else f"there are 0 to {self.n_clusters_ - 1}"
            raise InputError(f"cluster = {cluster!r}: {why}")
        pipeline, names = replace(members[0].pipeline, mean=(), std=()), [""] * rows.table.rows
        if pipeline.scaling.per_client and rows.owners is not None:
            names = rows.table.names("client_column", rows.client)
        parts: dict[str, Predictions] = {}
        for name in dict.fromkeys(names):
            table = rows.table.only([row for row, owner in enumerate(names) if owner == name])
            if pipeline.scaling.per_client and table.rows < FEWEST_ROWS:
                raise InputError(f"client {name!r}: {counted(table.rows, 'row')}, and {FEWEST_ROWS} are needed to standardise its features")
            parts[name] = predict(pipeline, members[0].state, table, table if pipeline.scaling.per_client else None)
        return _shares(parts)

    def _shared(self) -> SavedClient:
        """The model for rows that name no client. Raises `InputError` where clients have models or statistics of their own."""
        first = next(iter(self._models.values()))
        if len(self._models) > 1 and (len({model.whose for model in self._models.values()}) > 1 or first.pipeline.mean):
            raise InputError(f"client: is needed, since clients have models or statistics of their own; there are {self._known()}")
        return first

    def _known(self) -> str:
        some = [str(name) for name in self.clients_[:10].tolist()]
        return ", ".join(some) + (", …" if len(self.clients_) > len(some) else "")

    def score(self, X: Any, y: Any = None, *, client: Any = None, label: str | None = None, cluster: int | None = None) -> float:
        """Balanced accuracy: the mean over classes of the share of rows that are right. Guessing the majority class gives 1 / classes.

        `client` and `cluster` are as in `predict`.
        """
        columns = None if label is None else as_columns(X)
        if label is not None and (columns is None or label not in columns):
            raise InputError(f"label={label!r}: is no column")
        truth = cells_of(y if columns is None else columns[str(label)])
        number = {same_name(cell_name(value)): place for place, value in enumerate(self._fitted_classes())}
        codes = [number.get(same_name(cell_name(value)), -1) for value in truth.tolist()]
        found = self.predict_proba(X, client=client, cluster=cluster).argmax(1)
        return float(balanced_accuracy_score(codes, found))

    def _fitted_classes(self) -> list[Any]:
        check_is_fitted(self)
        return list(self.classes_.tolist())

    def _rows(self, X: Any, y: Any, client: Any, label: str | None, *, reset: bool) -> FrameRows:
        """The rows as a table. For arrays with scikit-learn's own checks; sets what a fitted estimator knows of its features."""
        columns = as_columns(X)
        framed = columns is not None
        if columns is None:
            try:
                X, y = validate_data(self, X, y) if reset else (validate_data(self, X, reset=False), None)
            except ValueError as error:
                raise InputError(f"X: {' '.join(str(error).split())}") from None
            names = [f"x{i}" for i in range(X.shape[1])] if reset else self._names
            columns = {name: X[:, i].tolist() for i, name in enumerate(names)}
        if not reset:
            return self._new_rows(columns, client)
        client = np.zeros(len(next(iter(columns.values()), ())), int) if client is None else client
        rows = rows_of(columns, y, client, label, {})
        if rows.labels is None:
            raise InputError("y: fit needs labels, as y or as the name of their column, label=")
        if rows.labels.dtype.kind == "f":
            check_classification_targets(rows.labels)
        self._names = rows.features
        self.n_features_in_ = len(rows.features)
        if framed:
            self.feature_names_in_ = np.array(rows.features, object)
        return rows

    def _new_rows(self, columns: Mapping[str, Sequence[Any]], client: Any) -> FrameRows:
        """FrameRows to predict: the columns of the features, in their order, and that of the client."""
        if client is None and self._columns["client"] in columns:
            client = self._columns["client"]
        rows = rows_of(columns, None, client, None, self._columns)
        needed = _features(self._names, self.config_)
        if missing := [name for name in needed if name not in rows.features]:
            raise InputError(f"X: has no column {missing[0]!r}, which the model was fitted on")
        kept = [*needed, *filter(None, (rows.client,))]
        return replace(rows, table=replace(rows.table, columns={name: rows.table.columns[name] for name in kept}))

    # --- what was found

    def plot_clusters(self, ax: Any = None) -> Any:
        """The cluster of each client, as matplotlib's Axes (`ax`, or the current one)."""
        check_is_fitted(self)
        from .plots import clusters_plot

        return clusters_plot([str(name) for name in self.clients_.tolist()], self.labels_, ax)

    def plot_rounds(self, ax: Any = None) -> Any:
        """The mean accuracy of the clients after each round, as matplotlib's Axes (`ax`, or the current one)."""
        from .plots import rounds_plot

        return rounds_plot(self._run_folder() / "rounds.jsonl", ax)

    def audit(self, attacks: Sequence[str] | None = None, budget: str = "quick", **options: Any) -> AuditFindings:
        """Attack the recorded run (`record` must be "attackable" or "full"); `options` are those of `audit_run`.

        Raises `InputError` for a run whose payloads were not recorded, and for an estimator that was loaded, which has no rows.
        """
        folder = self._run_folder()
        if not hasattr(self, "_population"):
            raise InputError(
                "audit: needs the rows that fit took, and an estimator that was loaded has none; call it before save, or fit again"
            )
        from ..attacks.audit import audit_run

        return audit_run(folder, attacks=attacks, budget=budget, population=self._population, report=_log, **options)

    def report(self, path: str | Path | None = None) -> ReportPage:
        """The report of the run, and of its audit if there was one, as one page; a copy at `path`, if it is given."""
        from ..experiments.report.report import write_report

        return ReportPage(write_report(self._run_folder())).copied(path)

    def _run_folder(self) -> Path:
        check_is_fitted(self)
        if not self.folder_.is_dir():
            raise InputError(f"{self.folder_}: the run folder is not there any more; ClusteredFL(folder=FOLDER) makes one that stays")
        return Path(self.folder_)

    def _html_repr(self) -> str:
        from sklearn.utils._repr_html.estimator import estimator_html_repr

        from .plots import fitted_html

        shown = str(estimator_html_repr(self))
        return shown + fitted_html(self.clients_, self.labels_, self.summary_) if hasattr(self, "_models") else shown

    # --- files

    def save(self, folder: str | Path) -> None:
        """Write the models, their pipelines and the parameters into a new folder, as safetensors and JSON.

        Reveals: the mean and deviation of each client's features, where clients standardise by their own rows.
        """
        check_is_fitted(self)
        facts = {
            "classes": self.classes_, "clients": self.clients_, "labels": self.labels_, "p_value": self.p_value_, "epsilon": self.epsilon_,
            "n_features_in": self.n_features_in_, "names": self._names, "framed": hasattr(self, "feature_names_in_"),
            "columns": self._columns, "summary": self.summary_, "run_folder": str(self.folder_),
        }  # fmt: skip
        write_estimator(Path(folder), self.config_, facts, self._models)

    @classmethod
    def load(cls, folder: str | Path) -> "ClusteredFL":
        """A fitted estimator that `save` wrote. Nothing in the folder is run or unpickled. Raises `InputError` naming a damaged file."""
        config, facts, models = read_estimator(Path(folder))
        self = cls.from_config(replace(config, data=DataSection(source=FRAME, partition="given")))
        self.config_, self._models = config, models
        self.classes_, self.clients_, self.labels_ = facts["classes"], facts["clients"], facts["labels"]
        self.n_clusters_ = int(self.labels_.max()) + 1
        self.p_value_, self.epsilon_, self.summary_ = facts["p_value"], facts["epsilon"], facts["summary"]
        self.n_features_in_, self._names, self._columns = facts["n_features_in"], facts["names"], facts["columns"]
        if facts["framed"]:
            self.feature_names_in_ = np.array(self._names, object)
        self.folder_ = Path(facts["run_folder"])
        return self


def _features(names: Sequence[str], config: Config) -> tuple[str, ...]:
    """The columns of features: those of groups and times are some only where the schema has them."""
    others = {config.data.group_column, config.data.time_column}.difference(column.name for column in config.data.columns)
    return tuple(name for name in names if name not in others)


def _original(names: Sequence[str], values: Array) -> Array:
    """Names of the table, as the values that they were given as: numbers stay numbers."""
    if values.dtype.kind not in "biuf":
        return np.array(names)
    by_name = {cell_name(value): value for value in np.unique(values).tolist()}
    return np.array([by_name[name] for name in names], values.dtype)


def _there(pipeline: Any) -> Any:
    assert pipeline is not None  # the run is on a table
    return pipeline
