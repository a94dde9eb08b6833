"""Differential privacy: the request, the noise that meets it, and the price of every release."""
