"""Key recovery on updates: a server without the key undoes a secret permutation of coordinates that clients share.

CFL's Algorithm 5 has clients send updates under one secret order of coordinates, so that the server can compare and average, but not read,
them. This attack reads them. Three steps, a file each:

- `structure`: softmax cross-entropy makes the updates of the head's biases, and of the weights out of each hidden unit, add up to zero over
  the classes. No permutation hides a sum that is zero, so the places of one coordinate a class are found, and with them each client's
  label proportions up to a renaming of all labels. This needs no knowledge but the number of classes.
- `naming`: the attacker trains clients of its own from the same initial model. The cloud of coordinates that they predict under a naming
  lies on the cloud that was seen if the naming is right, in whatever order the points come. How far the second best naming is behind is the
  attacker's own confidence; it says nothing where that is small.
- `attack`: both, then histograms by name, then which coordinate is which. `recover_labels` takes plain arrays from any system.

`cells` runs it on recorded views and scores it. Signs beside the permutation do not help, nor does a fresh permutation a round. Everything
that leaves only the Gram matrix (Haar, or a permutation *after* a Hadamard transform) gives this attack nothing.
"""

from .attack import ABSTAIN_BELOW, Recovery, match_coordinates, recover_in_clear, recover_labels
from .cells import KeyRecoveryGuess, cells, guess, transformed_rounds
from .naming import Knowledge
from .structure import Structure, ZeroSumBlock, find_structure, zero_sum_blocks

__all__ = [
    "ABSTAIN_BELOW", "ZeroSumBlock", "KeyRecoveryGuess", "Knowledge", "Recovery", "Structure", "transformed_rounds", "cells",
    "find_structure", "guess", "match_coordinates", "recover_in_clear", "recover_labels", "zero_sum_blocks",
]  # fmt: skip
