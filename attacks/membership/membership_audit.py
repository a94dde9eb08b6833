"""Membership inference on recorded runs, against the models in a view.

The scores are those of `member_scores`: the loss threshold, LiRA and RMIA. Two kinds of models are attacked by their confidence: the last
shared or cluster model that the adversary was shown, and a client's own model after its last update, where single updates can be read. A
third kind of figure reads the updates themselves, single updates or means, by regression on single samples' gradients
(`membership_gradients`).

The game. Some training samples of every client (members) are paired with samples of its test distribution that nobody trained on (others),
label by label. The attacker is asked about all samples of the pairs. LiRA, RMIA and the regression know everything else: the remaining
training samples, the clients that trained in each round, the initial model, the public settings. The adversary of differential privacy
knows as much; no figure is an upper bound for this adversary. The loss threshold has the model and the sample alone.

Shadow models are federated replicas: FedAvg of the run's own local training from the run's own initial model, over the clients that trained
the attacked model, round by round. Each client has as many samples as in the run, one of each pair by a coin. All shadow federations train
as rows of one stacked program. Samples that clients hold back are not asked about. Approximations: the replicas leave out what an algorithm
does beside averaging local training (control variates, pulls to another model, choices of clusters; a note names it). The clients of each
training come from the traffic. Under client-level privacy shadows clip as the run does, but add no noise.

No view: the same attack on the shadow models, which hold no information on membership. What it proves: what a model shows of single
samples, on average (AUC) and at few false alarms (TPR). What it does not prove: that an attacker who knows less gets as far, or that no
sample stands out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats
from torch import nn

from ...engine.models import Model, build_module
from ...experiments.config.config import Config
from ...protocols.orthonormal import TRANSFORMS
from ...randomness import stream
from ...tasks.training import Train
from ...types import Array, ClientData
from ..adversary import AdversaryView
from ..evidence.local_training import trainings_in
from ..evidence.reported_losses import losses_reported
from ..evidence.updates import ClientStep, public_model, single_steps, steps_in, trainings_of, unread, unread_movement
from ..figures.leakage import Case, Cell, Prior, Truth, nothing
from ..figures.significance import RATE, CellStatus
from .loss_members import scores_of_losses
from .member_scores import lira, loss_threshold, placements, rmia, roc, threshold
from .membership_gradients import affordable_steps, evidence, passes_of, read_steps
from .membership_shadows import MembershipGame, Pairs, Target, games_of, pairs_of, targets_in

__all__ = ["MembershipOutcome", "auc_gain", "cells", "chance_of_swaps", "curve_of", "member_chance", "member_p", "outcome"]

NAME = "membership"
MARGIN = {"auc": 0.02, "tpr": 0.01, "low_tpr": 0.01}
FALSE_POSITIVES = {"auc": 0.01, "tpr": 0.01, "low_tpr": 0.001}
"""The rate of false positives at which true positives are counted: 1 %, and .1 %, which is none of fewer than 1,000."""
GRID = 200
MOST_EXPOSED = 20
SWAPS = 1999
FEWEST_ASKED = 20
SHARE = 0.5
"""Of the seconds that a budget gives fresh runs, for the shadow federations."""
GRADIENTS_SHARE, ROUNDS = 0.25, 2
"""The same for the regression of updates, and how many rounds it takes for each of the budget's."""
PASSES, DOUBLES = 1.0e5, 2.0e4
"""A second trains about so many samples; a model of so many parameters takes twice as long as one of none."""


# --- figures ------------------------------------------------------------------------------------------------------------------------


def attack_scores(game: MembershipGame, attack: str) -> Array:
    """Scores (n,) of the samples asked about, larger for members: "loss", "lira" or "rmia"."""
    if attack == "lira":
        return lira(game.target, game.shadow, game.inside)
    if attack == "rmia":
        return rmia(game.target, game.shadow, game.others, game.shadow_others)
    return loss_threshold(game.target)


@dataclass(frozen=True, eq=False)
class MembershipOutcome:
    """Scores (n,) of one attack over all models of a view, who is a `member` (n,), and the scores when the shadows are attacked, (s, n)."""

    scores: Array
    blank: Array
    member: Array

    def tprs(self, kind: str) -> Array:
        """The no-view true-positive rates."""
        rate = FALSE_POSITIVES[kind]
        return np.array([(row[self.member] > threshold(row, self.member, rate)).mean() for row in self.blank])


def outcome(games: Sequence[MembershipGame], attack: str) -> MembershipOutcome:
    """One attack on several models, each with its own samples, scored together."""
    shadows = range(len(games[0].shadow))
    blank = np.stack([np.concatenate([attack_scores(game.without(s), attack) for game in games]) for s in shadows])
    scores, member = ([attack_scores(game, attack) for game in games], [game.member for game in games])
    return MembershipOutcome(np.concatenate(scores), blank, np.concatenate(member))


def auc_gain(outcome: MembershipOutcome) -> tuple[float, float]:
    """How much larger the AUC is than that without a view, and its standard error (DeLong et al. 1988, paired).

    The members' and the others' placement values vary independently; those of no view are means over shadow models.
    """
    own = placements(outcome.scores, outcome.member)
    blank = [placements(row, outcome.member) for row in outcome.blank]
    apart = [values - np.mean([two[side] for two in blank], axis=0) for side, values in enumerate(own)]
    spread = sum(float(values.var(ddof=1)) / len(values) for values in apart)
    return float(apart[0].mean()), float(np.sqrt(spread))


def member_chance(outcome: MembershipOutcome, kind: str) -> float:
    """How probable such a gain over no view is in one run where it is no more than the margin, one-sided.

    An AUC's by its standard error. A TPR's by the law of a count, over what the threshold may be: it is one of few non-members' scores, and
    the share of all scores above the r-th largest of n is Beta(r, n − r + 1).
    """
    if kind == "auc":
        gain, error = auc_gain(outcome)
        if error == 0:
            return float(gain <= MARGIN[kind])
        return float(stats.norm.sf((gain - MARGIN[kind]) / error))
    allowed = FALSE_POSITIVES[kind]
    curve = roc(outcome.scores, outcome.member, allowed)
    rank = int(allowed * curve.non_members) + 1
    above = stats.beta.ppf((np.arange(GRID) + 0.5) / GRID, rank, curve.non_members - rank + 1)
    rate = np.clip(above + float(outcome.tprs(kind).mean()) + MARGIN[kind] - allowed, 0.0, 1.0)
    return float(np.mean(stats.binom.sf(round(curve.tpr * curve.members) - 1, curve.members, rate)))


def member_p(outcome: MembershipOutcome, kind: str, seed: int) -> float:
    """The p of a figure of membership: of `member_chance`, for which samples vary independently, and `chance_of_swaps` the larger one."""
    return max(member_chance(outcome, kind), chance_of_swaps(outcome, kind, stream(seed, "membership: members swapped")))


def chance_of_swaps(outcome: MembershipOutcome, kind: str, rng: np.random.Generator, times: int = SWAPS) -> float:
    """How probable so much gain is if a coin says which of a pair is the member, one-sided.

    The i-th member and the i-th other are a pair: of one owner and label, and but for chance alike. So the p holds however scores of
    several samples hang together, as coefficients of one regression and confidences of one model do. An AUC is a sum of ranks, which swaps
    do not change, so its gain over no view is a sum over pairs.
    """
    coins = rng.integers(0, 2, (times, len(outcome.scores) // 2), dtype=np.bool_)
    if kind == "auc":
        ranks = stats.rankdata(np.vstack([outcome.scores, outcome.blank]), axis=1)
        apart = ranks[:, outcome.member] - ranks[:, ~outcome.member]
        gains = apart[0] - apart[1:].mean(axis=0)
        return _share_reached((2.0 * coins - 1) @ gains, float(gains.sum()))
    scores = np.concatenate([outcome.scores[outcome.member], outcome.scores[~outcome.member]])
    swapped = np.concatenate([coins, ~coins], axis=1)
    whole = np.arange(len(scores)) < len(scores) // 2
    rate = FALSE_POSITIVES[kind]
    return _share_reached(hits(scores, swapped, rate), float(hits(scores, whole[None], rate)[0]))


def _share_reached(drawn: Array, reached: float) -> float:
    """The share of draws (times,) that come up to what was reached, the draw that was made among them."""
    return (1 + int((drawn >= reached - 1e-9).sum())) / (1 + len(drawn))


def hits(scores: Array, member: Array, rate: float) -> Array:
    """How many members are found at a false-positive `rate`, (t,), for each of several memberships (t, n) bool."""
    order = np.argsort(-scores, kind="stable")
    falling, inside = scores[order], member[:, order]
    allowed = int(rate * (len(scores) - inside[0].sum()))
    bar = np.argmax(np.cumsum(~inside, axis=1) > allowed, axis=1)  # the place of the first false positive too many
    above = np.searchsorted(-falling, -falling[bar], side="left")
    counted = np.concatenate([np.zeros((len(inside), 1), np.int64), np.cumsum(inside, axis=1)], axis=1)
    return np.asarray(counted[np.arange(len(inside)), above])


def _cell(case: Case, metric: str, kind: str, observed: MembershipOutcome, twin: MembershipOutcome, note: str, rounds: int) -> Cell:
    curve, beside = (roc(outcome.scores, outcome.member, FALSE_POSITIVES[kind]) for outcome in (observed, twin))
    p, reference_p = (member_p(outcome, kind, case.seed) for outcome in (observed, twin))
    status: CellStatus = "not_validated" if reference_p >= RATE else "leaks" if p < RATE else "at_baseline"
    if kind == "auc":
        blanks = [curve.auc - auc_gain(observed)[0], beside.auc - auc_gain(twin)[0]]
        value, interval, reference = curve.auc, curve.auc_interval, beside.auc
    else:
        blanks = [float(outcome.tprs(kind).mean()) for outcome in (observed, twin)]
        value, interval, reference = curve.tpr, curve.tpr_interval, beside.tpr
    note = f"{curve.members} members, {curve.non_members} others, realised FPR {curve.fpr:.4f} (the recorded run's); {note}"
    return Cell(
        NAME, case.view.adversary, case.protection, metric, value, *interval, baseline=blanks[0], reference=reference, status=status,
        k_known=len(case.view.coalition), seeds=(case.seed,), note=note, margin=MARGIN[kind], reference_baseline=blanks[1],
        rounds=rounds, p=p,
    )  # fmt: skip


FIGURES = {
    "model": (("lira", "auc"), ("lira", "tpr"), ("lira", "low_tpr"), ("rmia", "auc"), ("rmia", "tpr"), ("loss", "auc")),
    "own_model": (("lira", "auc"), ("lira", "tpr"), ("lira", "low_tpr"), ("loss", "auc")),
}
"""What is attacked, the models sent, or clients' own models by their updates -> (attack, figure), the strongest attack first."""
EARLIER = "not attempted: single updates are in this view, but not from the last models; update_gradients reads them"
NOT_SHARED = "not attempted: no model of several clients can be read in this view; own_model and update figures read single clients' ones"
UNSEEN = {
    "model": "not attempted: too few test samples with labels that clients trained on",
    "own_model": "not attempted: too few test samples with the client's labels",
}


def cells(case: Case) -> tuple[list[Cell], dict[str, Array] | None]:
    """AUC, and TPR at 1 % and .1 % FPR: of shared or cluster models, of clients' own where single updates can be read, of updates, and of
    losses that clients report."""
    config = case.prior.config
    if config is None or (why := _refusal(case, config)):
        why = "not attempted: the training settings are not known" if config is None else why
        return [nothing(case, NAME, "model_lira_auc", why)], None
    truth, local = case.truth, trainings_of(case, public_model(case.prior).dimension).first
    if local is not None:  # samples held back are not trained on: nobody is asked about them
        parts = {c: local.part(ClientData(c, x, y, x[:0], y[:0])) for c, (x, y) in truth.data.items()}
        truth = replace(truth, data={c: (part.x_train, part.y_train) for c, part in parts.items()})
    figures, curves = _model_figures(case, config, truth)
    more, beside = _update_figures(case, config, truth)
    return [*figures, *more, *_loss_figures(case, truth)], curves | beside or None


def _loss_figures(case: Case, truth: Truth) -> list[Cell]:
    """What the losses that clients report show; no figure where none are reported of models that others have."""
    model = public_model(case.prior)
    reported = [losses_reported(view, model.dimension) for view in (case.view, case.reference)]
    clients = sorted(set(reported[0]) & set(reported[1]) & truth.data.keys())
    if not clients or model.loss != "cross_entropy":
        return []
    pairs = pairs_of(truth, clients, stream(case.seed, "membership: pairs of losses"))
    if int(pairs.member.sum()) < FEWEST_ASKED:
        return [nothing(case, NAME, "reported_losses_auc", UNSEEN["own_model"])]
    outcomes = []
    for of_view in reported:
        rng = stream(case.seed, "membership: coins of losses")
        scores, blank, asked = scores_of_losses(of_view, pairs, truth, model, case.budget.shadows, rng)
        outcomes.append(MembershipOutcome(scores, blank, pairs.member[asked]))
    number = max(len(reported[0][client]) for client in clients)
    note = (
        f"up to {number} mean losses that each of {len(clients)} client(s) reports, as equations for who of a pair is the member; "
        "everything else is known; baseline: coins at random"
    )
    observed, twin = outcomes
    return [_cell(case, f"reported_losses_{kind}", kind, observed, twin, note, 0) for kind in ("auc", "tpr", "low_tpr")]


def _model_figures(case: Case, config: Config, truth: Truth) -> tuple[list[Cell], dict[str, Array]]:
    """What models show by how sure they are: the last shared or cluster ones, and clients' own."""
    prior = case.prior
    model, noise, trainings = public_model(prior), config.noise_of(case.truth.groups), trainings_of(case, public_model(prior).dimension)
    open_config = prior.unprotected().config
    assert open_config is not None  # as `config` is

    def plain(number: int) -> Train:
        return trainings.at(number).clipped(open_config).train

    def private(number: int) -> Train:
        return plain(number) if noise is None else plain(number).private(noise)

    bound = config.privacy.clip_norm if config.privacy.unit == "client" else 0.0
    (observed, until), (reference, _) = (_targets(case, config, view, model) for view in (case.view, case.reference))
    if not observed or not reference:
        why = unread(case.view, model.dimension) or "no model that clients trained can be read in this view"
        return [nothing(case, NAME, "model_lira_auc", why)], {}
    all_games, asked_pairs = [], list[Pairs]()
    for targets, how, norm in ((observed, private, bound), (reference, plain, 0.0)):
        games = []
        for target in targets:
            pairs = pairs_of(truth, target.owners, stream(case.seed, "membership: pairs", client=target.owners[0]))
            shared, own = games_of(target, pairs, truth, prior, how, norm, case.budget.shadows, case.view.coalition)
            games.append((shared if target.is_shared else None, own))
            if targets is observed and target.is_shared:
                asked_pairs.append(pairs)
        all_games.append(games)
    figures: list[Cell] = []
    curves: dict[str, Array] = {}
    for place, source in enumerate(FIGURES):
        seen, beside = ([game for pair in games if (game := pair[place]) is not None] for games in all_games)
        if min(sum(int(game.member.sum()) for game in games) for games in (seen, beside)) < FEWEST_ASKED:
            hidden = source == "own_model" and not any(target.own for target in observed)
            earlier = set(single_steps(steps_in(case.view, model.dimension, case))) - set(case.view.coalition)
            unseen = unread(case.view, model.dimension) or (EARLIER if earlier else "no single client's update can be read in this view")
            is_alone = source == "model" and not any(target.is_shared for target in observed)
            several = unread(case.view, model.dimension) or NOT_SHARED
            why = unseen if hidden else several if is_alone else UNSEEN[source]
            figures.append(nothing(case, NAME, f"{source}_lira_auc", why))
            continue
        rounds = max(len(target.chain) for target in observed)
        words = {"model": f"{len(seen)} model(s)", "own_model": f"own models of {sum(len(target.own) for target in observed)} client(s)"}
        note = (
            f"{words[source]} after {rounds} round(s) of training; {case.budget.shadows} shadow federations; LiRA and RMIA know everything "
            "but who of a pair is the member, the loss threshold only the model; baseline: the shadow models attacked in the same way"
            f"{trainings.not_modelled()}"
        )
        outcomes = {attack: (outcome(seen, attack), outcome(beside, attack)) for attack, _ in FIGURES[source]}
        figures += [_cell(case, f"{source}_{attack}_{kind}", kind, *outcomes[attack], note, until) for attack, kind in FIGURES[source]]
        if source == "model":
            curves["exposed_model"] = most_exposed(outcomes["lira"][0], asked_pairs, case.view.coalition)
        curves |= _drawn(source, {attack: pair[0] for attack, pair in outcomes.items()}, outcomes["lira"][1])
    return figures, curves


def _update_figures(case: Case, config: Config, truth: Truth) -> tuple[list[Cell], dict[str, Array]]:
    """What updates show by single samples' gradients."""
    prior, metric = case.prior, "update_gradients_auc"
    if why := _unread(case, config):
        return [nothing(case, NAME, metric, why)], {}
    (observed, read), (reference, _) = _steps(case, case.view, prior), _steps(case, case.reference, prior.unprotected())
    if not read:
        return [nothing(case, NAME, metric, _unreadable(case))], {}
    if not observed or not reference:
        return [nothing(case, NAME, metric, "not attempted: to regress one update would take longer than this budget allows")], {}
    outcomes = [_regressed(case, steps, truth, how) for steps, how in ((observed, prior), (reference, prior.unprotected()))]
    if outcomes[0] is None or outcomes[1] is None:
        return [nothing(case, NAME, metric, UNSEEN["own_model"])], {}
    (shown, pairs), (beside, _) = outcomes[0], outcomes[1]
    rounds, all_rounds = len({step.round for step in observed}), len({step.round for step in read})
    single = all(len(step.members) == 1 for step in observed)
    note = (
        f"{len(observed)} of {len(read)} {'single' if single else 'mean'} updates that can be read, of {rounds} of {all_rounds} round(s), "
        f"regressed on candidates' gradients; {case.budget.shadows} shadows of each client; everything is known but who of a pair is the "
        f"member; baseline: the shadows' updates regressed in the same way{'' if single else trainings_in(case.reference).not_modelled()}"
    )
    until = 0 if len(observed) == len(read) else rounds
    figures = [_cell(case, f"update_gradients_{kind}", kind, shown, beside, note, until) for kind in ("auc", "tpr", "low_tpr")]
    return figures, {**_drawn("update", {"gradients": shown}, beside), "exposed_update": most_exposed(shown, [pairs], case.view.coalition)}


def _unread(case: Case, config: Config) -> str:
    """Why the updates of this run are not regressed; empty if they are."""
    if case.view.protection.sum in TRANSFORMS and not case.view.secrets:
        return "not attempted: updates are under a transform that this view does not undo"
    return ""


def _unreadable(case: Case) -> str:
    """Why no update of a whole model can be read."""
    why = unread_movement(case.view, public_model(case.prior).dimension)
    return why or "no update, and no mean update of a cluster, can be read in this view"


def _steps(case: Case, view: AdversaryView, prior: Prior) -> tuple[list[ClientStep], list[ClientStep]]:
    """The updates in a view that the budget allows to be regressed, and all that can be read."""
    assert prior.config is not None  # checked by the caller
    model, budget, known = public_model(prior), case.budget, case.truth.data.keys()
    steps = read_steps(case, view, prior, model)
    # not newcomers, nor colluders, in the reference as in the view
    read = [step for step in steps if known >= set(step.members) and not set(step.members) <= set(case.view.coalition)]
    passes = GRADIENTS_SHARE * budget.seconds / budget.seeds * PASSES / (1 + model.dimension / DOUBLES)
    return affordable_steps(read, ROUNDS * budget.rounds, [passes_of(step, prior, budget.shadows) for step in read], passes), read


def _regressed(case: Case, steps: Sequence[ClientStep], truth: Truth, prior: Prior) -> tuple[MembershipOutcome, Pairs] | None:
    """The regression of updates, and what was asked about; None if there are too few samples to ask about."""
    owners = sorted({client for step in steps for client in step.members})
    pairs = pairs_of(truth, owners, stream(case.seed, "membership: pairs of updates"))
    asked = ~np.isin(pairs.owners, case.view.coalition)
    if int((asked & pairs.member).sum()) < FEWEST_ASKED:
        return None
    scored = evidence(steps, pairs, truth, prior, case.budget.shadows, case.view.coalition)
    return MembershipOutcome(scored.scores[asked], scored.blank[:, asked], pairs.member[asked]), pairs


def most_exposed(outcome: MembershipOutcome, asked: Sequence[Pairs], left_out: Sequence[int]) -> Array:
    """The members that stand out most (up to `MOST_EXPOSED`, 3): owner, row of its training data, share of others that score as high.

    `asked` are the pairs of each model in turn; nothing was asked about clients `left_out`. Only members are listed that at most 1 % of the
    others reach.
    """
    kept = [~np.isin(pairs.owners, left_out) for pairs in asked]
    owners = np.concatenate([pairs.owners[own] for pairs, own in zip(asked, kept, strict=True)])
    rows = np.concatenate([np.concatenate([pairs.rows, pairs.rows])[own] for pairs, own in zip(asked, kept, strict=True)])
    others = np.sort(outcome.scores[~outcome.member])
    reached = 1 - np.searchsorted(others, outcome.scores, side="left") / max(1, len(others))
    order = np.argsort(-outcome.scores, kind="stable")
    chosen = [i for i in order if outcome.member[i] and reached[i] <= FALSE_POSITIVES["tpr"]][:MOST_EXPOSED]
    return np.array([(owners[i], rows[i], reached[i]) for i in chosen], dtype=np.float64).reshape(-1, 3)


def _drawn(source: str, outcomes: Mapping[str, MembershipOutcome], beside: MembershipOutcome) -> dict[str, Array]:
    """The curves of one kind of figure, by attack, for the report; `beside` is the first attack on the unprotected run."""
    curves = {f"roc_{source}_{attack}": curve_of(outcome) for attack, outcome in outcomes.items()}
    first = next(iter(outcomes))
    curves[f"roc_{source}_{first}_unprotected"] = curve_of(beside)
    curves[f"roc_{source}_others"] = np.array(int((~outcomes[first].member).sum()))
    return curves


def _refusal(case: Case, config: Config) -> str:
    """Why this adversary on this run is not attempted; empty if it is."""
    if any(isinstance(layer, nn.LSTM | nn.Embedding) for layer in build_module(public_model(case.prior)).modules()):
        return "not attempted: inputs are words, which training and test texts share"
    if any(training.gradient for training in trainings_in(case.reference).all):
        return "not attempted: clients send gradients, which replicas by local training do not imitate"
    if config.privacy.unit != "none" and not case.view.is_server:
        return "not attempted: this view does not say who trained a model, and the unprotected run's clusters need not be the same"
    return ""


def _targets(case: Case, config: Config, view: AdversaryView, model: Model) -> tuple[list[Target], int]:
    """The last models in a view; of an earlier round, half as many each time, where the budget does not allow their shadow federations.

    With them how many rounds are attacked, 0 for all.
    """
    trainings = trainings_of(case, model.dimension)
    rounds = every = 1 + max((message.round for message in view.messages), default=0)
    while True:
        targets = targets_in(view, case.reference, model.dimension, config.spec.renumbers, case)
        passes = sum(
            case.prior.samples_per_client.get(client, 0) * trainings.at(number).train.epochs
            for target in targets for number, clients in (*target.chain, (target.round, tuple(target.own))) for client in clients
        )  # fmt: skip
        seconds = passes * case.budget.shadows / PASSES * (1 + model.dimension / DOUBLES)
        if seconds <= SHARE * case.budget.seconds / case.budget.seeds or rounds <= 2:
            return targets, 0 if rounds == every else rounds
        rounds //= 2
        view = view.until(rounds)


def curve_of(outcome: MembershipOutcome) -> Array:
    """The ROC curve, (2, t): false and true positive rates at every threshold, from (0, 0) to (1, 1)."""
    bars = np.unique(outcome.scores)[::-1]
    sides = outcome.scores[~outcome.member], outcome.scores[outcome.member]
    rates = [1 - np.searchsorted(np.sort(side), bars, side="left") / len(side) for side in sides]
    return np.concatenate([np.zeros((2, 1)), np.array(rates)], axis=1)
