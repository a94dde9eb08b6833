"""Attacks on what is compared: signatures, Gram matrices, anchor gradients, folds, scores and clusterings."""
