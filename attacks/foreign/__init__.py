"""Audits of other systems, from the states of a torch model before and after local training."""
