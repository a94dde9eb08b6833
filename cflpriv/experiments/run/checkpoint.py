"""A run's state on disk, complete enough to resume: what the server holds and, apart from it, what simulated parties hold.

`NAME.json` is the structure, `NAME.safetensors` the server's arrays. `NAME.clients.safetensors` holds what clients and key holder of a
simulation keep (values, memory, protocol machines, identities): it is as secret as the folder `secrets/`, a deployed server does not have
it, and no adversary's view reads it. A local model in span form is kept in it (`engine.span`), and an array that several values share is
written once. The JSON file is written last and carries the digests of the others and of itself, so a checkpoint is
complete or absent. Nothing that depends on the clock is in it: the same run gives the same bytes.

Reading makes only the types in `TYPES`, which algorithms declare; there is no pickle and no import by name.
"""

import json
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ...algorithms import STATES
from ...algorithms.interface import state_name
from ...array_files import read_safetensors
from ...clustering.similarity import SimilarityMatrix
from ...contract.handles import GroupMean, Held, HeldKey, OwnAddend, Shared
from ...contract.transformed_parts import Transformed
from ...engine import Deferred
from ...engine.models import Model
from ...engine.span import Movement
from ...errors import InputError
from ...federation.epochs import Epoch
from ...federation.server import FederationServer
from ...federation.store import ObjectStore
from ...federation.task_encoding import made, plain
from ...federation.values import keep_values, kept_values
from ...files import PRIVATE, write_arrays, write_atomically
from ...protocols.bounded_files import open_regular, read_json
from ...protocols.keys import Identity
from ...transports.simulation import Simulated
from ...types import Array, ClientData, Clustering

__all__ = [
    "TYPES", "Checkpoint", "flatten", "latest", "load_checkpoint", "prune", "restore", "save_checkpoint",
]  # fmt: skip

FORMAT, OLDEST_FORMAT = 4, 2  # format 2: every value is an array of its own; formats 2 and 3: names of types with their packages

TYPES: Mapping[str, type] = ChainMap(
    {state_name(kind): kind for kind in (Shared, Transformed, OwnAddend, GroupMean, Clustering, SimilarityMatrix)}, STATES
)
"""The dataclasses that a state may be made of, by `state_name`: these, and what algorithms declare as their `states`."""
_RENAMED: Mapping[str, str] = {
    "handles.Blind": "transformed_parts.Transformed", "handles.Own": "handles.OwnAddend",
    "crossfit.State": "crossfit.CrossfitState", "fedavg.State": "fedavg.FedAvgState", "fedfomo.State": "fedfomo.FedFomoState",
    "fedgwc.Cluster": "fedgwc.GwcCluster", "fedgwc.State": "fedgwc.FedGwcState", "fedproto.State": "fedproto.FedProtoState",
    "fedsoft.State": "fedsoft.FedSoftState", "fesem.State": "fesem.FesemState", "fixed.State": "fixed.FixedState",
    "flexcfl.State": "flexcfl.FlexCflState", "local.State": "local.LocalState", "meeting.State": "meeting.StocflState",
    "ocfl.State": "ocfl.OcflState", "one_shot.State": "one_shot.OneShotState", "pacfl.State": "pacfl.PacflState",
    "parameter_tree.Node": "parameter_tree.TreeNode", "parameter_tree.Seen": "parameter_tree.SeenSimilarities",
    "parameter_tree.State": "parameter_tree.CflState", "pfedlia.State": "pfedlia.PfedliaState", "pina.State": "pina.PinaState",
    "private_clusters.State": "private_clusters.PrivateClustersState", "r_dpcfl.State": "r_dpcfl.RDpcflState",
    "restarts.State": "restarts.IfcaState", "rr_cluster.State": "rr_cluster.RrClusterState", "scaffold.State": "scaffold.ScaffoldState",
}  # fmt: skip
"""`state_name` in earlier versions -> in this version."""
_RENAMED_FIELDS: Mapping[type, Mapping[str, str]] = {Shared: {"blind": "transformed"}}
"""Names of fields in earlier versions -> in this version, by type."""


def _type_of(name: Any) -> type | None:
    """The type of that name. Formats 2 and 3 write the packages before it, such as "algorithms.pacfl.State"."""
    if not isinstance(name, str):
        return None
    words = name.split(".")
    names = [".".join(words[i:]) for i in range(len(words) - 1)] or [name]
    return next((TYPES[known] for each in names if (known := _RENAMED.get(each, each)) in TYPES), None)


# --- out ------------------------------------------------------------------------------------------------------------------------------


@dataclass
class _Out:
    """Collects a state: the server's arrays, those of other parties, and the handles found, by key.

    `data` is that of the clients of a simulation. `known` has, by id, the arrays of other parties and where they are.
    """

    data: Mapping[int, ClientData] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    keys: dict[HeldKey, str] = field(default_factory=dict)
    known: dict[int, tuple[Any, str]] = field(default_factory=dict)

    def walk(self, value: Any, path: str, arrays: dict[str, Any]) -> Any:
        """JSON for a value; its arrays go to `arrays` by path."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.ndarray | np.generic | bytes):
            kind = "bytes" if isinstance(value, bytes) else "scalar" if isinstance(value, np.generic) else "array"
            if kind == "array" and arrays is self.others:
                return {"array": self._once(value, path)}
            arrays[path] = np.array(bytearray(value), dtype=np.uint8) if isinstance(value, bytes) else np.asarray(value)
            return {kind: path}
        if isinstance(value, Held):
            place = self.keys.setdefault(value.key, path)
            return {"held": place, "clients": list(value.clients), "parts": list(value.parts)}
        if arrays is self.others and isinstance(value, Deferred):
            return {"sum": [self.walk(part, f"{path}/{i}", arrays) for i, part in enumerate((value.first, value.second))]}
        if arrays is self.others and isinstance(value, Movement) and self._own(value):
            return {"span": self._span(value, path)}
        if hasattr(value, "__array__"):  # computed on demand, one at a time, when it is written
            arrays[path] = value
            return {"array": path}
        if (is_dataclass(value) and not isinstance(value, type)) or isinstance(value, msgspec.Struct):
            if TYPES.get(state_name(type(value))) is not type(value):
                raise TypeError(
                    f"checkpoint: {path} is a {state_name(type(value))}, which no algorithm declares among its states (checkpoint.TYPES)"
                )
            names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else [entry.name for entry in fields(value) if entry.init]
            inner = {name: self.walk(getattr(value, name), f"{path}/{name}", arrays) for name in names}
            return {"type": state_name(type(value)), "fields": inner}
        if isinstance(value, Mapping):
            return {"mapping": [[self.walk(key, path, arrays), self.walk(item, f"{path}/{key}", arrays)] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            items = [self.walk(item, f"{path}/{i}", arrays) for i, item in enumerate(value)]
            return {"items" if isinstance(value, tuple) else "list": items}
        raise TypeError(f"checkpoint: {path} is a {type(value).__name__}, which a state may not hold")

    def _once(self, value: Any, path: str) -> str:
        """The path of an array or tensor of other parties. At the first call the array is written to `path`."""
        if id(value) not in self.known:
            self.known[id(value)] = value, path  # the value too, so that its id stays its own
            self.others[path] = np.asarray(value)
        return self.known[id(value)][1]

    def _own(self, value: Movement) -> bool:
        """Whether the movement can be recomputed from a client's data: it uses all of the data, and its model can be saved."""
        return value.data is not None and self.data.get(value.data.id) is value.data and value.model.factory is None

    def _span(self, value: Movement, path: str) -> dict[str, Any]:
        arrays = {name: getattr(value, name) for name in ("a", "tail", "start", "anchor") if getattr(value, name) is not None}
        return {
            "client": value.data.id,
            "model": _plain_model(value.model),
            "arrays": {name: self._once(array, f"{path}/{name}") for name, array in arrays.items()},
            "factors": [value.width, value.more_start, value.more_anchor],
        }

    def held(self, federation: FederationServer) -> dict[str, Any]:
        """What the server knows of the values behind the handles found, and their open epochs."""
        keys: dict[str, Any] = {}
        epochs: list[dict[str, Any]] = []
        numbers: dict[int, int] = {}
        for key, place in list(self.keys.items()):
            entries = []
            for part, epoch in federation.epochs.entered.get(key, ()):
                if id(epoch) not in numbers:
                    numbers[id(epoch)] = len(epochs)
                    epochs.append(self._epoch(epoch))
                entries.append([part, numbers[id(epoch)]])
            keys[place] = {"name": key.name, "known": federation.known(key), "epochs": entries}
        return {"keys": keys, "epochs": epochs}

    def _epoch(self, epoch: Epoch[Any]) -> dict[str, Any]:
        path = f"epochs/{epoch.number}"
        return {
            "number": epoch.number,
            "clients": list(epoch.clients),
            "shape": list(epoch.shape),
            "memory": self.walk(epoch.memory, f"{path}/memory", self.server),
            "session": self.walk(epoch.session.saved(), f"{path}/session", self.server),
        }

    def parties(self, simulated: Simulated) -> dict[str, Any]:
        """What the parties of a simulation keep: values as arrays, all else as bytes."""
        seeds = {
            place: [identity.client, identity.signing_seed, identity.encryption_seed] for place, identity in simulated.identities.items()
        }
        stores = {}
        for place, store in simulated.stores.items():
            values, rest = kept_values(store)
            path = f"parties/{place}"
            arrays = [[name, self.walk(made, f"{path}/{name}", self.others), origin.hex()] for name, made, origin in values]
            stores[str(place)] = {"values": arrays, "rest": self.walk(msgspec.msgpack.encode(rest), f"{path}/rest", self.others)}
        return {"identities": self.walk(msgspec.msgpack.encode(seeds), "parties/identities", self.others), "stores": stores}


@lru_cache(maxsize=8)
def _plain_model(model: Model) -> Any:
    """A model's description as JSON: movements of all clients have the same."""
    return plain(model, "Model", {"Model": Model})


def flatten(state: Any) -> tuple[Any, dict[str, Any]]:
    """A state as (JSON tree, the server's arrays by path)."""
    out = _Out()
    return out.walk(state, "state", out.server), out.server


def save_checkpoint(
    folder: Path, name: str, state: Any, federation: FederationServer, progress: Mapping[str, Any] | None = None,
    simulated: Simulated | None = None,
) -> int:  # fmt: skip
    """Write a checkpoint into `folder`; its size in bytes. `progress` is the run's own state, `simulated` has the clients' side.

    Raises OSError where it cannot be written; an earlier checkpoint of another name is untouched then.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    out = _Out({} if simulated is None else simulated.data)
    tree = {
        "format": FORMAT,
        "state": out.walk(state, "state", out.server),
        "federation": out.walk(federation.saved(), "federation", out.server),
        "progress": dict(progress or {}),
        "held": out.held(federation),
        "receipts": None if federation.privacy_ledger is None else federation.privacy_ledger.saved(out.keys),
        "parties": None if simulated is None else out.parties(simulated),
    }
    files, size = {}, 0
    for file, arrays in ((f"{name}.safetensors", out.server), (f"{name}.clients.safetensors", out.others)):
        if arrays is out.server or simulated is not None:
            files[file], written = write_arrays(folder / file, arrays)
            size += written
    tree["files"] = files
    tree["digest"] = tree_digest(tree)
    write_atomically(folder / f"{name}.json", json.dumps(tree, sort_keys=True) + "\n", PRIVATE)
    return size


def tree_digest(tree: Mapping[str, Any]) -> str:
    text = json.dumps({key: value for key, value in tree.items() if key != "digest"}, sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def prune(folder: Path, keep: str) -> None:
    """Remove the checkpoints of rounds other than `keep`: the JSON file first, so that none is ever incomplete."""
    for path in sorted(folder.glob("round_*"), key=lambda path: (path.suffix != ".json", path.name)):
        if path.name.split(".")[0] != keep:
            path.unlink(missing_ok=True)


# --- in -------------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint, read and verified; `restore` turns it into a state."""

    path: Path
    tree: Mapping[str, Any]
    server: Mapping[str, Array]
    others: Mapping[str, Array]

    @property
    def progress(self) -> Mapping[str, Any]:
        progress: Mapping[str, Any] = self.tree["progress"]
        return progress

    @property
    def session(self) -> bytes:
        """The session, by which clients recognise the federation."""
        return self._walk(self.tree["federation"], self.server)["session"]  # type: ignore[no-any-return]

    def parties(self) -> dict[str, Any]:
        """The session, and what the parties of a simulation kept: keyword arguments of `simulate`. Raises `InputError` if it has none."""
        tree = self.tree["parties"]
        try:
            identities = msgspec.msgpack.decode(self._walk(tree["identities"], self.others), type=dict[int, tuple[int, bytes, bytes]])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{self.path}: does not fit together ({type(error).__name__}: {error})") from None
        return {
            "session": self.session,
            "identities": {place: Identity(*seeds) for place, seeds in identities.items()},
            "stores": self._stores,
        }

    def _stores(self, data: Mapping[int, ClientData]) -> dict[int, ObjectStore]:
        """What each party of a simulation kept; `data` is that of its clients. Raises `InputError` if it does not fit."""
        into, stores = _In(self, data=data), {}
        try:
            for place, kept in self.tree["parties"]["stores"].items():
                rest = msgspec.msgpack.decode(into.walk(kept["rest"], self.others), type=dict[str, bytes])
                stores[int(place)] = store = ObjectStore(rest)
                for name, arrays, origin in kept["values"]:
                    keep_values(store, name, into.walk(arrays, self.others), bytes.fromhex(origin))
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{self.path}: does not fit together ({type(error).__name__}: {error})") from None
        return stores

    def _walk(self, tree: Any, arrays: Mapping[str, Array]) -> Any:
        return _In(self).walk(tree, arrays)


def latest(folder: Path) -> str | None:
    """The name of the last complete checkpoint in a run's `checkpoints/`: "final", or that of the highest round; None if there is none.

    Of a deployed run of an earlier version it is "server", which `load_checkpoint` refuses.
    """
    if (folder / "final.json").is_file():
        return "final"
    names = sorted(path.stem for path in folder.glob("round_*.json")) or [path.stem for path in folder.glob("server.json")]
    return names[-1] if names else None


def load_checkpoint(folder: Path, name: str) -> Checkpoint:
    """Read a checkpoint and check it against its digests. Raises `InputError` naming the file that is missing, damaged or changed."""
    path = folder / f"{name}.json"
    try:
        tree = read_json(path)
        if tree["format"] not in range(OLDEST_FORMAT, FORMAT + 1):
            known = f"{OLDEST_FORMAT} to {FORMAT}"
            raise InputError(f"{path}: is of format {tree['format']!r}, of another version; this version resumes formats {known} only")
        if tree["digest"] != tree_digest(tree):
            raise InputError(f"{path}: does not match its own digest; the checkpoint was changed")
        server = _arrays_of(folder / f"{name}.safetensors", tree["files"][f"{name}.safetensors"])
        clients = f"{name}.clients.safetensors"
        others = {} if tree["parties"] is None else _arrays_of(folder / clients, tree["files"][clients])
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: is no checkpoint ({type(error).__name__}: {error})") from None
    return Checkpoint(path, tree, server, others)


def _arrays_of(path: Path, digest: str) -> dict[str, Array]:
    computed = blake2b(digest_size=16)
    try:
        with open_regular(path) as file:
            while chunk := file.read(1 << 22):
                computed.update(chunk)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if computed.hexdigest() != digest:
        raise InputError(f"{path}: does not match its digest in the checkpoint; it was changed or cut")
    return read_safetensors(path)


@dataclass
class _In:
    """Makes values of a checkpoint's JSON. `data` is that of the clients of a simulation, `known` the arrays of other parties by path."""

    checkpoint: Checkpoint
    keys: dict[str, HeldKey] = field(default_factory=dict)
    data: Mapping[int, ClientData] = field(default_factory=dict)
    known: dict[str, Array] = field(default_factory=dict)

    def walk(self, tree: Any, arrays: Mapping[str, Array]) -> Any:
        if not isinstance(tree, dict):
            return tree
        if "array" in tree:
            return self._once(tree["array"]) if arrays is self.checkpoint.others else np.array(arrays[tree["array"]])
        if "sum" in tree:
            return Deferred(*(self.walk(part, arrays) for part in tree["sum"]))
        if "span" in tree:
            return self._movement(**tree["span"])
        if "scalar" in tree:
            return arrays[tree["scalar"]][()]
        if "bytes" in tree:
            return arrays[tree["bytes"]].tobytes()
        if "held" in tree:
            return Held(self.keys[tree["held"]], tuple(tree["clients"]), tuple(tree["parts"]))
        if "mapping" in tree:
            return {self.walk(key, arrays): self.walk(item, arrays) for key, item in tree["mapping"]}
        if "items" in tree:
            return tuple(self.walk(item, arrays) for item in tree["items"])
        if "list" in tree:
            return [self.walk(item, arrays) for item in tree["list"]]
        if (kind := _type_of(tree.get("type"))) is None:
            raise InputError(f"{self.checkpoint.path}: {tree.get('type')!r} is not a kind of state")
        names = _RENAMED_FIELDS.get(kind, {})
        return kind(**{names.get(name, name): self.walk(value, arrays) for name, value in tree["fields"].items()})

    def _once(self, path: str) -> Array:
        if path not in self.known:
            self.known[path] = np.array(self.checkpoint.others[path])
        return self.known[path]

    def _movement(self, client: int, model: Any, arrays: Mapping[str, str], factors: list[Any]) -> Movement:
        made_of = {name: self._once(path) for name, path in arrays.items()}
        width, more_start, more_anchor = factors
        return Movement(
            torch.from_numpy(made_of["a"]), made_of["tail"], width, more_start, more_anchor, made_of["start"], made_of.get("anchor"),
            made(dict(model), {"Model": Model}), self.data[client],
        )  # fmt: skip


def restore(checkpoint: Checkpoint, federation: FederationServer, resumed: int | None = None) -> Any:
    """The algorithm's state, with what the server knew of the values behind its handles put back into a new `federation`.

    Raises `InputError` for a checkpoint that does not fit together.
    """
    tree, arrays, path = checkpoint.tree, checkpoint.server, checkpoint.path
    into = _In(checkpoint)
    try:
        federation.restore(into.walk(tree["federation"], arrays), resumed)
        epochs = []
        for entry in tree["held"]["epochs"]:
            session = federation.epochs.make(entry["number"])
            session.restore(into.walk(entry["session"], arrays))
            epochs.append(
                Epoch(entry["number"], session, list(entry["clients"]), tuple(entry["shape"]), into.walk(entry["memory"], arrays))
            )
        for place, entry in tree["held"]["keys"].items():
            key = into.keys[place] = HeldKey(entry["name"])
            federation.know(key, entry["known"])
            if entry["epochs"]:
                federation.epochs.entered[key] = [(part, epochs[number]) for part, number in entry["epochs"]]
        if federation.privacy_ledger is not None:
            federation.privacy_ledger.restore(tree["receipts"], into.keys)
        return into.walk(tree["state"], arrays)
    except InputError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"{path}: does not fit together ({type(error).__name__}: {error})") from None
