"""Active attacks: what a server learns when it deviates from the protocol, tried against freshly started clients.

The attacks of `cflpriv.attacks` read recordings, of servers that follow the protocol. These take the server's side themselves, over any
transport (`federation.transport`), and deviate: each reports what honest clients answered and what the server learned, beside the best
guess without the deviation. `audit` runs all of them; `cflpriv audit --active CONFIG` calls it.

Writing an attack
-----------------
An attack is a function of a `scene.AttackRun` that returns an `ActiveGuess` (of the victim's update or signature) or an `ActiveFigure`, an
`ActiveAttack` that names the sentence it checks, and one line below. `AttackRun.fed` is an honest server over `AttackRun.liar`. An attack
changes the server's requests (`liar.send`) and the answers it receives (`liar.receive`), or sends a request of its own (`liar.ask`).
`outcome.judged` scores a guess and alone knows the truth; an attack with an `ActiveFigure` reads the truth after it made its guess.
A test removes the client's check that the attack is about, and sees the figure.

    liar         the transport on which the server deviates and accomplices answer
    scene        fresh clients, the server, the truth        outcome      statuses and figures
    halted       a secure sum that is finished by hand       audit        all attacks, the folder that is written
    other_settings   a secure sum under terms of its own     helped       a sum in one message, finished by hand

A status: `refused` (by which check: code and stage), `no_gain` (accepted, and no better than without), `learned` (a figure, better than
without by a margin), `not_applicable` (why), `failed` (could not be run, which is neither). `claimed` says whether the guarantee of the
configuration covers an active server at all.
"""

from ...plugins import Registry
from . import (
    cohorts,
    combined,
    dealings,
    epochs,
    helped,
    key_holder,
    operations,
    other_settings,
    second_sum,
    shared_vectors,
    survivors,
    trainings,
    unequal,
)
from .outcome import ActiveAttack

__all__ = ["ACTIVE_ATTACKS", "ActiveAttack"]

ACTIVE_ATTACKS: Registry[ActiveAttack] = Registry("active attack", lambda attack: attack.deviate)
"""Name -> `ActiveAttack`."""

ATTACKS = {
    "second_sum": second_sum.SECOND_SUM,
    "computed_again": second_sum.COMPUTED_AGAIN,
    "derived_copy": second_sum.DERIVED,
    "next_round": second_sum.NEXT_ROUND,
    "stale_slot": second_sum.STALE_SLOT,
    "accomplices": cohorts.ACCOMPLICES,
    "smaller_minimum": cohorts.SMALLER_MINIMUM,
    "sybils": cohorts.SYBILS,
    "sybil_group": cohorts.SYBIL_GROUP,
    "other_model": unequal.OTHER_MODEL,
    "listed_model": unequal.LISTED_MODEL,
    "other_task": unequal.OTHER_TASK,
    "switched_value": unequal.SWITCHED_VALUE,
    "unequal_weights": unequal.UNEQUAL_WEIGHTS,
    "other_weight": other_settings.OTHER_WEIGHT,
    "other_clip": other_settings.OTHER_CLIP,
    "private_choice": combined.PRIVATE_CHOICE,
    "own_block": combined.OWN_BLOCK,
    "new_session": combined.NEW_SESSION,
    "undeclared_scores": combined.UNDECLARED_SCORES,
    "outside_bucket": dealings.OUTSIDE_BUCKET,
    "short_list": dealings.SHORT_LIST,
    "late_nonces": dealings.LATE_NONCES,
    "split_survivors": survivors.SPLIT_SURVIVORS,
    "few_survivors": survivors.FEW_SURVIVORS,
    "second_unmasking": survivors.SECOND_UNMASKING,
    "mode_downgrade": survivors.MODE_DOWNGRADE,
    "false_complaints": survivors.FALSE_COMPLAINTS,
    "false_accusation": survivors.FALSE_ACCUSATION,
    "other_operation": operations.OTHER_OPERATION,
    "other_operation_compared": operations.OTHER_OPERATION_COMPARED,
    "dressed_task": operations.DRESSED_TASK,
    "relay_to_accomplice": operations.RELAY,
    "choices_as_probes": operations.CHOICES,
    "repeated_epoch": epochs.REPEATED_EPOCH,
    "opened_by_another": epochs.OPENED_BY_ANOTHER,
    "chosen_rows": epochs.CHOSEN_ROWS,
    "swapped_holder": key_holder.SWAPPED_HOLDER,
    "other_function": key_holder.OTHER_FUNCTION,
    "repeated_step": key_holder.REPEATED_STEP,
    "holder_coalitions": shared_vectors.HOLDER_COALITIONS,
    "swapped_shares": shared_vectors.SWAPPED_SHARES,
    "chosen_deposits": shared_vectors.CHOSEN_DEPOSITS,
    "split_view": helped.SPLIT_VIEW,
    "second_set": helped.SECOND_SET,
    "second_helped_sum": helped.SECOND_HELPED_SUM,
    "copied_box": helped.COPIED_BOX,
    "other_seed": helped.OTHER_SEED,
    "lying_helper": helped.LYING_HELPER,
    "late_upload": helped.LATE_UPLOAD,
    "swapped_helper": helped.SWAPPED_HELPER,
    "rolled_back_helper": helped.ROLLED_BACK_HELPER,
    "repeated_release": trainings.REPEATED_RELEASE,
    "overflow_oracle": trainings.OVERFLOW_ORACLE,
    "cancelling_parameters": trainings.CANCELLING_PARAMETERS,
}
for _name, _attack in ATTACKS.items():
    ACTIVE_ATTACKS.add(_name, _attack)
