"""StoCFL (Zeng et al. 2023): representations at an anchor, merging of clusters, newcomers, and the rounds."""
