"""Audits of other systems: labels, membership and images from the states that clients of any torch loop were sent and returned.

    from cflpriv.attacks import LoopSettings, Update, audit_updates

    updates = [Update(before, after, x, y) for before, after, x, y in recorded]
    audit_updates(model, updates, (x_auxiliary, y_auxiliary), LoopSettings(lr=0.1, batch_size=16)).report("audit.html")

The adversary is whoever reads single updates. It knows the model, the settings of local training, labelled auxiliary samples, and how many
samples and labels each client has. The clients' own samples are truth: scorers compare guesses with them, no guess sees them.

Each attack is the suite's own, on states of another system. Labels: `foreign_labels`. Images: `foreign_images`. Membership: ridge
regression of updates on single samples' gradients, as in `membership_gradients` but without shadow models; the loss threshold (Yeom et al.
2018); RMIA (Zarifzadeh et al. 2024) with the model that the client was sent as its only reference model. Running statistics: what the
client's steps must have added.

There is no unprotected twin of another system, hence no reference that would show an attack's power. A figure is `leaks` if it beats the
same attack without the view by the margin, else `inconclusive`; with fewer than three scores it is `not_validated`. No figure is
`at_baseline`: an audit of another system never shows that nothing leaks. Not modelled: dropout.

Before any attack the evidence is examined (`foreign_evidence`). If it fails a check, no attack is made, and every figure is
`evidence_doubtful`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from torch import nn

from ...console import counted
from ...errors import InputError
from ...experiments.report.foreign_report import FOREIGN, PYTHON
from ...experiments.report.shown import AuditFindings, temporary_folder
from ...files import toml_text, write_atomically, write_packed
from ...plugins import ATTACKS
from ...randomness import stream
from ...types import Array
from ..figures.family import judged_together
from ..figures.leakage import Cell, Truth, cell, in_words_of, nothing
from ..figures.significance import RATE, chance
from ..figures.verdicts import audit_text
from ..labels.label_readings import ONE_STEP, PATH
from ..membership.member_scores import confidences, loss_threshold, rmia, roc
from ..membership.membership_audit import FALSE_POSITIVES, FEWEST_ASKED, MembershipOutcome, auc_gain, member_p
from ..membership.membership_audit import MARGIN as MEMBER_MARGIN
from ..membership.membership_gradients import MOST_NUMBERS, clipped_gradients, shortened
from ..membership.membership_shadows import pairs_of
from .foreign_evidence import doubts_of
from .foreign_images import images
from .foreign_labels import NO_MODEL, NO_TRUTH, ROUNDS, alone, as_sent, labels, settled_vector
from .foreign_states import ForeignModel, batch_statistics, vector_of
from .foreign_system import AttackOutput, LoopSettings, System, Update, UpdateRecord, system_of, written_settings

__all__ = ["FOREIGN_ATTACKS", "REMEDIES", "LoopSettings", "Update", "audit_updates", "outputs_of", "write_audit"]

SOURCES = {"gradients": "update", "rmia": "own_model", "loss": "own_model"}
"""What an attack on membership reads."""
RIDGE = 0.1
"""Penalty of the regression of updates, in mean squared lengths of gradients."""
STATISTICS_MARGIN = 0.1


def audit_updates(
    model: nn.Module, updates: Sequence[Update], auxiliary: tuple[Any, Any], settings: LoopSettings | None = None, *,
    attacks: Sequence[str] | None = None, head: str | None = None, seed: int = 0, iterations: int = 200,
) -> AuditFindings:  # fmt: skip
    """The figures of every attack on the updates of another system, judged together, with their verdicts and a report.

    `model` maps samples to scores (n, classes); the values of its parameters are not used. `auxiliary` are labelled samples (x, y) that no
    client trained on, as the model takes them. Half of the auxiliary samples are held out as non-members where an update has no `outside`.
    `head` names the last layer (default: the last layer with as many biases as there are classes). `iterations` is the number of iterations
    of gradient inversion. Random numbers are drawn by `seed`. All figures are `evidence_doubtful` if the updates, samples or labels fail a
    check of `foreign_evidence`; the note has the reason. Raises `InputError` naming client and array, attack or layer.
    """
    system = system_of(model, updates, auxiliary, settings or LoopSettings(), head=head, seed=seed, iterations=iterations)
    outputs, doubts = outputs_of(system, attacks)
    cells, _ = judged_together([cell for made, _ in outputs.values() for cell in made])

    @cache
    def written() -> Path:
        folder = Path(mkdtemp(dir=temporary_folder())) / "updates"
        folder.mkdir()
        write_atomically(folder / FOREIGN, toml_text(written_settings(settings or LoopSettings())))
        write_audit(folder, system, outputs, doubts, "given as a module", PYTHON)
        return folder

    return AuditFindings(cells, written)


def write_audit(
    folder: Path, system: System, outputs: Mapping[str, AttackOutput], doubts: Mapping[str, str], model: str, source: str = "folder"
) -> list[Cell]:  # fmt: skip
    """Write audit.json, and audit/ with what was recovered, into a folder; the figures.

    `model` says which model the auditor had, `source` where the updates came from: "folder" or "python".
    """
    cells = list[Cell]()
    (folder / "audit").mkdir(exist_ok=True, mode=0o700)
    for name, (made, arrays) in outputs.items():
        file = None if arrays is None else f"{name}_server.npz"
        if arrays is not None and file is not None:
            write_packed(folder / "audit" / file, arrays)
        cells += [replace(cell, arrays=file) for cell in made]
    table, family = judged_together(cells)
    more = {"evidence_doubtful": doubts, "assumed": system.assumed(model), "source": source, "attacks": _extent([] if doubts else outputs)}
    write_atomically(folder / "audit.json", audit_text(table, family, REMEDIES, **more))
    return table


def _extent(made: Collection[str]) -> dict[str, list[str]]:
    """The attacks that were made, and all others of the suite."""
    return {"run": list(made), "not_run": [name for name in dict.fromkeys((*FOREIGN_ATTACKS, *ATTACKS.names())) if name not in made]}


def outputs_of(system: System, attacks: Sequence[str] | None = None) -> tuple[dict[str, AttackOutput], dict[str, str]]:
    """Cells and arrays by attack, and why the evidence is doubtful, by check. Raises `InputError` for an attack that is not known."""
    for name in attacks or ():
        if name not in FOREIGN_ATTACKS:
            raise InputError(f"attack {name!r}: does not read updates of other systems; known are {', '.join(FOREIGN_ATTACKS)}")
    chosen = {name: attack for name, attack in FOREIGN_ATTACKS.items() if attacks is None or name in attacks}
    doubts = doubts_of(system)
    made: dict[str, AttackOutput]
    if doubts:
        why = "; ".join(doubts.values())
        cells = {name: replace(nothing(system.case, name, METRICS[name], why), status="evidence_doubtful") for name in chosen}
        made = {name: ([cell], None) for name, cell in cells.items()}
    else:
        made = {name: attack(system) for name, attack in chosen.items()}
    return {name: (in_words_of(system.case.prior.shape, cells), arrays) for name, (cells, arrays) in made.items()}, doubts


# --- membership ---------------------------------------------------------------------------------------------------------------------


def _membership(system: System) -> AttackOutput:
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
        why = f"not attempted: {counted(count, 'sample')} with a non-member of the same label, fewer than {FEWEST_ASKED}"
        return [nothing(case, name, metric, why)], None
    scores = {attack: np.zeros(len(asked.y)) for attack in ("gradients", "rmia", "loss", "blank")}
    for client in np.unique(asked.owners).tolist():
        own = asked.owners == client
        first, last = system.records[client][0], system.records[client][-1]
        models = np.stack([
            settled_vector(system, model, last, last.after), settled_vector(system, model, first, first.before),
            as_sent(system, model, first.before)
        ])  # fmt: skip
        target, beside, sent = confidences(model.evaluated, models, asked.x[own], asked.y[own])
        others = confidences(model.evaluated, models[:2], prior.x[rest], prior.y[rest])
        scores["rmia"][own] = rmia(target, beside[None], others[0], others[1:])
        scores["loss"][own], scores["blank"][own] = loss_threshold(target), loss_threshold(sent)
        scores["gradients"][own] = _explained(system, model, system.records[client][:ROUNDS], asked.x[own], asked.y[own])
    source = "held-out auxiliary samples" if held else "those given"
    note = (
        f"{len(clients)} client(s): the first {ROUNDS} updates of each at most, or the model that it returned last; non-members, {source}, "
        "are paired with members by label; RMIA's reference: the model that the client was sent first; baseline: the loss threshold on "
        f"that model; {prior.description}"
    )
    figures = []
    for attack, kind in (("gradients", "auc"), ("gradients", "tpr"), ("rmia", "auc"), ("loss", "auc")):
        outcome = MembershipOutcome(scores[attack], scores["blank"][None], asked.member)
        figures.append(_member_cell(system, f"{SOURCES[attack]}_{attack}_{kind}", kind, outcome, note))
    return figures, None


def _explained(system: System, model: ForeignModel, records: Sequence[UpdateRecord], x: Array, y: Array) -> Array:
    """How much of a client's updates each sample's gradient explains, (n,), on a scale of its own: ridge regression on all together.

    Gradients are taken at the state that the client was sent, where those of members are as long as others'.
    """
    gram, towards, form = np.eye(len(y)), np.zeros(len(y)), model.evaluated
    trained = np.concatenate([np.full(int(np.prod(shape)), name in model.shapes) for name, shape, _ in form.layout])
    short, chunk = shortened(int(trained.sum())), max(1, MOST_NUMBERS // form.dimension)
    for record in records:
        start, end = (settled_vector(system, model, record, state) for state in (record.before, record.after))
        blocks = [clipped_gradients(form, start, x[at : at + chunk], y[at : at + chunk]) for at in range(0, len(y), chunk)]
        columns = np.concatenate([short(block[:, trained]) for block in blocks])
        scale = RIDGE * max(float(np.square(columns).sum(axis=1).mean()), 1e-300)
        gram += columns @ columns.T / scale
        towards += columns @ short((start - end)[trained][None])[0] / scale
    coefficients = np.linalg.solve(gram, towards)
    return np.asarray(coefficients / max(float(np.abs(coefficients).mean()), 1e-300))


def _member_cell(system: System, metric: str, kind: str, outcome: MembershipOutcome, note: str) -> Cell:
    case, at = system.case, roc(outcome.scores, outcome.member, FALSE_POSITIVES["tpr"])
    value, interval, blank = at.auc, at.auc_interval, at.auc - auc_gain(outcome)[0]
    if kind == "tpr":
        value, interval, blank = at.tpr, at.tpr_interval, float(outcome.tprs("tpr").mean())
    p = member_p(outcome, kind, case.seed)
    words = f"{at.members} members, {at.non_members} others, realised FPR {at.fpr:.4f}; {note}"
    made = Cell(
        "membership", case.view.adversary, case.protection, metric, value, *interval, baseline=blank, reference=None,
        status="leaks" if p < RATE else "inconclusive", seeds=(case.seed,), note=words, margin=MEMBER_MARGIN[kind], p=p,
    )  # fmt: skip
    perfect = MembershipOutcome(outcome.member.astype(np.float64), outcome.blank, outcome.member)
    return alone(made, at.members, member_p(perfect, kind, case.seed))


# --- running statistics ---------------------------------------------------------------------------------------------------------------


def _statistics(system: System) -> AttackOutput:
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
        means = batch_statistics(model, record.before, record.after, record.steps).get(f"{layer}.running_mean")
        if means is None or record.settings.batch_norm == "eval":
            continue
        real, blank = (_activation(model, layer, record, x) for x in (case.truth.data[client][0], prior.x))
        errors.append((float(np.linalg.norm(means - real)), float(np.linalg.norm(blank - real))))
    if not errors:
        why = "running statistics are not in the states, or clients trained in evaluation mode"
        return [nothing(case, name, metric, why)], None
    note = (
        f"what the steps of the first update of {len(errors)} client(s) added to the running mean of layer {layer!r}, beside the mean "
        "activation of the client's samples on the way of its training: their distance; baseline: that of the auxiliary samples' mean "
        f"activation, on the scale on which its mean is 1; {prior.description}"
    )
    errors_seen, blank = np.array(errors).T / max(float(np.mean([far for _, far in errors])), 1e-300)
    made = cell(case, name, metric, errors_seen, blank, errors_seen, margin=STATISTICS_MARGIN, lower_is_better=True, note=note)
    best = chance(np.zeros(len(errors)), -blank, STATISTICS_MARGIN)  # of errors that are all 0
    return [alone(made, len(errors), best)], None


def _activation(model: ForeignModel, layer: str, record: UpdateRecord, x: Array) -> Array:
    """The mean input (channels,) of a layer over samples x, normalised by the batch, on the way of a client's training."""
    form, means = model.in_training, list[Array]()
    start, end = vector_of(form, record.before), vector_of(form, record.after)

    def keep(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        means.append(args[0].double().mean(dim=(0, *range(2, args[0].dim()))).cpu().numpy())

    path = ONE_STEP if record.steps == 1 else PATH
    for share in path:
        module = form.lent((start + share * (end - start)).astype(np.float32))
        handle = module.get_submodule(layer).register_forward_pre_hook(keep)
        with torch.no_grad():
            module(form.inputs(x))
        handle.remove()
    kept = (1 - (model.norms[layer] or 0.0)) ** (record.steps or 1)  # late steps count more in running means
    return np.asarray(np.average(means, axis=0, weights=[kept ** (1 - share) for share in path]))


FOREIGN_ATTACKS: Mapping[str, Callable[[System], AttackOutput]] = {
    "label_inference": labels, "membership": _membership, "gradient_inversion": images, "batch_statistics": _statistics,
}  # fmt: skip
"""What reads updates of other systems, by name."""
METRICS: Mapping[str, str] = {
    "label_inference": "histogram_l1", "membership": "own_model_rmia_auc", "gradient_inversion": "image_psnr_db",
    "batch_statistics": "activation_mean_error",
}  # fmt: skip
"""The figure of each attack that is listed where the attack was not made."""
_SUMS = "secure sums, so that nobody sees a single client's update"
REMEDIES: Mapping[str, str] = {
    **dict.fromkeys(("label_inference", "gradient_inversion"), f"{_SUMS}, or differential privacy"),
    "membership": f"{_SUMS}, and differential privacy, because sums and models can show members as well",
    "batch_statistics": f"{_SUMS}, or normalising layers without running statistics",
}
"""What takes away from each attack what it reads, for any system, whatever its settings are called."""
