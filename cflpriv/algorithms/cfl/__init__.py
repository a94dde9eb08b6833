"""CFL (Sattler et al. 2020): the rounds, the bipartition, the tree of parameters, when a cluster is split, and the test of a split."""
