"""Tests of `cflpriv.protocols.coordinator`; `world` holds what they share."""
