"""Tests of `cflpriv.protocols.secagg`; `scene` holds what they share."""
