"""Grids of runs: reading one, running it, choosing among its runs, in the clear or privately."""
