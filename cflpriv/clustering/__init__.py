"""Similarities, clustering cuts, and clustering scores."""
