"""Transports, one per file: how requests reach clients. `federation.transport` has the interface.

    memory       clients of this process: requests are handed over as objects, or through their encoding
    simulation   a whole simulated federation
    hosts        where its clients are: at one host in this process, or at several in other processes
    partial_sums what stays at a host of several, and is added up there
    ray          those processes on Ray
    deployed     the client side of a deployment: one message in, one out

`cflpriv.flower.transport` carries bytes on Flower's Grid, `cflpriv.nvflare.exchange` on NVFlare's tasks.
"""
