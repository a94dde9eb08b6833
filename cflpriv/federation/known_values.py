"""What the server knows of the values that clients hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..contract.handles import PartLayout
from ..types import PartKind

__all__ = ["Known"]


@dataclass(frozen=True)
class Known:
    """What the server knows of values that clients hold under one `number`.

    `layout`: that of more than half of the clients, else empty; `odd`: the clients that declared another. `models`: by client the name of
    what its value was computed from (`values.trace`). `at_model`: parameters went into the values. `kinds`: of their parts.
    """

    number: int
    layout: PartLayout
    models: Mapping[int, bytes]
    odd: frozenset[int] = frozenset()
    at_model: bool = True
    kinds: Mapping[str, PartKind] = field(default_factory=dict)

    def saved(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        layout = [[name, dtype, list(shape)] for name, dtype, shape in self.layout.parts]
        models = [[client, model.hex()] for client, model in sorted(self.models.items())]
        rest = {"odd": sorted(self.odd), "at_model": self.at_model, "kinds": dict(self.kinds)}
        return {"number": self.number, "layout": layout, "models": models, **rest}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> "Known":
        """The inverse of `saved`."""
        layout = PartLayout(tuple((name, dtype, tuple(shape)) for name, dtype, shape in saved["layout"]))
        models = {client: bytes.fromhex(model) for client, model in saved["models"]}
        rest = (frozenset(saved.get("odd", ())), saved.get("at_model", True), saved.get("kinds", {}))
        return cls(saved["number"], layout, models, *rest)
