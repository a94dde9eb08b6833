"""Figures of an audit: what an attack's cell states, its significance, how seeds are pooled, and what they say together."""
