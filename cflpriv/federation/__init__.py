"""One server, one client, one set of messages; transports below.

    server           the operations, over any transport; `server_state`: rounds, and what is known of held values
    registry         identities; which clients are present, answer or refuse
    messages         requests, answers, refusals; `message_encoding`: what they carry; `task_encoding`: tasks and functions
    transport        the interface of a transport; `stages`: its form with deadlines
    client           one client: its own checks, release policy and ledger, then the work
    host             many parties at one place, with equal work done at once
    settings, release_policy, client_ledger      the client operator's decisions, what may leave, what was spent
    store, values, work, transforms              what a client keeps, holds and computes, and the shared transforms
    cohort, epochs, parameters                   parts of the server
    relay, group_secret, protections             what has two halves: relays, the agreement on a secret, protections
    foreign          tasks that an application's own code runs

The server holds no client data. A client releases only what its own settings allow, and refuses with an opaque error code.
"""
