"""Audits of differential privacy: canaries in each noisy release and in whole runs, and lower bounds on ε."""
