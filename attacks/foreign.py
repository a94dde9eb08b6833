"""Audits of other systems: labels, membership and images from the states that clients of any torch loop were sent and returned.

    from cflpriv.attacks import LoopSettings, Update, audit_updates

    updates = [Update(before, after, x, y) for before, after, x, y in recorded]
    for cell in audit_updates(model, updates, (x_auxiliary, y_auxiliary), LoopSettings(lr=0.1, batch_size=16)):
        print(cell.line())

The adversary is whoever reads single updates. It knows the model, the settings of local training, labelled auxiliary samples, and how many
samples and labels each client has. The clients' own samples are truth: scorers compare guesses with them, no guess sees them.

Each attack is the suite's own, on states of another system. Labels: `counts_from_bias` where labels are absent, else `labels_from_bias`,
under the statistics of the client's batches where layers normalise. Membership: ridge regression of updates on single samples' gradients,
as in `membership_gradients` but without shadow models; the loss threshold (Yeom et al. 2018); RMIA (Zarifzadeh et al. 2024) with the model
that the client was sent as its only reference model. Images: `invert_updates`, which after a single step also meets the statistics of the
batch (Yin et al. 2021, GradInversion, who take those of the training set). Running statistics: what the client's steps must have added.

There is no unprotected twin of another system, hence no reference that would show an attack's power. A figure is `leaks` if it beats the
same attack without the view by the margin, `inconclusive` if it does not, and `not_validated` with fewer than three scores. None is
`at_baseline`: no figure here shows that nothing leaks. Not modelled: weight decay of the head's bias, optimisers other than SGD, dropout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InputError
from ..randomness import stream
from ..types import Array
from .family import judged_together
from .foreign_states import ForeignModel, ReadState, batch_statistics, statistics_of, vector_of
from .foreign_system import LoopSettings, Record, System, Update, system_of
from .gradient_inversion import MARGIN as IMAGE_MARGIN
from .gradient_inversion import MOST_IMAGES, MOST_STEPS, LocalSteps, invert_updates, labels_from_shares
from .gradient_inversion import Guess as ImageGuess
from .gradient_inversion import score as image_score
from .label_inference import Guess as LabelGuess
from .label_inference import label_cells
from .label_readings import ONE_STEP, PATH, auxiliary_shares, class_probabilities, counts_from_bias, labels_from_bias
from .leakage import Cell, Truth, cell, nothing, ssim
from .membership import confidences, loss_threshold, rmia, roc
from .membership_audit import FALSE_POSITIVES, FEWEST_ASKED, Outcome, auc_gain, member_p
from .membership_audit import MARGIN as MEMBER_MARGIN
from .membership_gradients import MOST_NUMBERS, sample_gradients, shortened
from .membership_shadows import pairs_of
from .significance import FEWEST_SCORES, RATE

__all__ = ["FOREIGN_ATTACKS", "LoopSettings", "Update", "attacked", "audit_updates"]

Made = tuple[list[Cell], dict[str, Array] | None]
ROUNDS = 3
"""Label shares are means over so many first updates of a client."""
MOST_INVERTED = 8
"""Clients whose updates are inverted."""
MOST_NORMALISED = 256
"""Auxiliary samples whose statistics take the place of those that states do not have."""
SOURCES = {"gradients": "update", "rmia": "own_model", "loss": "own_model"}
"""What an attack on membership reads."""
RIDGE = 0.1
"""Penalty of the regression of updates, in mean squared lengths of gradients."""
STATISTICS_MARGIN = 0.1
NO_MODEL = "not attempted: there is no model to run (`--plugin FILE`, and `model` in foreign.toml)"
NO_TRUTH = "not attempted: no client's samples are given, so that no guess can be scored"
NOT_SGD = "not attempted: updates by an optimiser other than SGD are not linear in gradients"


def audit_updates(
    model: nn.Module, updates: Sequence[Update], auxiliary: tuple[Any, Any], settings: LoopSettings | None = None, *,
    attacks: Sequence[str] | None = None, head: str | None = None, seed: int = 0, iterations: int = 200,
) -> list[Cell]:  # fmt: skip
    """The figures of every attack on the updates of another system, judged together.

    `model` gives the scores (n, classes) of samples; its own values are not used. `auxiliary` are labelled samples (x, y) that no client
    trained on, as the model takes them: half of them are held out as non-members where an update has no `outside`. `head` names the last
    layer, by default the last one with as many biases as there are classes. `iterations` are those of gradient inversion. Random numbers
    are drawn by `seed`. Raises `InputError` naming client and array, attack or layer.
    """
    system = system_of(model, updates, auxiliary, settings or LoopSettings(), head=head, seed=seed, iterations=iterations)
    return judged_together([one for cells, _ in attacked(system, attacks).values() for one in cells])[0]


def attacked(system: System, attacks: Sequence[str] | None = None) -> dict[str, Made]:
    """Cells and arrays by attack. Raises `InputError` for an attack that is not known."""
    for name in attacks or ():
        if name not in FOREIGN_ATTACKS:
            raise InputError(f"attack {name!r}: does not read updates of other systems; known are {', '.join(FOREIGN_ATTACKS)}")
    return {name: attack(system) for name, attack in FOREIGN_ATTACKS.items() if attacks is None or name in attacks}


def _alone(one: Cell, scores: int) -> Cell:
    """A figure that was judged as its own reference, without that; it is the mean of so many `scores`."""
    if one.value is None:
        return one
    rule = f"another system has no unprotected twin, so there is no reference and no shown power; margin {one.margin:g}"
    rule += "" if one.p is None else f", p = {one.p:.2g}; a leak needs p < {RATE:g}"
    if scores < FEWEST_SCORES:
        rule += f"; {scores} score(s) decide nothing, {FEWEST_SCORES} are needed"
    elif one.counted and 0.5**one.counted >= RATE:
        rule += f"; {one.counted} clients are too few to decide about a yes-or-no figure"
    status = one.status if one.status == "leaks" else "not_validated" if scores < FEWEST_SCORES else "inconclusive"
    return replace(one, reference=None, reference_baseline=None, power=None, status=status, note=f"{one.note}; {rule}")


# --- labels -------------------------------------------------------------------------------------------------------------------------


def _labels(system: System) -> Made:
    """Label sets and histograms from the updates of the head's bias."""
    name, metric, case, prior = "label_inference", "histogram_l1", system.case, system.case.prior
    clients = [client for client in system.scored if _is_sgd(system.records[client][0])]
    why = NO_TRUTH if not system.scored else "" if clients else NOT_SGD
    if system.head is None or why:
        return [nothing(case, name, metric, why or f"not attempted: {system.headless}")], None
    read = {client: [one for one in system.records[client][:ROUNDS] if _is_sgd(one)] for client in clients}
    shares = {client: found for client, records in read.items() if (found := _mean_shares(records, system)) is not None}
    if not shares:
        why = "not attempted: neither the learning rate with the number of steps nor the number of labels is known"
        return [nothing(case, name, metric, why)], None
    blank = auxiliary_shares(prior) if len(prior.y) else np.full(prior.classes, 1 / prior.classes)
    note = f"bias {system.head!r}, of the first {ROUNDS} update(s) at most; {_predicted(system)}; {prior.description}"
    guess = LabelGuess(shares)
    figures, arrays = label_cells(case, name, sorted(shares), [guess, LabelGuess(dict.fromkeys(shares, blank)), guess], note)
    return [_alone(one, one.counted or len(shares)) for one in figures], arrays


def _is_sgd(record: Record) -> bool:
    return record.settings.optimizer == "sgd"


def _mean_shares(records: Sequence[Record], system: System) -> Array | None:
    found = [one for record in records if (one := _shares(record, system)) is not None]
    return np.asarray(np.mean(found, axis=0)) if found else None


def _shares(record: Record, system: System) -> Array | None:
    """Label shares (classes,) from one update of the head's bias; None where neither its scale nor the number of labels is known.

    Where some labels are known to be absent the scale comes from these: clients with few samples learn them by heart, so that their updates
    end shorter than rate and steps say. Predictions are those for auxiliary samples, at the state before, or on the way to the state after
    where the scale is rate × steps. Without a model they are taken to be uniform, as an untrained model's are.
    """
    assert system.head is not None  # checked by the caller
    prior, model = system.case.prior, system.model
    moved = np.subtract(record.after.parameters[system.head], record.before.parameters[system.head], dtype=np.float64)
    is_short = record.scale is None or (record.labels is not None and record.labels < prior.classes)
    if model is None:
        probabilities = np.full((prior.classes, prior.classes), 1 / prior.classes)
    else:
        start, end = (_settled(system, model, record, state) for state in (record.before, record.after))
        path = [start + share * (end - start) for share in (ONE_STEP if is_short or record.steps == 1 else PATH)]
        probabilities = np.mean([class_probabilities(model.evaluated, at, prior.x, prior.y) for at in path], axis=0)
    if record.scale is not None and not is_short:
        return labels_from_bias(moved, probabilities, record.scale)
    return None if record.labels is None else counts_from_bias(-moved, probabilities, record.labels)


def _settled(system: System, model: ForeignModel, record: Record, state: ReadState) -> Array:
    """A state's vector (d,) for `model.evaluated`, with the statistics of the client's batches, else with those of auxiliary samples."""
    found = batch_statistics(model, record.before, record.after, record.steps) or _of_auxiliary(system, model, record.before)
    return vector_of(model.evaluated, state, found)


def _as_sent(system: System, model: ForeignModel, state: ReadState) -> Array:
    """A state's vector (d,) for `model.evaluated`, with its own statistics, else with those of auxiliary samples."""
    has_own = state.statistics.keys() >= model.statistics.keys()
    return vector_of(model.evaluated, state, {} if has_own else _of_auxiliary(system, model, state))


def _of_auxiliary(system: System, model: ForeignModel, state: ReadState) -> dict[str, Array]:
    """The statistics of auxiliary samples by name, normalised by themselves."""
    if not model.norms:
        return {}
    x = np.asarray(system.case.prior.x[:MOST_NORMALISED], np.float64)
    with torch.no_grad():
        row = statistics_of(model)(torch.tensor(vector_of(model.in_training, state))[None], torch.tensor(x)[None])[0].numpy()
    parts = np.split(row, np.cumsum([int(np.prod(shape)) for shape in model.statistics.values()])[:-1])
    return dict(zip(model.statistics, parts, strict=True))


def _predicted(system: System) -> str:
    """Where predictions come from, for a note."""
    if system.model is None:
        return "no model: predictions taken to be uniform, as an untrained model's are"
    if not system.model.norms:
        return "predictions on auxiliary samples"
    has_statistics = all(one.before.statistics and one.after.statistics for several in system.records.values() for one in several)
    return f"predictions on auxiliary samples, normalised by the statistics of {'the client' if has_statistics else 'these samples'}"


# --- membership ---------------------------------------------------------------------------------------------------------------------


def _membership(system: System) -> Made:
    """Whether samples were among those that a client trained on: by its first updates, and by the model that it returned last."""
    name, metric, case, prior, model = "membership", "own_model_rmia_auc", system.case, system.case.prior, system.model
    clients, outside = system.scored, system.case.truth.outside
    if model is None or not clients:
        return [nothing(case, name, metric, NO_MODEL if model is None else NO_TRUTH)], None
    order = stream(case.seed, "another system: non-members").permutation(len(prior.y))
    held = len(order) // 2 if set(clients) - set(outside) else 0
    pool, rest = (prior.x[order[:held]], prior.y[order[:held]]), order[held:]
    truth = Truth({}, {}, data=case.truth.data, outside={client: outside.get(client, pool) for client in clients})
    asked = pairs_of(truth, clients, stream(case.seed, "another system: pairs"), asked=1.0)
    if (count := int(asked.member.sum())) < FEWEST_ASKED:
        why = f"not attempted: {count} samples have a non-member of their label beside them, fewer than {FEWEST_ASKED}"
        return [nothing(case, name, metric, why)], None
    linear = all(_is_sgd(one) for client in clients for one in system.records[client][:ROUNDS])
    scores = {attack: np.zeros(len(asked.y)) for attack in ("gradients", "rmia", "loss", "blank")}
    for client in np.unique(asked.owners).tolist():
        mine = asked.owners == client
        first, last = system.records[client][0], system.records[client][-1]
        models = np.stack([
            _settled(system, model, last, last.after), _settled(system, model, first, first.before), _as_sent(system, model, first.before)
        ])  # fmt: skip
        target, beside, sent = confidences(model.evaluated, models, asked.x[mine], asked.y[mine])
        others = confidences(model.evaluated, models[:2], prior.x[rest], prior.y[rest])
        scores["rmia"][mine] = rmia(target, beside[None], others[0], others[1:])
        scores["loss"][mine], scores["blank"][mine] = loss_threshold(target), loss_threshold(sent)
        if linear:
            scores["gradients"][mine] = _explained(system, model, system.records[client][:ROUNDS], asked.x[mine], asked.y[mine])
    source = "held-out auxiliary samples" if held else "those given"
    note = (
        f"{len(clients)} client(s): the first {ROUNDS} updates of each at most, or the model that it returned last; non-members, {source}, "
        "are paired with members by label; RMIA's reference: the model that the client was sent first; baseline: the loss threshold on "
        f"that model; {prior.description}"
    )
    figures = [] if linear else [nothing(case, name, "update_gradients_auc", NOT_SGD)]
    of_updates = (("gradients", "auc"), ("gradients", "tpr")) if linear else ()
    for attack, kind in (*of_updates, ("rmia", "auc"), ("loss", "auc")):
        found = Outcome(scores[attack], scores["blank"][None], asked.member)
        figures.append(_member_cell(system, f"{SOURCES[attack]}_{attack}_{kind}", kind, found, note))
    return figures, None


def _explained(system: System, model: ForeignModel, records: Sequence[Record], x: Array, y: Array) -> Array:
    """How much of a client's updates each sample's gradient explains, (n,), on a scale of its own: ridge regression on all together.

    Gradients are taken at the state that the client was sent, where those of members are as long as others'.
    """
    gram, towards, form = np.eye(len(y)), np.zeros(len(y)), model.evaluated
    trained = np.concatenate([np.full(int(np.prod(shape)), name in model.shapes) for name, shape, _ in form.layout])
    short, chunk = shortened(int(trained.sum())), max(1, MOST_NUMBERS // form.dimension)
    for record in records:
        start, end = (_settled(system, model, record, state) for state in (record.before, record.after))
        blocks = [sample_gradients(form, start, x[at : at + chunk], y[at : at + chunk]) for at in range(0, len(y), chunk)]
        columns = np.concatenate([short(block[:, trained]) for block in blocks])
        scale = RIDGE * max(float(np.square(columns).sum(axis=1).mean()), 1e-300)
        gram += columns @ columns.T / scale
        towards += columns @ short((start - end)[trained][None])[0] / scale
    found = np.linalg.solve(gram, towards)
    return np.asarray(found / max(float(np.abs(found).mean()), 1e-300))


def _member_cell(system: System, metric: str, kind: str, found: Outcome, note: str) -> Cell:
    case, at = system.case, roc(found.scores, found.member, FALSE_POSITIVES)
    value, interval, blank = at.auc, at.auc_interval, at.auc - auc_gain(found)[0]
    if kind == "tpr":
        value, interval, blank = at.tpr, at.tpr_interval, float(found.tprs().mean())
    p = member_p(found, kind, case.seed)
    words = f"{at.members} members, {at.non_members} others, realised FPR {at.fpr:.4f}; {note}"
    made = Cell(
        "membership", case.view.adversary, case.protection, metric, value, *interval, baseline=blank, reference=None,
        status="leaks" if p < RATE else "inconclusive", seeds=(case.seed,), note=words, margin=MEMBER_MARGIN[kind], p=p,
    )  # fmt: skip
    return _alone(made, at.members)


# --- images -------------------------------------------------------------------------------------------------------------------------


def _images(system: System) -> Made:
    """The images of clients with few samples in one batch, from the first update of each."""
    name, case, prior, model = "gradient_inversion", system.case, system.case.prior, system.model
    few = [client for client in system.scored if _is_one_batch(system.records[client][0])][:MOST_INVERTED]
    if (why := _unread(system, few)) or model is None:
        return [nothing(case, name, "image_psnr_db", why)], None
    shares = {client: _shares(system.records[client][0], system) for client in few}
    drawn = {c: labels_from_shares(one, system.records[c][0].samples or 1) for c, one in shares.items() if one is not None}
    groups: dict[object, list[int]] = {}
    for client in drawn:
        record = system.records[client][0]
        fixed = record.before.statistics.values() if record.settings.batch_norm == "eval" else ()
        groups.setdefault((record.samples, record.settings, tuple(one.tobytes() for one in fixed)), []).append(client)
    found: dict[int, Array] = {}
    for number, clients in enumerate(groups.values()):
        rng = stream(case.seed, "another system: gradient inversion", number)
        records = [system.records[client][0] for client in clients]
        found |= dict(zip(clients, _inverted(model, records, [drawn[c] for c in clients], rng, system.iterations), strict=True))
    mean, commonest = prior.x.mean(axis=0, dtype=np.float64), int(np.bincount(prior.y).argmax())
    sizes = {client: len(one) for client, one in drawn.items()}
    blank = ImageGuess(
        {client: np.repeat(mean[None], n, axis=0) for client, n in sizes.items()},
        {client: np.full(n, commonest) for client, n in sizes.items()},
    )
    steps = sorted({system.records[client][0].settings.epochs for client in drawn})
    note = (
        f"{sum(sizes.values())} sample(s) of {len(drawn)} client(s), {' or '.join(map(str, steps))} local step(s), first update, "
        f"{system.iterations} iterations; {prior.description}; baseline: the mean auxiliary sample"
    )
    if model.norms:
        note += "; layers normalise by the batch where clients trained in training mode, by running statistics where in evaluation mode"
    figures, guess = [], ImageGuess(found, drawn)
    a_sample = case.truth.data[next(iter(drawn))][0][0]
    for metric in ("image_psnr_db", "image_ssim", "labels_exact"):
        if metric == "image_ssim" and np.isnan(ssim(a_sample, a_sample)):
            continue
        mine, theirs = (image_score(one, case.truth, list(drawn), metric) for one in (guess, blank))
        made = cell(case, name, metric, mine, theirs, mine, margin=IMAGE_MARGIN[metric], share=metric == "labels_exact", note=note)
        figures.append(_alone(made, len(drawn)))
    shape = (1, *prior.shape) if len(prior.shape) == 2 else prior.shape
    if len(shape) != 3:  # the report has nothing to show
        return figures, None
    arrays = {
        "clients": np.array(list(drawn)), "truth": np.stack([case.truth.data[c][0][0].reshape(shape) for c in drawn]),
        "recovered": np.stack([found[c][0].reshape(shape) for c in drawn]), "baseline": mean.reshape(shape),
    }  # fmt: skip
    return figures, arrays


def _is_one_batch(record: Record) -> bool:
    """Whether a client trained on few samples, all in each step."""
    one = record.settings
    return record.samples is not None and record.samples <= min(MOST_IMAGES, one.batch_size or MOST_IMAGES) and one.epochs <= MOST_STEPS


def _unread(system: System, few: Sequence[int]) -> str:
    """Why no update is inverted; empty if some are."""
    model, records = system.model, [system.records[client][0] for client in few]
    if model is None or not system.scored:
        return NO_MODEL if model is None else NO_TRUTH
    if not few:
        return f"not attempted: no client has at most {MOST_IMAGES} samples in one batch and {MOST_STEPS} steps; this proves nothing"
    if model.words:
        return "not attempted: inputs are words, not numbers"
    if system.head is None:
        return f"not attempted: labels come from the head's bias; {system.headless}"
    if model.has_dropout:
        return "not attempted: the model has dropout, whose draws are not known; that proves nothing"
    if not all(map(_is_sgd, records)):
        return NOT_SGD
    if any(one.settings.lr is None and (one.settings.epochs > 1 or one.labels is None) for one in records):
        return "not attempted: several local steps of unknown learning rate; that proves nothing"
    if any(one.settings.batch_norm == "eval" and one.before.statistics.keys() != model.statistics.keys() for one in records):
        return "not attempted: layers trained in evaluation mode, and the states have no running statistics; that proves nothing"
    return ""


def _inverted(model: ForeignModel, records: Sequence[Record], labels: Sequence[Array], rng: np.random.Generator, iterations: int) -> Array:
    """Images (m, n, *shape) in [0, 1] of m clients that trained alike; from the update's direction where its rate is not known."""
    how = records[0].settings
    form = model.frozen(records[0].before.statistics) if how.batch_norm == "eval" else model.in_training
    starts, ends = (np.stack([vector_of(form, getattr(one, when)) for one in records]) for when in ("before", "after"))
    steps = LocalSteps(how.epochs, how.lr or 1.0, how.momentum, how.weight_decay)
    distance: Any = "cosine" if how.lr is None else "squared"
    return invert_updates(
        form, starts, ends - starts, np.stack(labels), steps, rng, iterations=iterations, distance=distance,
        beside=_beside(model, records),
    )[0]  # fmt: skip


def _beside(model: ForeignModel, records: Sequence[Record]) -> tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], Array] | None:
    """What running statistics show of the images beside the update, each layer's on the scale 1; None where they show nothing exact.

    They are needed: behind a layer that normalises by the batch, gradients do not depend on the length of the images.
    """
    found = [batch_statistics(model, one.before, one.after, one.steps) for one in records]
    if not model.norms or not all(found) or records[0].steps != 1 or records[0].settings.batch_norm == "eval":
        return None
    scales = {name: 1 / max(float(np.sqrt(np.mean([one[name] ** 2 for one in found]))), 1e-12) for name in model.statistics}
    scale = np.concatenate([np.full(shape, scales[name]) for name, shape in model.statistics.items()])
    seen = np.stack([np.concatenate([one[name] for name in model.statistics]) for one in found]) * scale
    made = statistics_of(model)
    return lambda theta, images: made(theta, images) * torch.tensor(scale), seen


# --- running statistics ---------------------------------------------------------------------------------------------------------------


def _statistics(system: System) -> Made:
    """The mean activation of a client's samples at the first layer that normalises, from running statistics. None such: no figure."""
    name, metric, case, prior, model = "batch_statistics", "activation_mean_error", system.case, system.case.prior, system.model
    if model is None or not system.scored:
        return [nothing(case, name, metric, NO_MODEL if model is None else NO_TRUTH)], None
    if not model.norms:
        return [nothing(case, name, metric, "no layer keeps running statistics")], None
    layer = next(iter(model.norms))
    errors: list[tuple[float, float]] = []
    for client in system.scored:
        record = system.records[client][0]
        found = batch_statistics(model, record.before, record.after, record.steps).get(f"{layer}.running_mean")
        if found is None or record.settings.batch_norm == "eval":
            continue
        real, blank = (_activation(model, layer, record, x) for x in (case.truth.data[client][0], prior.x))
        errors.append((float(np.linalg.norm(found - real)), float(np.linalg.norm(blank - real))))
    if not errors:
        why = "running statistics are not in the states, or clients trained in evaluation mode"
        return [nothing(case, name, metric, why)], None
    note = (
        f"what the steps of the first update of {len(errors)} client(s) added to the running mean of layer {layer!r}, beside the mean "
        "activation of the client's samples on the way of its training: their distance; baseline: that of the auxiliary samples' mean "
        f"activation, on the scale on which its mean is 1; {prior.description}"
    )
    mine, blank = np.array(errors).T / max(float(np.mean([far for _, far in errors])), 1e-300)
    made = cell(case, name, metric, mine, blank, mine, margin=STATISTICS_MARGIN, lower_is_better=True, note=note)
    return [_alone(made, len(errors))], None


def _activation(model: ForeignModel, layer: str, record: Record, x: Array) -> Array:
    """The mean input (channels,) of a layer over samples x, normalised by the batch, on the way of a client's training."""
    form, found = model.in_training, list[Array]()
    start, end = vector_of(form, record.before), vector_of(form, record.after)

    def keep(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        found.append(args[0].double().mean(dim=(0, *range(2, args[0].dim()))).numpy())

    path = ONE_STEP if record.steps == 1 else PATH
    for share in path:
        module = form.load((start + share * (end - start)).astype(np.float32))
        handle = module.get_submodule(layer).register_forward_pre_hook(keep)
        with torch.no_grad():
            module(form.inputs(x))
        handle.remove()
    kept = (1 - (model.norms[layer] or 0.0)) ** (record.steps or 1)  # late steps count more in running means
    return np.asarray(np.average(found, axis=0, weights=[kept ** (1 - share) for share in path]))


FOREIGN_ATTACKS: Mapping[str, Callable[[System], Made]] = {
    "label_inference": _labels, "membership": _membership, "gradient_inversion": _images, "batch_statistics": _statistics,
}  # fmt: skip
"""What reads updates of other systems, by name."""
