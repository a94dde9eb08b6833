"""Differential privacy: what is asked for, the noise that keeps it, and what every release costs."""
