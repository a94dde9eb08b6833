"""Transports, one per file: how requests reach clients. `federation.transport` has the interface.

    memory       clients of this process: requests are handed over as objects, or through their encoding
    simulation   a whole federation in one process

`cflpriv.flower.transport` carries bytes on Flower's Grid.
"""
