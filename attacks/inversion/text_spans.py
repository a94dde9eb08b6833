"""Texts of a transformer, exactly, from the row spans of its weight gradients: whole windows, of one batch of up to a few.

A linear layer with inputs x_1 … x_k (one for each place of each window) has the weight gradient Σ d_i x_iᵀ, so its rows span the inputs as
long as there are fewer inputs than units. The input of the first attention layer depends on one word and its place alone. So every word is
tried at every place: the ones that occur are those whose input lies in the span. Of several windows the inputs of later layers tell which
words belong together: they lie in the spans of those layers for the windows of the batch, and for no others.

Source: Petrov, Dimitrov, Baader, Müller & Vechev 2024 ("DAGER: Exact Gradient Inversion for Large Language Models"). Deviations: the layers
are found by what they take, not by their names: the first group by a test that an input depends on one place alone; windows are built from
left to right by the spans of all later layers, then changed place by place, which serves attention in one direction and in both.

What it proves: of a transformer, an update of one step in the clear is the text, without the gradient of the embedding. What it does not:
nothing about batches with more words than the layers have units, about dropout, or about several steps. Words that are masked (padding) and
words whose gradient is zero, as all but a few do where a single layer reads one place only, are −1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...engine.device import tensor
from ...engine.models import Model, build_module
from ...errors import InputError
from ...types import Array

__all__ = ["MOST_WINDOWS", "has_attention", "windows_from_spans"]

MOST_WINDOWS = 8
"""Windows of one batch that are put together."""
ROUNDING, LOW = 1e-7, 0.08
"""Singular values below this multiple of the largest one are rounding; and a low one of a square matrix of noise, by its largest one."""
NEAR, COARSEST = 1e-3, 0.1
"""The least and the largest bound for the part of an input outside the span, relative to its length, up to which it lies in it."""
MOST_SPANNED = 0.9
"""Layers whose gradient has a rank above this share of its units show nothing: nearly everything lies in the span."""
MOST_POSSIBLE, WHOLE = 4, 0.8
"""So many words a window are tried at a place. Later layers are compared whose rank is at least this share of the largest one."""
BEAM, STARTS, SWEEPS, AT_ONCE = 16, 48, 24, 512
_Left = Callable[..., Array]
"""Windows (k, length), and up to which place -> what is outside of the spans (k,)."""


@dataclass(frozen=True, eq=False)
class _Span:
    """The orthonormal rows (r, d) that span the inputs of `layers`, which take the same input, and the bound for lying in it."""

    layers: tuple[str, ...]
    rows: Array
    bound: float

    def outside(self, inputs: Array) -> Array:
        """The relative length (...) of the part of inputs (..., d) outside the span."""
        rest = inputs - (inputs @ self.rows.T) @ self.rows
        return np.asarray(np.linalg.norm(rest, axis=-1) / np.maximum(np.linalg.norm(inputs, axis=-1), 1e-300))


def has_attention(model: Model) -> bool:
    """Whether a model has an embedding, trained layers that take a word and its place each, and layers that take what became of both."""
    module = model.lent(model.init(0))
    embedding = next((inner for inner in module.modules() if isinstance(inner, nn.Embedding)), None)
    if embedding is None or len(model.shape) != 1:
        return False
    local, later = _groups(model, module, np.arange(embedding.num_embeddings), np.random.default_rng(0))
    return bool(local and later)


def windows_from_spans(model: Model, vector: Array, gradient: Array, count: int, words: Array, rng: np.random.Generator) -> Array:
    """The `count` windows (count, length) behind the `gradient` (d,), or any multiple, of a transformer at `vector` (d,), in any order.

    `words` (k,) are those that may occur. Words that are not recovered are −1; all are where no layer's gradient shows a span. Raises
    `InputError` for a gradient of another shape, and a `count` that is not in 1..`MOST_WINDOWS`.
    """
    if not 1 <= count <= MOST_WINDOWS:
        raise InputError(f"count = {count}: expected 1 to {MOST_WINDOWS} windows")
    moved, length = model.checked(np.asarray(gradient, np.float64)), model.shape[0]
    module = model.lent(np.asarray(vector, model.dtype))
    groups, later = _groups(model, module, words, rng)
    none = np.full((count, length), -1)
    first = max((_span(model, moved, layers) for layers in groups), key=lambda span: len(span.rows), default=None)
    if first is None or not _shows(first):
        return none
    possible = _possible(model, module, first, words)
    if count == 1:
        return np.array([[int(at[0]) if len(at) else -1 for at in possible]])
    spans = [span for layers in later if _shows(span := _span(model, moved, layers))]
    most = max((len(span.rows) for span in spans), default=0)
    spans = [span for span in spans if len(span.rows) >= WHOLE * most]  # others lack the gradients of some places
    places = np.array([bool(len(at)) for at in possible])
    if not spans or not places.any():
        return none

    def left(windows: Array, end: int = length) -> Array:
        outside = _outside(model, module, spans, windows).mean(axis=2)
        if most <= count:  # the gradient of one place of each window
            return np.asarray(outside.min(axis=1))
        return np.asarray(np.where(places, outside, 0.0)[:, :end].sum(axis=1) / places.sum())

    return _assembled([at[: MOST_POSSIBLE * count] if len(at) else np.array([-1]) for at in possible], left, count, rng)


def _shows(span: _Span) -> bool:
    return bool(0 < len(span.rows) <= MOST_SPANNED * span.rows.shape[1])


# --- layers and their inputs --------------------------------------------------------------------------------------------------------


def _captured(model: Model, module: nn.Module, windows: Array) -> dict[str, Array]:
    """The inputs (n, length, d), for windows (n, length), of the layers whose weight is trained, by the name of the weight."""
    trained, taken = {name: shape for name, shape, _ in model.layout}, dict[str, Array]()

    def keep(name: str, is_turned: bool) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs.get("query", kwargs.get("input"))
            if isinstance(x, torch.Tensor) and x.ndim == 3:
                x = x.transpose(0, 1) if is_turned else x
                if tuple(x.shape[:2]) == windows.shape:
                    taken[name] = x.detach().double().cpu().numpy()

        return hook

    handles = []
    for path, layer in module.named_modules():
        attention = isinstance(layer, nn.MultiheadAttention)
        name = f"{path}.{'in_proj_weight' if attention else 'weight'}".lstrip(".")
        if name in trained and (attention or isinstance(layer, nn.Linear) or _is_transposed(layer)):
            turned = isinstance(layer, nn.MultiheadAttention) and not layer.batch_first
            handles.append(layer.register_forward_pre_hook(keep(name, turned), with_kwargs=True))
    try:
        with torch.enable_grad():  # without gradients torch fuses layers, and hooks are passed by
            module(tensor(windows.astype(np.float32)).to(next(module.parameters()).dtype))
    finally:
        for handle in handles:
            handle.remove()
    return taken


def _is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is a linear one with weights (inputs, outputs), as GPT-2 of `transformers` has."""
    return type(layer).__name__ == "Conv1D" and getattr(getattr(layer, "weight", None), "ndim", 0) == 2


def _groups(
    model: Model, module: nn.Module, words: Array, rng: np.random.Generator
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:  # fmt: skip
    """Layers by common inputs: those whose input depends on the word at the place alone, and those whose input depends on others."""
    window, other = rng.choice(words, size=(2, model.shape[0]))
    even = np.arange(len(window)) % 2 == 0
    taken = _captured(model, module, np.stack([window, np.where(even, window, other), np.where(even, other, window)]))
    local, later = dict[bytes, list[str]](), dict[bytes, list[str]]()
    for name, inputs in taken.items():
        close = np.abs(inputs[1:] - inputs[:1]).max(axis=2) <= 1e-4 * max(float(np.abs(inputs).max()), 1e-300)
        is_local = bool(close[0][even].all() and close[1][~even].all())
        (local if is_local else later).setdefault(inputs.tobytes(), []).append(name)
    return [tuple(names) for names in local.values()], [tuple(names) for names in later.values()]


def _span(model: Model, moved: Array, layers: tuple[str, ...]) -> _Span:
    """What the gradients of layers with the same input span."""
    parts, transposed = [], {f"{path}.weight" for path, layer in build_module(model).named_modules() if _is_transposed(layer)}
    for name, shape, offset in model.layout:
        if name in layers:
            weight = moved[offset : offset + int(np.prod(shape))].reshape(shape)
            weight = weight.T if name in transposed else weight
            parts.append(weight)
    stack = np.concatenate(parts)
    _, values, rows = np.linalg.svd(stack, full_matrices=False)
    if len(values) < 2 or values[0] == 0.0:
        return _Span(layers, rows[:0], COARSEST)
    # states are rounded: the largest singular value of such noise, from a low one (Marchenko & Pastur 1967)
    aspect = np.sqrt(min(stack.shape) / max(stack.shape))
    lowest = (1 - aspect) / (1 + aspect)
    noise = float(values[int(MOST_SPANNED * len(values))]) / (lowest + LOW * (1 - lowest))
    rank = int((values > max(noise, ROUNDING * values[0])).sum())
    weakest = float(values[rank - 1]) if rank else 1e-300
    return _Span(layers, rows[:rank], float(np.clip(3 * noise / weakest, NEAR, COARSEST)))


def _possible(model: Model, module: nn.Module, span: _Span, words: Array) -> list[Array]:
    """For each place the words whose input lies in the span, nearest first."""
    outside = []
    for part in np.split(words, range(AT_ONCE, len(words), AT_ONCE)):
        inputs = _captured(model, module, np.repeat(part[:, None], model.shape[0], axis=1))[span.layers[0]]
        outside.append(span.outside(inputs))
    table = np.concatenate(outside)
    return [words[np.argsort(column, kind="stable")[: int((column <= span.bound).sum())]] for column in table.T]


# --- windows of a batch -------------------------------------------------------------------------------------------------------------


def _outside(model: Model, module: nn.Module, spans: Sequence[_Span], windows: Array) -> Array:
    """The relative length (k, length, spans) of what is outside of the spans, for windows (k, length); −1 stands for 0, the padding."""
    results = []
    for part in np.split(np.maximum(windows, 0), range(AT_ONCE, len(windows), AT_ONCE)):
        taken = _captured(model, module, part)
        results.append(np.stack([span.outside(taken[span.layers[0]]) for span in spans], axis=2))
    return np.concatenate(results)


def _assembled(choices: Sequence[Array], left: _Left, count: int, rng: np.random.Generator) -> Array:
    """The windows (count, length) of words of `choices` for which least is `left` (k,) outside of the spans: local minima."""
    met: dict[tuple[int, ...], float] = {}
    exact: list[tuple[int, ...]] = []
    for window in [*_from_left(choices, left), *[None] * STARTS]:
        now = _unused(choices, exact, rng) if window is None else window
        least = float(left(now[None])[0])
        for _ in range(SWEEPS):
            tried = np.stack([
                np.where(np.arange(len(now)) == i, word, now) for i, choice in enumerate(choices) for word in choice if word != now[i]
            ] or [now])  # fmt: skip
            rests = left(tried)
            if not rests.min() < least:
                break
            now, least = tried[int(rests.argmin())], float(rests.min())
        met[tuple(int(word) for word in now)] = least
        exact = [seen for seen, rest in met.items() if rest <= NEAR]
        if len(exact) >= count:
            return np.array(exact[:count])
    nearest = sorted(met, key=lambda seen: met[seen])[:count]
    return np.array([*nearest, *[nearest[i % len(nearest)] for i in range(count - len(nearest))]])  # windows may be alike


def _unused(choices: Sequence[Array], windows: Sequence[tuple[int, ...]], rng: np.random.Generator) -> Array:
    """A window (length,) of words drawn at each place, of those that no window of `windows` has there while there are any."""
    drawn = []
    for i, choice in enumerate(choices):
        rest = choice[~np.isin(choice, [window[i] for window in windows])]
        drawn.append((rest if len(rest) else choice)[rng.integers(len(rest) or len(choice))])
    return np.array(drawn)


def _from_left(choices: Sequence[Array], left: _Left) -> list[Array]:
    """The windows that come nearest where they are made from left to right."""
    beam = np.array([[choice[0] for choice in choices]])
    for i, choice in enumerate(choices):
        grown = np.repeat(beam, len(choice), axis=0)
        grown[:, i] = np.tile(choice, len(beam))
        beam = grown[np.argsort(left(grown, i + 1), kind="stable")[:BEAM]]
    return list(beam)
