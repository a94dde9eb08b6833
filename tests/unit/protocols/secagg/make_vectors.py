"""Writes tests/vectors/secagg.json: `python -m tests.unit.protocols.secagg.make_vectors` from the repository root.

Everything comes from public, fixed entropy. An implementation in another language that reproduces the derivations and refuses what must be
refused speaks the same protocol. Regenerate only when the protocol version changes.
"""

import json
from typing import Any

import msgspec
from checkout import ROOT

from cflpriv.protocols import keys
from cflpriv.protocols.codec import HEADER
from cflpriv.protocols.entropy import keystream, public_entropy
from cflpriv.protocols.secagg import Server, ServerStage, Terms
from cflpriv.protocols.secagg import messages as m
from cflpriv.protocols.secagg.bindings import binding, box_key, pair_key, seed_commitment, self_key, share_associated_data, share_digest
from cflpriv.protocols.secagg.shamir import split

from .scene import Play, resealed, roster, terms

__all__ = ["PATH", "play", "vectors"]

PATH = ROOT / "tests" / "vectors" / "secagg.json"


def play(mode: str) -> Play:
    """The run whose messages are in the file: of a mode, or ("complaint") an active one in which client 0 gets a box that does not open."""
    if mode == "complaint":
        run = Play.of(terms(4, "active", dimension=2, following=(6, 0)), "vectors")
        outbox = run.until("Deliver")
        message = m.decode_server(outbox[0])
        assert isinstance(message, m.Deliver)
        first, *others = message.boxes
        spoilt = (msgspec.structs.replace(first, box=bytes(len(first.box))), *others)
        outbox[0] = run.down["Deliver", 0] = m.encode(msgspec.structs.replace(message, boxes=spoilt))
        run.close(outbox, {})
        run.finish()
        return run
    run = Play.of(terms(3, mode, dimension=2, following=(6, 0)), "vectors")
    run.finish({2: "Reveal"} if mode == "passive" else {})
    return run


def vectors() -> dict[str, Any]:
    """The contents of the file."""
    a, b, secret = (bytes([i]) * 32 for i in (1, 2, 3))
    agreed: Terms = terms(3, "active", dimension=2, following=(6, 0))
    bound = binding(agreed)
    context = m.context(agreed)
    return {
        "note": "made by tests/unit/protocols/secagg/make_vectors.py from public entropy; nothing here is secret",
        "derive": [
            {"secret": secret.hex(), "label": label, "parts": [p.hex() for p in parts], "key": keys.derive(secret, label, *parts).hex()}
            for label, parts in (("x", ()), ("x", (b"",)), ("label", (b"a", b"bc")), ("label", (b"ab", b"c")))
        ],
        "mask": [{"key": key.hex(), "stream": keystream(key, 32).hex()} for key in (bytes(32), secret)],
        "shamir": {
            "secret": secret.hex(),
            "threshold": 3,
            "keepers": [1, 2, 3, 4, 5],
            "shares": [share.hex() for share in split(secret, 3, range(1, 6), public_entropy("shamir"))],
        },
        "terms": {"bytes": m.encode(agreed).hex(), "context": context.hex(), "models": m.model_list(agreed).hex()},
        "keys": {
            "seed_a": a.hex(),
            "seed_b": b.hex(),
            "public_a": keys.public_key(a).hex(),
            "public_b": keys.public_key(b).hex(),
            "self_of_a_as_client_0": self_key(a, bound, 0).hex(),
            "pair_of_0_and_1": pair_key(a, keys.public_key(a), keys.public_key(b), bound, 0, 1).hex(),
            "boxes_of_0_and_1": box_key(keys.private_key(a), keys.public_key(b), context, 0, 1).hex(),
            "commitment_of_0_to_a": seed_commitment(context, 0, a).hex(),
            "digest_of_self_share_from_0_to_1": share_digest("self", context, 0, 1, bytes(33)).hex(),
            "digest_of_key_share_from_0_to_1": share_digest("key", context, 0, 1, bytes(33)).hex(),
            "associated_data_0_to_1": share_associated_data(context, 0, 1, keys.public_key(a), keys.public_key(b)).hex(),
        },
        "runs": {
            mode: {
                "messages": [
                    {"direction": direction, "kind": kind, "client": number, "bytes": data.hex()}
                    for direction, sent in (("down", run.down), ("up", run.up))
                    for (kind, number), data in sent.items()
                ],
                "sum": run.server.result.levels.tolist(),
            }
            for mode, run in ((mode, play(mode)) for mode in ("active", "passive", "complaint"))
        },
        "refused": refused(),
    }


def refused() -> list[dict[str, str]]:
    """Messages that client 0 (or the server) of the active run must refuse at the named stage, and with which code."""
    cases: list[dict[str, str]] = []

    def case(to: str, at: str, why: str, data: bytes, code: str) -> None:
        cases.append({"to": to, "at": at, "why": why, "bytes": data.hex(), "code": code})

    run = play("active")
    replace = msgspec.structs.replace
    down = {kind: m.decode_server(run.down[kind, 0]) for kind in ("Invite", "Adverts", "Deliver", "Survivors", "Unmask")}
    invite, adverts, deliver, survivors, unmask = down.values()
    assert isinstance(invite, m.Invite)
    assert isinstance(adverts, m.Adverts)
    assert isinstance(deliver, m.Deliver)
    assert isinstance(survivors, m.Survivors)
    assert isinstance(unmask, m.Unmask)
    raw = run.down["Invite", 0]
    case("client", "new", "empty", b"", "malformed")
    case("client", "new", "header only", HEADER, "malformed")
    case("client", "new", "one bit of the checksum", raw[:-1] + bytes([raw[-1] ^ 1]), "malformed")
    case("client", "new", "another format version", resealed(b"CFLP\x02" + raw[5:]), "malformed")
    case("client", "new", "a byte behind the end", raw + b"\x00", "malformed")
    case("client", "new", "not canonical: slot 5 in two bytes", resealed(raw.replace(b"\x05\x00\xa6", b"\xcc\x05\x00\xa6", 1)), "malformed")
    case("client", "new", "a client's message", run.up["Advert", 0], "malformed")
    for field, value, code in (
        ("session", bytes(16), "wrong-context"),
        ("mode", "passive", "wrong-context"),
        ("cohort", (1, 2, 3), "not-invited"),
        ("models", (bytes(32),), "unlisted-model"),
        ("roster", bytes(32), "wrong-roster"),
        ("min_cohort", 1, "minimum-too-low"),
        ("threshold", 2, "bad-terms"),
        ("degree", 1, "bad-terms"),
        ("levels", 2**30, "bad-terms"),
        ("clip", float("nan"), "bad-terms"),
        ("weight_limit", -0.0, "bad-terms"),
        ("following", (5, 0), "bad-terms"),
    ):
        case("client", "new", f"terms: {field}", m.encode(m.Invite(replace(invite.terms, **{field: value}))), code)
    case("client", "new", "too early", run.down["Unmask", 0], "wrong-stage")
    other = replace(adverts.terms, clip=2.0)
    case("client", "advertised", "other terms than invited to", m.encode(replace(adverts, terms=other)), "wrong-context")
    first, second = adverts.adverts
    key = keys.public_key(bytes([7]) * 32)
    for why, advert, code in (
        ("substituted mask key", replace(first, mask_key=key), "bad-signature"),
        ("substituted encryption key", replace(first, encryption_key=key), "bad-signature"),
        ("no signature", replace(first, signature=b""), "bad-signature"),
        ("another slot", replace(first, slot=(6, 0)), "wrong-context"),
        ("another session", replace(first, session=bytes(16)), "wrong-context"),
    ):
        case("client", "advertised", why, m.encode(replace(adverts, adverts=(advert, second))), code)
    case("client", "advertised", "a peer twice", m.encode(replace(adverts, adverts=(first, first))), "malformed")
    case("client", "advertised", "too few", m.encode(replace(adverts, adverts=(first,))), "too-few-clients")
    boxes = deliver.boxes
    case("client", "shared", "a box missing", m.encode(replace(deliver, boxes=boxes[:1])), "bad-members")
    case("client", "shared", "own number missing", m.encode(replace(deliver, members=m.ids([1, 2]))), "bad-members")
    case("client", "shared", "another context", m.encode(replace(deliver, context=bytes(32))), "wrong-context")
    context = m.context(run.agreed)
    case("client", "masked", "challenged by nobody", m.encode(m.Challenge(context, b"")), "unknown-client")
    case("client", "masked", "challenged by a stranger", m.encode(m.Challenge(context, m.ids([1, 9]))), "unknown-client")
    case("client", "masked", "settled without a complaint", m.encode(m.Settle(context, ())), "wrong-stage")
    case("client", "signed", "challenged too late", m.encode(m.Challenge(context, m.ids([1]))), "wrong-stage")
    case("client", "masked", "itself not among the survivors", m.encode(replace(survivors, survivors=m.ids([1, 2]))), "bad-survivors")
    case("client", "masked", "a stranger among them", m.encode(replace(survivors, survivors=m.ids([0, 1, 9]))), "bad-survivors")
    case("client", "masked", "too few", m.encode(replace(survivors, survivors=m.ids([0, 1]))), "too-few-clients")
    case("client", "masked", "unmasking before signing", run.down["Unmask", 0], "wrong-stage")
    signatures = unmask.signatures
    forged = (m.Signed(0, bytes(64)), *signatures[1:])
    case("client", "signed", "a forged signature", m.encode(replace(unmask, signatures=forged)), "bad-signature")
    case("client", "signed", "too few signatures", m.encode(replace(unmask, signatures=signatures[:2])), "too-few-clients")
    case("client", "signed", "asked twice who survived", run.down["Survivors", 0], "wrong-stage")
    case("client", "done", "asked again", run.down["Unmask", 0], "wrong-stage")
    case("server", "advertising", "another's advert", run.up["Advert", 1], "wrong-sender")
    case("server", "advertising", "a stage ahead", run.up["Shares", 0], "wrong-stage")
    reveal = m.decode_client(run.up["Reveal", 0])
    assert isinstance(reveal, m.Reveal)
    case("server", "masking", "a complaint about nobody", m.encode(m.Complaint(0, context, b"")), "wrong-complaint")
    case("server", "masking", "a complaint about a stranger", m.encode(m.Complaint(0, context, m.ids([1, 9]))), "wrong-complaint")
    share, *rest = reveal.self_shares
    wrong = replace(reveal, self_shares=(m.Share(share.peer, bytes(33)), *rest))
    case("server", "unmasking", "another share than was dealt", m.encode(wrong), "wrong-share")
    both = replace(reveal, key_shares=(m.Share(1, bytes(33)),))
    case("server", "unmasking", "both shares of client 1", m.encode(both), "wrong-shares")
    case("server", "unmasking", "a share missing", m.encode(replace(reveal, self_shares=reveal.self_shares[1:])), "wrong-shares")
    return cases


def at(stage: str, side: str) -> Play:
    """The active run, stopped where client 0 (or the server) is at `stage`."""
    run = Play.of(terms(3, "active", dimension=2, following=(6, 0)), "vectors")
    run.server = Server(run.agreed, roster=roster())
    while True:
        if side == "client" and run.clients[0].stage.value == stage:
            return run
        outbox = run.open()
        if side == "server" and run.server.stage.value == stage:
            return run
        if run.server.stage is ServerStage.DONE:
            raise ValueError(f"stage: no {stage}")
        run.close(outbox, {})


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {PATH.name}")
