"""Tests of `cflpriv.protocols.one_message`; `scene` holds what they share."""
