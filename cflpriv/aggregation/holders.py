"""Which party a holder on the roster is: by its own settings."""

from importlib import import_module

from ..contract.protection import Protection
from .holder_party import HolderParty

__all__ = ["party_for"]


def party_for(protection: Protection) -> type[HolderParty]:
    """The class of the party that holds keys or shares under this protection. Each is loaded when it is first asked for."""
    module, name = ("share_holders", "ShareHolderParty") if protection.comparison.shared else ("key_holder", "KeyHolderParty")
    party: type[HolderParty] = getattr(import_module(f".{module}", __package__), name)
    return party
