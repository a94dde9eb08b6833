"""Property inference: a statement about a client's data that the training task does not ask about."""
