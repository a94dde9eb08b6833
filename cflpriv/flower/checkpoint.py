"""What the server of a deployment needs to go on after it was restarted: its side alone, no client's value.

Clients that keep their state in files go on with it; a client that lost its own answers "not-held", is out of the step, and comes back.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..epochs import Epoch
from ..errors import InputError
from ..experiments.checkpoint import Checkpoint, arrays_of, digest_of, reader, writer
from ..files import write_arrays, write_atomically
from ..handles import HeldKey
from ..remote.server import RemoteFederation

__all__ = ["load_server", "save_server"]

FORMAT = 1


def save_server(folder: Path, state: Any, federation: RemoteFederation, progress: Mapping[str, Any]) -> None:
    """Write the state after a round, or after a restart; the one before is removed when this one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    out, stands = writer(), federation.saved()
    tree: dict[str, Any] = {"format": FORMAT, "state": out.walk(state, "state", out.server), "progress": dict(progress)}
    tree["federation"] = out.walk(stands, "federation", out.server)
    epochs: list[Epoch[Any]] = []
    tree["receipts"] = None if federation.accounts is None else federation.accounts.saved(out.keys)
    tree["keys"] = {}
    for key, place in out.keys.items():
        entered = federation.epochs.entered.get(key, ())
        for _, epoch in entered:
            if epoch not in epochs:
                epochs.append(epoch)
        entries = [[part, epochs.index(epoch)] for part, epoch in entered]
        tree["keys"][place] = {"name": key.name, "known": federation.known(key), "epochs": entries}
    tree["epochs"] = [
        {
            "number": epoch.number, "clients": list(epoch.clients), "shape": list(epoch.shape),
            "memory": out.walk(epoch.memory, f"epochs/{i}/memory", out.server),
            "session": out.walk(epoch.session.saved(), f"epochs/{i}/session", out.server),
        }
        for i, epoch in enumerate(epochs)
    ]  # fmt: skip
    name = f"server_{stands['turn']:06d}"  # each turn is new, after a restart too
    tree["file"], _ = write_arrays(folder / f"{name}.safetensors", out.server)
    tree["arrays"] = f"{name}.safetensors"
    tree["digest"] = digest_of(tree)
    write_atomically(folder / "server.json", json.dumps(tree, indent=1) + "\n")
    for path in folder.glob("server_*.safetensors"):
        if path.name != tree["arrays"]:
            path.unlink()


def load_server(folder: Path, federation: RemoteFederation) -> tuple[Any, Mapping[str, Any]]:
    """The algorithm's state, its handles put back into a new `federation`, and what `progress` was. Raises `InputError`."""
    path = folder / "server.json"
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["format"] != FORMAT or tree["digest"] != digest_of(tree):
            raise InputError(f"{path}: is of another format, or was changed")
        arrays = arrays_of(folder / Path(tree["arrays"]).name, tree["file"])
        into = reader(Checkpoint(path, tree, arrays, {}))
        federation.restore(into.walk(tree["federation"], arrays))
        epochs = []
        for one in tree["epochs"]:
            session = federation.epochs.channel.open(one["number"])
            session.restore(into.walk(one["session"], arrays))
            epochs.append(Epoch(one["number"], session, list(one["clients"]), tuple(one["shape"]), into.walk(one["memory"], arrays)))
        for place, one in tree["keys"].items():
            key = into.keys[place] = HeldKey(one["name"])
            federation.know(key, one["known"])
            if one["epochs"]:
                federation.epochs.entered[key] = [(part, epochs[number]) for part, number in one["epochs"]]
        if federation.accounts is not None:
            federation.accounts.restore(tree["receipts"], into.keys)
        return into.walk(tree["state"], arrays), tree["progress"]
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"{path}: is no checkpoint of a server ({type(error).__name__}: {error})") from None
