"""The models that a run ends with: whoever gets the released models has these, and no message of the run holds them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...contract.handles import Shared
from ...contract.transcript import Message
from ...errors import InputError
from ...experiments.config.config import Config
from ...experiments.run.checkpoint import restore
from ...experiments.run.loop import Experiment
from ...experiments.run.resume import last_checkpoint
from ...experiments.run.run import prepare
from ...types import Population
from ..adversary import RELEASE

__all__ = ["release_of_folder", "release_of_run"]


def release_of_run(run: Experiment, messages: Sequence[Message], rounds: int) -> list[Message]:
    """A message (`RELEASE`) with the models that clients would use, as the server has them; none where it does not see all of them.

    It follows the `messages` of the run, after so many `rounds`.
    """
    models = run.algorithm.serve(run.state).params.get("model")
    several = models if isinstance(models, list | tuple) else [models]
    if not several or not all(isinstance(model, Shared) and model.is_clear and model.clear is not None for model in several):
        return []
    vectors = [np.asarray(model.value()) for model in several if isinstance(model, Shared)]
    names = [f"model/{label}" for label in range(len(vectors))] if isinstance(models, list | tuple) else ["model"]
    index = 1 + max((message.index for message in messages), default=-1)
    payload = dict(zip(names, vectors, strict=True))
    size = sum(vector.nbytes for vector in vectors)
    return [Message(index, rounds, RELEASE, "parameters", "server", "anybody", (), (), size, 1, size, "", False, payload=payload)]


def release_of_folder(folder: Path, config: Config, population: Population, messages: Sequence[Message], rounds: int) -> list[Message]:
    """The same of a recorded run, by its last checkpoint; none where it has none that can be restored here."""
    try:
        checkpoint = last_checkpoint(folder)
        if checkpoint is None or checkpoint.tree["parties"] is None:
            return []
        run = prepare(config, None, population, **checkpoint.parties())
        run.state = restore(checkpoint, run.federation)
        run.backend.welcome(run, checkpoint.progress)
    except InputError:
        return []
    try:
        return release_of_run(run, messages, rounds)
    finally:
        run.backend.close(run)
