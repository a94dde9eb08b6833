"""IFCA (Ghosh et al. 2020): the rounds, and restarts of models that no client chooses."""
