"""How do requests reach clients? One transport a file.

    interface    what a server needs of any, and its form over bytes (what a network carries)
    memory       clients of this process: requests are handed over as objects, and equal ones are computed together

`cflpriv.flower.transport` carries bytes on Flower's Grid.
"""
