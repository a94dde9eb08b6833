"""One server, one client, one set of messages; transports below.

    server           the operations, over any transport
    registry         which clients are there, who answers and who refuses
    messages         what a server asks and a client answers; `task_encoding`, `function_encoding`: tasks and functions as bytes
    transport        what a server needs of a transport
    client           one client: its own checks, release policy and ledger, then the work
    host             many clients at one place, with equal work done at once
    settings, release_policy, client_ledger      what a client's operator decided, what may leave, what was spent
    store, values, work, transforms              what a client keeps, holds, computes, and how it opens what is transformed
    cohort, epochs, parameters, payloads, traffic, relay, foreign      parts of the server

The server holds no client data. A client releases only what its own settings allow, and refuses with an opaque error code.
"""
