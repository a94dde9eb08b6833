"""A model of a finished run as a `state_dict`, for a module of one's own."""

import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from ...algorithms.interface import Served
from ...algorithms.lg_fedavg import EvaluateParted
from ...contract.handles import Shared
from ...data import build_population
from ...data.class_names import same_name
from ...engine.device import using
from ...engine.models import Model
from ...engine.threads import one_thread
from ...errors import InputError
from ...files import write_atomically
from ...tasks.evaluation import EvaluateOwn
from ...types import Array, Population
from ..config.config import load_config, read_tree
from .checkpoint import restore
from .loop import Experiment, check_same_data, device_of
from .pipeline import OWN_ROWS, Pipeline, pipeline_of
from .resume import data_directory_of, last_checkpoint
from .run import prepare

__all__ = ["Exported", "client_column", "export_model", "exported_model", "models_of_clients", "table_pipeline"]


@dataclass(frozen=True, eq=False)
class Exported:
    """A model and what it takes: `name` says whose it is. Its input is (x − mean) / std, with one value a channel or one for all.

    `pipeline` is what turns rows of a table into its input, where the run was on a table. `features`: what turns images into x, as
    `data.features` names it ("none": the images themselves).
    """

    name: str
    model: Model
    state: Mapping[str, torch.Tensor]
    pipeline: Pipeline | None = None
    features: str = "none"

    @property
    def line(self) -> str:
        m = self.model
        shape = " x ".join(map(str, m.shape))
        made = "" if self.features == "none" else f" made of images by cflpriv.data.{self.features}.features,"
        return (
            f"{self.name}: {m.name}, input {shape}{made} as (x - {list(m.mean)}) / {list(m.std)}, {m.classes} outputs, "
            f"{m.dimension} parameters"
        )


def export_model(
    folder: str | Path,
    out: str | Path,
    data_dir: str | Path | None = None,
    *,
    cluster: int | None = None,
    client: int | None = None,
    population: Population | None = None,
    trust: bool = False,
) -> Exported:
    """Write a model of the run in `folder` to the file `out`, as safetensors or, by the ending .pt, for `torch.load(weights_only=True)`.

    A safetensors file of a run on a table has the pipeline for `cflpriv predict` in its metadata. For the other parameters and errors
    see `exported_model`.
    """
    folder, out = Path(folder), Path(out)
    if out.suffix not in (".safetensors", ".pt"):
        raise InputError(f"--out {out}: expected a file that ends in .safetensors or .pt")
    exported = exported_model(folder, data_dir, cluster=cluster, client=client, population=population, trust=trust)
    pipeline = None if exported.pipeline is None else exported.pipeline.to_json()
    packed = io.BytesIO()
    if out.suffix == ".pt":
        torch.save(exported.state, packed)
    else:
        packed.write(
            safetensors.torch.save(dict(exported.state), {"cflpriv": exported.line, **({} if pipeline is None else {"pipeline": pipeline})})
        )
    try:
        write_atomically(out, packed.getvalue())
    except OSError as error:
        raise InputError(f"--out {out}: cannot be written ({error.strerror})") from None
    return exported


def exported_model(
    folder: str | Path,
    data_dir: str | Path | None = None,
    *,
    cluster: int | None = None,
    client: int | None = None,
    population: Population | None = None,
    trust: bool = False,
    own: bool = True,
) -> Exported:
    """A model of the run in `folder`.

    The model of cluster number `cluster`, from 0; without a number, the run's only model. `client` asks for the last locally trained model
    of a client instead. Models that clients open are opened by one of them, as in the run's own measurements. `population`: the data of a
    run that was given them in Python. `trust`: whether code that the folder names runs, after its digests were checked (`trust`).
    `own`: whether rows of the client are at hand; if not, a model that needs their mean and deviation is refused.

    Raises `InputError` naming a run, cluster, client or file that does not fit: all that is missing at once.
    """
    folder = Path(folder)
    if cluster is not None and client is not None:
        raise InputError(f"--model {cluster}, --client {client}: give one of them")
    run = _restored(folder, data_dir, trust, population)
    pipeline = pipeline_of(run.config, run.population, client)
    needs = OWN_ROWS if not own and pipeline is not None and pipeline.scaling.per_client and not pipeline.mean else ""
    try:
        name, vector = _deployed(run, cluster) if client is None else _local(run, client)
    except InputError as error:
        raise InputError("; and ".join(filter(None, (str(error), needs)))) from None
    if needs:
        raise InputError(needs)
    model = run.config.model_for(run.population)
    state = {key: value.detach().clone() for key, value in model.lent(vector).state_dict().items()}
    run.backend.close(run)
    return Exported(name, model, state, pipeline, run.config.data.features)


def models_of_clients(
    folder: str | Path,
    names: Collection[str],
    data_dir: str | Path | None = None,
    *,
    population: Population | None = None,
    trust: bool = False,
) -> dict[str, Exported]:
    """For each of the named clients of a run on a table the model that it uses, with the client's own standardisation.

    It is the model that the run's own scores are of. Raises `InputError` for a client that the run does not have.
    """
    folder = Path(folder)
    run = _restored(folder, data_dir, trust, population)
    known = {same_name(name): number for number, name in enumerate(run.population.client_names)}
    clustering = run.algorithm.describe(run.state).get("clustering")
    served, model = run.algorithm.serve(run.state), run.config.model_for(run.population)
    of_their_own = set().union(*_alone(served))
    first: dict[bytes, str] = {}
    exported = {}
    for name in names:
        number = known.get(same_name(name))
        if number is None or (clustering is not None and number not in clustering.clients):
            raise InputError(f"client {name!r}: is not one of the run in {folder}; choose a cluster for its rows with --model K")
        with one_thread(), using(device_of(run.config)):
            (task_input,) = run.simulated.resolve(served.task, served.params, served.which, [number])
            used = getattr(served.task, "used", None)  # else all clients of a cluster use what they are sent
            vector = task_input.array("model") if used is None else used(task_input)
            state = {key: value.detach().clone() for key, value in model.lent(vector).state_dict().items()}
        whose = "shared model" if clustering is None or clustering.k == 1 else f"cluster {clustering[number]}"
        whose = whose if used is None and number not in of_their_own else f"client {number}"
        whose = first.setdefault(np.asarray(vector).tobytes(), whose)
        exported[name] = Exported(whose, model, state, pipeline_of(run.config, run.population, number))
    run.backend.close(run)
    return exported


def table_pipeline(exported: Exported, folder: str | Path) -> Pipeline:
    """The pipeline of a model of the run in `folder`. Raises `InputError` if the run is on no table."""
    if exported.pipeline is None:
        raise InputError(f"{folder}: is no run on a table, so it has no rows to predict")
    return exported.pipeline


def client_column(folder: str | Path) -> str:
    """The column of the client in the table of a run; empty if the run has none."""
    tree = read_tree(Path(folder) / "config.toml").get("data", {})
    column = tree.get("client_column", "") if isinstance(tree, dict) and tree.get("partition") == "given" else ""
    return column if isinstance(column, str) else ""


def _restored(folder: Path, data_dir: str | Path | None, trust: bool, population: Population | None = None) -> Experiment:
    """The run of a folder, as its last checkpoint has it."""
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder}: is not a run folder (no config.toml)")
    config, checkpoint = load_config(folder / "config.toml", trust=trust), last_checkpoint(folder)
    if checkpoint is None:
        raise InputError(f"{folder}: has no checkpoint, so no model yet; continue it with `cflpriv run … --resume`")
    if checkpoint.tree["parties"] is None:
        raise InputError(f"{folder}: is of a deployment, whose clients are elsewhere; models of simulations can be exported")
    people = population or build_population(config.data, data_dir or data_directory_of(folder))
    check_same_data(folder, checkpoint.progress["data_digest"], people)
    run = prepare(config, data_dir, people, **checkpoint.parties())
    run.state = restore(checkpoint, run.federation)
    run.backend.welcome(run, checkpoint.progress)
    return run


def _deployed(run: Experiment, cluster: int | None) -> tuple[str, Array]:
    """The model that the clients of a cluster use, or all clients. `InputError` if each client has a model of its own."""
    served = run.algorithm.serve(run.state)
    if _apart(served):
        raise InputError(f"--model: under {run.algorithm.name!r} every client has a model of its own; --client N gives that of client N")
    clustering = run.algorithm.describe(run.state).get("clustering")
    first = {} if clustering is None else {label: clustering.members(label) for label in range(clustering.k)}
    placed, asked = clustering is not None and served.which is not None, run.federation.clients[0]
    alone = _alone(served)
    if placed:
        _check(cluster, [label for label, members in first.items() if members])
        together = [member for member in first[cluster or 0] if member not in set().union(*alone)]
        if not together:
            raise _each_its_own(cluster)
        asked = together[0]
    (task_input,) = run.simulated.resolve(served.task, served.params, served.which, [asked])
    offered = getattr(served.task, "offered", None)  # of what clients are sent, which may be a part of each, or all in one
    value = task_input.params["model"] if offered is None else offered(task_input)
    if isinstance(value, list | tuple) and not placed:  # clients choose among all
        _check(cluster, list(range(len(value))))
        if len(alone) == len(value) and alone[cluster or 0]:
            raise _each_its_own(cluster)
        value = value[cluster or 0]
    elif isinstance(value, list | tuple):
        (value,) = value
    elif not placed:
        _check(cluster, [0])
    by_cluster = served.which is not None or cluster is not None
    return f"cluster {cluster or 0}" if by_cluster else "shared model", np.asarray(value)


def _apart(served: Served) -> bool:
    """Whether the models that clients use are their own, wholly or in part, so that none stands for another's."""
    model = served.params["model"]
    own = isinstance(model, Shared) and bool(model.own) and served.which is None
    return own or isinstance(served.task, EvaluateParted) or (isinstance(served.task, EvaluateOwn) and served.task.name == "trained")


def _alone(served: Served) -> list[set[int]]:
    """For each of several models the clients that have one of their own in its place, as where a cluster was too small for a sum."""
    models = served.params["model"]
    shared = [model if isinstance(model, Shared) else Shared() for model in (models if isinstance(models, list | tuple) else [models])]
    return [{client for own in model.own for client in own.held.clients} for model in shared]


def _each_its_own(cluster: int | None) -> InputError:
    return InputError(f"--model {cluster or 0}: each client of this cluster has a model of its own; --client N gives that of client N")


def _check(cluster: int | None, known: list[int]) -> None:
    if cluster is None and len(known) > 1:
        raise InputError(f"--model: there are several; known are {', '.join(map(str, known))}")
    if (cluster or 0) not in known:
        raise InputError(f"--model {cluster}: there is no such cluster; known are {', '.join(map(str, known))}")


def _local(run: Experiment, client: int) -> tuple[str, Array]:
    """The last locally trained model of a client."""
    if client not in run.simulated.data:
        raise InputError(f"--client {client}: is not one of the run; known are {', '.join(map(str, sorted(run.simulated.data)))}")
    vector = run.simulated.recall(client, "trained")
    if vector is None:
        raise InputError(f"--client {client}: has not trained in this run")
    return f"client {client}", vector
