"""Evidence: the updates, sums and local training that a view holds, in the form that attacks read."""
