"""Membership inference: from models, from updates, with shadow federations."""
