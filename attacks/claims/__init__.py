"""Published statements about clustered federated learning and the privacy of its parts, put to the test: one claim a file.

`cflpriv claims NAME` runs the experiment of a claim and ends with its verdict (`judging.judge_claim`). A claim's file has the statement,
its source, what is assumed, and its arms: the figures and margins that decide, written down before the run. `claim.decide` is the rule.
"""

from importlib import import_module

from ...errors import InputError, near
from .claim import Claim

__all__ = ["CLAIMS", "claim_named"]

CLAIMS = (
    "permutation_secrecy", "signatures_are_safe", "clustering_beats_averaging", "angles_grow_with_distance", "only_identities_are_revealed",
    "anchor_gradients_are_safe", "influence_scores_are_safe", "clustering_raises_membership", "sums_do_not_stop_membership",
    "sums_tell_one_nth", "changing_cohorts_undo_sums", "minimum_sizes_help", "mixture_finds_groups", "encryption_hides_similarity",
    "centroids_return_inputs", "cosines_rebuild_vectors", "gdp_accountant_is_a_bound", "secaggplus_masks_are_secure",
)  # fmt: skip
"""Names, each a module of `published` with `CLAIM`."""


def claim_named(name: str) -> Claim:
    """The claim of that name. Raises `InputError` for one that is not known."""
    if name not in CLAIMS:
        raise InputError(f"claims {name!r}: is not known{near(name, list(CLAIMS))}")
    claim: Claim = import_module(f".published.{name}", __name__).CLAIM
    return claim
