"""How do the verbs work when the clients are somewhere else?

A federation of strangers is the same five verbs over messages. What a server asks and a client answers is a handful of typed, canonical,
size-limited byte strings; nothing here knows what carries them.

    messages     what may be said, and how arrays and sums become bytes and back
    tasks        tasks as bytes; `foreign`: one that an application does by its own means

    settings     what a client's operator decided
    store        what a client keeps between two messages (each may find a new process); `values`: what it holds
    client       one client: bytes in, bytes out, and what it releases
    releases     what may leave a client by which verb
    work         what it computes
    transformed  its part in transforms that clients share; `encrypting`: in encrypted similarity
    summing      its part in secure sums
    spending     its own ledger, where it demands privacy

    server       the federation: the verbs over any transport that delivers bytes to clients and brings some answers back
    roll         who is there, and who answers
    parameters   what is sent to compute with
    gram         clustering epochs; `encrypted`: under encryption, with `holder`, the party that holds the keys
    means        `mean`: in the clear, under a transform, secure aggregation; `sums`: secure sums, many groups abreast
    relay        boxes from client to client
    folds        blind parts made one
    agreement    the clients' secret, over messages

`cflpriv.flower` carries them on Flower; a queue, a socket or a test carries them as well.

**Who trusts whom.** A client computes what it is asked, and releases only what its *own* settings allow: it was told by its operator,
not by the server, which protection is in force, and refuses a stage that would release a value otherwise ("forbidden"). Answers that
refuse are opaque words (`REFUSALS`), never the text of an exception.
"""
