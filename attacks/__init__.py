"""Attacks on recorded runs: what an adversary learns from what it has seen.

An attack gets an `AdversaryView` (a filter of a recorded transcript plus the coalition's own secrets) and a stated `Prior`, and returns a
guess; a scorer that never sees the view compares the guess with the truth. Every figure stands beside the same attack without a view and
beside the same attack on the unprotected pipeline, and carries an interval.

Writing one
-----------
An attack is a module with three functions, and one line below, or `cflpriv.register_attack(name, Attack(...))` in a file of your own:

    guess(view: AdversaryView | None, prior: Prior, ...) -> Guess     no truth in here; None is the attack without a view
    score(guess, truth: Truth, ...) -> Array                          no view in here; one number a client
    cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]   runs both on the views of a case and states the figures

A `Case` is one adversary on one run: `view`, `reference` (the same on the weakest form of the same pipeline: same seed and data, no
protection), `prior`, `truth`, and the `budget`. `cells` makes its figures from arrays of scores, one score a client: of the view, of no
view, of the reference (`leakage.cell(case, NAME, metric, observed, blank, reference, ...)`). Where the view holds nothing for the attack it
gives `leakage.nothing(case, NAME, metric, why)`. `why` begins with "not attempted" where the view may hold something that the attack does
not read. Arrays, if any, are saved for the report: "clients" (m,) with "truth", "recovered" (m, C, H, W) and "baseline" (C, H, W), and/or
"label_truth", "label_guess" (m, classes). An audit calls `cells` for every seed of its budget and pools the results. An attack that
reruns the configuration itself (`reruns`) is called for the recorded seed only.

Stand-alone
-----------
The mathematics of each attack is a plain function of arrays, for updates, signatures and Gram matrices of any other system:
`invert_signature`, `recover_label_set`, `place_signatures`, `labels_from_bias`, `labels_from_templates`, `labels_from_gram`,
`labels_from_update_gram`, `assign`, `rows_from_products`, `disaggregate`, `groups_from_scores`, `recover_labels`, `counts_from_lengths`,
`invert_updates`, `input_from_gradients`, `inputs_of_batch`, `decode_features`, `tokens_from_rows`, `window_from_rows`,
`clusters_from_sizes`, `products_from_bare`. See examples/attack_other_systems.py.
`audit_updates` runs the attacks on states of a torch model before and after local training (`LoopSettings`, `Update`); `save_updates`
writes a folder of them for `cflpriv audit --foreign`: examples/audit_your_own_loop.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if "." not in __name__:
    raise ImportError(f"{__name__}: is a part of cflpriv and does not stand alone; import cflpriv.attacks", name=__name__)

from ..plugins import ATTACKS, register_attack
from ..types import Array

if TYPE_CHECKING:
    from .adversary import ADVERSARIES, AdversaryView, load_view, view_of
    from .compared.anchor_counts import labels_from_templates
    from .compared.assignment import assign
    from .compared.ckks_products import products_from_bare
    from .compared.cluster_identity import clusters_from_sizes
    from .compared.gram_geometry import labels_from_gram
    from .compared.gram_updates import labels_from_update_gram
    from .compared.influence_scores import groups_from_scores
    from .compared.signature_inversion import invert_signature, recover_label_set
    from .compared.signature_places import place_signatures
    from .compared.sybil_span import rows_from_products
    from .evidence.disaggregation import disaggregate
    from .figures.leakage import BUDGETS, Budget, Case, Cell, Prior, Truth
    from .foreign.foreign_audit import audit_updates
    from .foreign.foreign_folder import audit_folder, save_updates
    from .foreign.foreign_system import LoopSettings, Update
    from .inversion.closed_form import input_from_gradients
    from .inversion.feature_decoder import decode_features
    from .inversion.image_search import invert_updates
    from .inversion.imprint import images_from_imprint
    from .inversion.spear import inputs_of_batch
    from .inversion.token_recovery import tokens_from_rows, window_from_rows
    from .key_recovery import recover_labels
    from .labels.label_inference import labels_from_bias
    from .labels.update_norms import counts_from_lengths
    from .properties.property_inference import infer_property

_HOME = {
    "ADVERSARIES": "adversary",
    "AdversaryView": "adversary",
    "BUDGETS": "figures.leakage",
    "Budget": "figures.leakage",
    "Case": "figures.leakage",
    "Cell": "figures.leakage",
    "LoopSettings": "foreign.foreign_system",
    "Prior": "figures.leakage",
    "Truth": "figures.leakage",
    "Update": "foreign.foreign_system",
    "assign": "compared.assignment",
    "audit_folder": "foreign.foreign_folder",
    "audit_updates": "foreign.foreign_audit",
    "clusters_from_sizes": "compared.cluster_identity",
    "counts_from_lengths": "labels.update_norms",
    "decode_features": "inversion.feature_decoder",
    "disaggregate": "evidence.disaggregation",
    "groups_from_scores": "compared.influence_scores",
    "images_from_imprint": "inversion.imprint",
    "infer_property": "properties.property_inference",
    "input_from_gradients": "inversion.closed_form",
    "inputs_of_batch": "inversion.spear",
    "invert_signature": "compared.signature_inversion",
    "invert_updates": "inversion.image_search",
    "labels_from_bias": "labels.label_inference",
    "labels_from_gram": "compared.gram_geometry",
    "labels_from_templates": "compared.anchor_counts",
    "labels_from_update_gram": "compared.gram_updates",
    "load_view": "adversary",
    "place_signatures": "compared.signature_places",
    "products_from_bare": "compared.ckks_products",
    "recover_label_set": "compared.signature_inversion",
    "recover_labels": "key_recovery",
    "rows_from_products": "compared.sybil_span",
    "save_updates": "foreign.foreign_folder",
    "tokens_from_rows": "inversion.token_recovery",
    "view_of": "adversary",
    "window_from_rows": "inversion.token_recovery",
}
"""Public name -> its module, which is imported when the name is first used: the names of attacks are known without scipy and torch."""

__all__ = [
    "ADVERSARIES", "ATTACKS", "AdversaryView", "Attack", "BUDGETS", "Budget", "Case", "Cell", "LoopSettings", "Prior", "Truth",
    "Update", "assign", "audit_folder", "audit_updates", "clusters_from_sizes", "counts_from_lengths", "decode_features",
    "disaggregate", "groups_from_scores", "images_from_imprint", "infer_property", "input_from_gradients", "inputs_of_batch",
    "invert_signature", "invert_updates", "labels_from_bias", "labels_from_gram", "labels_from_templates", "labels_from_update_gram",
    "load_view", "place_signatures", "products_from_bare", "recover_label_set", "recover_labels", "rows_from_products",
    "save_updates", "tokens_from_rows", "view_of", "window_from_rows",
]  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """An attack of the suite: a line for `cflpriv list`, and what turns a case into cells and arrays for the report.

    `reruns`: the attack reruns the configuration itself, once per seed of the budget, and is called for the recorded run only. It does not
    read `Case.reference`, and so goes on where the unprotected twin diverges.
    `numbers`: the attack also reads runs whose labels are numbers (a regression).
    `risk`: what a leak is to data protection law (WP216, EDPB 28/2024): "singling out", "linkability" or "inference".
    `active`: only a server that deviates from the protocol can make it.
    `limits`: what the attack does not read or show, in a short sentence, for the table of attacks (`attack_table`).
    `learns` and `reduces` go into an audit's verdict where it leaks: what the adversary learns, and what would reduce that.
    """

    summary: str
    cells: "Callable[[Case], tuple[list[Cell], dict[str, Array] | None]]"
    reruns: bool = False
    learns: str = ""
    reduces: str = ""
    numbers: bool = False
    active: bool = False
    risk: str = ""
    limits: str = ""


@dataclass(frozen=True)
class _Cells:
    """The `cells` of a module of this package, which is imported when they are called."""

    module: str

    def __call__(self, case: "Case") -> "tuple[list[Cell], dict[str, Array] | None]":
        made: tuple[list[Cell], dict[str, Array] | None] = import_module(f".{self.module}", __name__).cells(case)
        return made


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_SUMS = 'secure sums of a large minimum cohort ([protection] sum = "secagg", min_cohort)'
_HIDDEN = 'transformed comparison ([protection] gram = ["haar"]), or privacy noise ([privacy])'
_NOISE = "privacy noise ([privacy] epsilon), fewer rounds, or more clients a cluster"
for _name, _attack in {
    "signature_inversion": Attack(
        "mean image and label set of a client from its signature U_p; of a rotated one the image, by its label set",
        _Cells("compared.signature_inversion"),
        learns="what clients' data look like on average",
        reduces='encrypted comparison that releases labels only ([protection] gram = ["ckks"]), or privacy noise ([privacy])',
        risk="singling out",
        limits="No single sample is recovered. Under a rotation the image is only what the label set determines.",
    ),
    "label_inference": Attack(
        "label sets and histograms from the bias gradient in updates",
        _Cells("labels.label_inference"),
        learns="which labels clients have and how many of each",
        reduces=f'{_SUMS}, with [training] sampling = "fixed_cohorts"',
        risk="inference",
        limits="Labels that no auxiliary sample has are not named. Figures of whole clusters (`aggregate_`) name no client.",
    ),
    "reported_scores": Attack(
        "label shares from the losses and the counts by class that clients report",
        _Cells("labels.reported_scores"),
        learns="which labels clients have, from scores that they report",
        reduces="an algorithm whose clients report no losses, or privacy noise ([privacy])",
        risk="inference",
        limits="That models fit their training samples better than others is not modelled, so losses of late rounds mislead.",
    ),
    "anchor_counts": Attack(
        "label counts from gradients at an anchor model (StoCFL)",
        _Cells("compared.anchor_counts"),
        learns="how many samples of each label clients have",
        reduces=_HIDDEN,
        risk="inference",
        limits="Approximate for clients that have all labels, and after many local steps.",
    ),
    "gram_geometry": Attack(
        "label sets from inner products, with 0, 3 and 10 known clients",
        _Cells("compared.gram_geometry"),
        learns="which labels clients have, from inner products",
        reduces='encrypted comparison that releases labels only ([protection] gram = ["ckks"])',
        risk="inference",
        limits="A figure holds for its number k of known clients. At k = 0 all clients are named together, right or wrong.",
    ),
    "gram_updates": Attack(
        "label sets from inner products of updates from a public model, no known client",
        _Cells("compared.gram_updates"),
        learns="which labels clients have, from inner products of updates that a transform keeps",
        reduces=_SUMS,
        risk="inference",
        limits="Never `at_baseline`: a bad fit shows nothing. Models that differ between clients and `[privacy]` are not attempted.",
    ),
    "fold_release": Attack(
        "sample counts, members and single images from the folds of cross-fitted clustering",
        _Cells("compared.fold_release"),
        learns="sample counts, members or samples of clients, from what crossfit compares",
        reduces=_HIDDEN,
        risk="singling out",
        limits="Images of clients with at most two samples only. A client that sends a chosen fold is not modelled.",
    ),
    "sybil_span": Attack(
        "signatures from inner products with known vectors that span them",
        _Cells("compared.sybil_span"),
        learns="clients' signatures, by clients of its own that are compared with them",
        reduces="clients that are admitted by identity only",
        numbers=True,
        risk="singling out",
        limits="Vectors of colluding clients only; chosen vectors would show more.",
    ),
    "cluster_identity": Attack(
        "a client's group, from the model it is sent and the clients it is summed with",
        _Cells("compared.cluster_identity"),
        learns="which clients are alike",
        reduces='oblivious secure sums ([protection] sum = "secagg-oblivious")',
        numbers=True,
        risk="linkability",
        limits="Shows who is alike, not what a group has in common. Clients that change groups are not modelled.",
    ),
    "disaggregation": Attack(
        "single clients' values from sums over cohorts",
        _Cells("evidence.disaggregation"),
        learns="single clients' updates from sums",
        reduces='cohorts that do not change ([training] sampling = "fixed_cohorts"), a larger min_cohort',
        numbers=True,
        risk="singling out",
        limits="Solves values that stay the same, not updates at changing models. Colluders' parts only where training again gives them.",
    ),
    "key_recovery": Attack(
        "label sets, histograms and coordinates from updates under a secret permutation",
        _Cells("key_recovery.cells"),
        learns="what a secret permutation of updates hides",
        reduces=_SUMS,
        risk="inference",
        limits="Abstains below a confidence of 0.05, which is no sign of safety. Unreliable for Adam; abstains under Hadamard.",
    ),
    "gradient_inversion": Attack(
        "training images of one client's update, for few samples and steps; of texts the words",
        _Cells("inversion.gradient_inversion"),
        learns="training samples, or words, of clients",
        reduces=_SUMS,
        risk="singling out",
        limits="At most 20 samples (4 for the optimisation) in one batch and 10 steps. Larger batches are not shown to be safe.",
    ),
    "prototype_inversion": Attack(
        "mean images of a client's classes from prototypes (FedProto), and those of all owners of a class from their mean",
        _Cells("inversion.prototype_inversion"),
        learns="what clients' samples of each class look like on average",
        reduces="an algorithm whose clients send no mean features",
        risk="singling out",
        limits="The first prototypes are read. Single samples only of classes with one sample.",
    ),
    "exact_zeros": Attack(
        "words, or inputs of a first layer, that only one client has, and samples with others: from exact zeros of sums",
        _Cells("inversion.exact_zeros"),
        learns="which words or inputs are whose, although updates are summed",
        reduces='cohorts that do not change ([training] sampling = "fixed_cohorts"), or privacy noise ([privacy])',
        risk="singling out",
        limits="Cohorts must change. Convolutional networks, noise, and sums of more than training show no owner.",
    ),
    "update_norms": Attack(
        "numbers of samples from weights in the open or summed, and from the lengths of updates, which transforms keep",
        _Cells("labels.update_norms"),
        learns="how many samples clients have",
        reduces=f'equal weights ([training] weights = "equal") and {_SUMS}',
        numbers=True,
        risk="inference",
        limits="Lengths of clipped updates are not read, nor secure sums in which all clients weigh the same.",
    ),
    "membership": Attack(
        "membership of training samples, from models, updates and reported losses: loss threshold, LiRA, RMIA, gradients",
        _Cells("membership.membership_audit"),
        learns="whether a sample was trained on",
        reduces=_NOISE,
        numbers=True,
        risk="singling out",
        limits="An AUC is an average: near one half it does not protect everybody. At most 400 pairs a model; no texts.",
    ),
    "source_inference": Attack(
        "which client of a group has a sample, from updates or changing sums: regression on gradients, lowest loss",
        _Cells("membership.source_inference"),
        learns="which client of a group a sample belongs to",
        reduces=_SUMS,
        risk="linkability",
        limits="The regression has all samples that are asked about. Sums over cohorts that do not change and texts are not read.",
    ),
    "property_inference": Attack(
        "stroke width, slant, rotation, a label: from signatures, updates, models",
        _Cells("properties.property_inference"),
        learns="properties of clients' data",
        reduces=_NOISE,
        risk="inference",
        limits="Listed properties only, where clients' shares differ by more than chance.",
    ),
    "model_inconsistency": Attack(
        "one client's update from a secure sum, by sending the others a model whose units are dead",
        _Cells("inversion.model_inconsistency"),
        learns="one client's update from a secure sum, by sending others another model",
        reduces='[protection] secagg_mode = "active"',
        numbers=True,
        active=True,
        risk="singling out",
        limits="Sums that list several models are not attempted.",
    ),
    "imprint": Attack(
        "training images from one update or one secure sum, by sending a first layer made of bins",
        _Cells("inversion.imprint"),
        learns="training images, by a model made for it",
        reduces="a first layer that clients check, or privacy noise ([privacy])",
        numbers=True,
        active=True,
        risk="singling out",
        limits="Networks that begin with a linear layer and ReLU. Transformed and oblivious sums are not attempted.",
    ),
    "influence": Attack(
        "groups from the N × N scores of pFedLIA",
        _Cells("compared.influence_scores"),
        learns="which clients are alike, from scores of influence",
        reduces="an algorithm that compares under a transform or encrypted",
        numbers=True,
        risk="linkability",
        limits="Shows who is alike, not what a group has in common.",
    ),
    "likeness": Attack(
        "which clients are alike, from any part of what they send in rows",
        _Cells("compared.likeness"),
        learns="which clients are alike, from numbers that they send",
        reduces=_NOISE,
        numbers=True,
        risk="linkability",
        limits="A part that does not separate groups may still show something else.",
    ),
    "coverage": Attack(
        "names every part of clients' data in the view that no attack of the suite reads",
        _Cells("figures.coverage"),
        numbers=True,
        limits="A part that an attack reads may hold more than the attack sees.",
    ),
    "dp_audit": Attack(
        "a lower bound on ε for each private release and for the whole run, by reruns with canaries",
        _Cells("dp.dp_run"),
        reruns=True,
        learns="more than the claimed ε allows: the privacy noise is wrong",
        reduces="a report of it to us: the guarantee does not hold",
        risk="singling out",
        limits="A bound below the claim only fails to refute it. Predictable noise and other machines are not tested.",
    ),
}.items():
    register_attack(_name, _attack)
