"""Samples from updates: closed forms, optimisation, and models that a server makes for the purpose."""
