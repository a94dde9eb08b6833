"""Texts from spans: exact windows of small transformers, from what a client sends, and the figure of an audit."""

from typing import Any

import numpy as np
import pytest
import torch
from attack_scenes import case, config, figures_of
from scipy.optimize import linear_sum_assignment
from torch import nn

from cflpriv.attacks.inversion.text_spans import has_attention, windows_from_spans
from cflpriv.engine import Streams, TaskInput
from cflpriv.engine.models import MODELS, Model, register_model
from cflpriv.errors import InputError
from cflpriv.randomness import stream
from cflpriv.tasks.training import Train
from cflpriv.types import ClientData

WORDS, LENGTH, UNITS = 60, 8, 64


class Transformer(nn.Module):
    """Word and place embeddings, encoder layers of PyTorch, and scores from the mean (or, looking back only, from the last place)."""

    def __init__(self, layers: int, causal: bool, batch_first: bool, words: int, length: int, classes: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, UNITS), nn.Parameter(0.3 * torch.randn(length, UNITS))
        self.layers = nn.ModuleList([
            nn.TransformerEncoderLayer(UNITS, 4, 2 * UNITS, dropout=0.0, batch_first=batch_first) for _ in range(layers)
        ])  # fmt: skip
        self.scores, self.causal, self.batch_first = nn.Linear(UNITS, classes), causal, batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.words(x.long()) + self.places
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device), 1) if self.causal else None
        made = made if self.batch_first else made.transpose(0, 1)
        for layer in self.layers:
            made = layer(made, src_mask=mask)
        made = made if self.batch_first else made.transpose(0, 1)
        return self.scores(made[:, -1] if self.causal else made.mean(1))  # type: ignore[no-any-return]


def transformer(layers: int = 2, causal: bool = False, batch_first: bool = True) -> Model:
    return Model(
        f"test_transformer_{layers}_{causal}_{batch_first}", (LENGTH,), 3,
        factory=lambda: Transformer(layers, causal, batch_first, WORDS, LENGTH, 3),
    )  # fmt: skip


def share_in_place(model: Model, count: int, seed: int) -> float:
    """The share of words of a client's batch that are recovered at their place, from its update at single precision."""
    rng = np.random.default_rng(seed)
    x, y, start = rng.integers(1, WORDS, size=(count, LENGTH)), rng.integers(3, size=count), model.init(seed)
    data = ClientData(0, x.astype(np.float32), y, x[:0].astype(np.float32), y[:0])
    moved = Train(model, 1, 0, 0.1).run(TaskInput(data, {"model": start}, {}, Streams(0, 0, 0)))["update"]
    seen = windows_from_spans(model, start, moved, count, np.arange(WORDS), stream(seed, "test of spans"))
    shares = (seen[:, None] == x[None]).mean(axis=2)
    rows, columns = linear_sum_assignment(-shares)
    return float(shares[rows, columns].mean())


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("layers", "causal", "batch_first"), [(1, False, True), (2, False, False), (2, True, True)])
def test_texts_of_a_batch_are_exact(layers: int, causal: bool, batch_first: bool, count: int) -> None:
    assert [share_in_place(transformer(layers, causal, batch_first), count, seed) for seed in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize(("name", "counts"), [("gpt2", (1, 4)), ("bert", (1,))])
def test_texts_of_classifiers_of_transformers_are_exact(name: str, counts: tuple[int, ...]) -> None:
    """BERT's first parameters are so small that single precision hides the order of several windows."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: the extra `text` brings it")
    common: dict[str, Any] = {"vocab_size": WORDS, "num_labels": 3}
    settings: dict[str, Any] = {
        "bert": lambda: transformers.BertConfig(
            hidden_size=UNITS, num_hidden_layers=2, num_attention_heads=4, intermediate_size=UNITS, max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **common,
        ),
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=UNITS, n_layer=2, n_head=4, n_positions=LENGTH, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common
        ),
    }  # fmt: skip
    model = Model(
        f"test_{name}", (LENGTH,), 3, factory=lambda: transformers.AutoModelForSequenceClassification.from_config(settings[name]())
    )
    assert has_attention(model)
    assert [share_in_place(model, count, 0) for count in counts] == [1.0] * len(counts)


def test_where_there_are_no_spans() -> None:
    model, rng = transformer(), np.random.default_rng(0)
    ask = (model, model.init(0))
    assert (windows_from_spans(*ask, np.zeros(model.dimension), 2, np.arange(WORDS), rng) == -1).all()
    assert (windows_from_spans(*ask, rng.standard_normal(model.dimension), 2, np.arange(WORDS), rng) == -1).all()  # a gradient of full rank
    with pytest.raises(InputError, match="expected 1 to 8 windows"):
        windows_from_spans(*ask, np.zeros(model.dimension), 9, np.arange(WORDS), rng)
    assert has_attention(model)
    assert not has_attention(Model("lstm", (LENGTH,), WORDS, hidden=8))
    assert not has_attention(Model("mlp", (LENGTH,), 3, hidden=8))


@pytest.mark.slow
def test_an_audit_reads_the_texts_of_a_transformer(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    rng = np.random.default_rng(0)
    (tmp_path / "nordic_wiki").mkdir()
    names = [a + b for a in "bdfgklmnpr" for b in "aeiouy"]
    for place, language in enumerate(("nb", "sv", "da")):
        for part in ("train", "test"):
            lines = [" ".join(rng.choice(names, 12)) for _ in range(24 + place)]
            (tmp_path / "nordic_wiki" / f"{language}_{part}.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    monkeypatch.setenv("CFLPRIV_DATA", str(tmp_path))
    register_model("test_attention", lambda model: Transformer(1, False, True, model.classes, model.shape[0], model.classes))
    try:
        data = {
            "source": "nordic_wiki", "partition": "kinds", "clients": 6, "vocabulary": 64, "sequence_length": 6, "samples_per_client": 4,
            "groups": [],
        }  # fmt: skip
        training = {"rounds": 1, "epochs": 1, "batch_size": 0}
        found = figures_of("gradient_inversion", case(config({"name": "fedavg"}, {}, 0, data=data, training=training, model={
            "name": "test_attention"
        })))  # fmt: skip
    finally:
        MODELS.pop("test_attention", None)
    assert (found["words_in_place"].value or 0.0) > 0.95, found["words_in_place"].line()
    assert found["words_in_place"].status == "leaks"
    assert "by the spans of attention layers" in found["words_in_place"].note
