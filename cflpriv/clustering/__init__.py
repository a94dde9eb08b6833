"""Similarities, where to cut a tree, and how well clusters were found."""
