"""What clients and helpers refuse, and what a helper's record outlives."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cflpriv.protocols.coordinator import FolderLog
from cflpriv.protocols.coordinator import log as log_module
from cflpriv.protocols.errors import LocalError, MalformedMessage, RemoteError, TooFewClients
from cflpriv.protocols.one_message import (
    Contribution,
    HelpedServer,
    HelpedTerms,
    Helper,
    HelperPolicy,
    Identity,
    Roster,
    SumRecord,
    accept,
    agreeable,
    upload,
)
from cflpriv.protocols.one_message import messages as m
from cflpriv.protocols.one_message.terms import context

from .scene import SESSION, Scene


def delivered(scene: Scene, clients: range | list[int], **changes: Any) -> tuple[HelpedServer, dict[int, Helper]]:
    """A server whose helpers have the uploads of some clients."""
    announced = scene.announced(changes.get("slot", (1, 0))[0])
    server = scene.server(scene.terms(announced, **changes), announced)
    for client in clients:
        server.receive(client, scene.upload(client, server))
    there = scene.all()
    server.delivered({helper: there[helper].receive(data) for helper, data in server.deliver().items()})
    return server, there


def close(terms: HelpedTerms, members: list[int] | range) -> bytes:
    return m.encode(m.CloseSet(terms, m.ids(members)))


def test_a_helper_signs_one_set_a_slot_also_after_a_restart() -> None:
    scene = Scene()
    server, there = delivered(scene, range(5))
    first = there[0].receive(close(server.terms, range(5)))
    for helper in (there[0], scene.helper(0)):
        assert helper.receive(close(server.terms, range(5))) == first  # the same set again
        with pytest.raises(RemoteError, match="second-set"):
            helper.receive(close(server.terms, range(4)))
    other, there = delivered(scene, range(4), dimension=5)  # other terms in the same slot
    with pytest.raises(RemoteError, match="second-set"):
        there[0].receive(close(other.terms, range(4)))


def test_a_value_goes_into_sums_over_one_set_also_in_another_slot() -> None:
    scene = Scene()
    server, there = delivered(scene, range(5))
    there[0].receive(close(server.terms, range(5)))
    again, there = delivered(scene, range(4), slot=(1, 1))
    with pytest.raises(RemoteError, match="second-sum"):
        there[0].receive(close(again.terms, range(4)))
    whole, there = delivered(scene, range(5), slot=(1, 2))
    assert there[0].receive(close(whole.terms, range(5)))  # the same set: such as the mean of another part
    later, there = delivered(scene, range(4), slot=(2, 0))  # values of round 2 have another name
    assert there[0].receive(close(later.terms, range(4)))


def test_names_of_models_outlive_sessions_and_those_of_rounds_do_not() -> None:
    scene, digest = Scene(), b"a model's digest"
    announced = scene.announced()
    server = scene.server(scene.terms(announced), announced)
    for client in range(4):
        server.receive(client, scene.upload(client, server, names=(1, digest)))
    there = scene.all()
    for helper, data in server.deliver().items():
        there[helper].receive(data)
    there[0].receive(close(server.terms, range(4)))
    for names, code in (((1,), None), ((1, digest), "second-sum")):
        kept = {name: data for name, data in scene.stores[0].items() if name.startswith("summed/")}
        other = Scene(policy=HelperPolicy(b"another session!"), stores={0: kept})
        announced = other.announced()
        server = other.server(other.terms(announced, session=b"another session!"), announced)
        for client in range(3):
            server.receive(client, other.upload(client, server, names=names))
        message = server.deliver()[0]
        signer = other.helper(0)
        signer.receive(message)
        if code is None:
            assert signer.receive(close(server.terms, range(3)))
        else:
            with pytest.raises(RemoteError, match=code):
                signer.receive(close(server.terms, range(3)))


def test_successive_sets_change_by_none_or_by_as_many_as_the_terms_say() -> None:
    scene = Scene(8)
    server, there = delivered(scene, range(5), cohort_change=2)
    there[0].receive(close(server.terms, range(5)))
    for number, clients, fine in (
        (2, range(4), False),
        (3, range(6), False),
        (4, range(5), True),
        (5, range(3), True),
        (6, range(1, 4), False),
    ):
        server, there = delivered(scene, list(clients), slot=(number, 0), cohort_change=2)
        if fine:
            there[0].receive(close(server.terms, list(clients)))
        else:
            with pytest.raises(RemoteError, match="cohort-change"):
                there[0].receive(close(server.terms, list(clients)))


def test_small_sets_strangers_and_masks_without_a_quorum_are_refused() -> None:
    scene = Scene()
    server, there = delivered(scene, range(4))
    with pytest.raises(RemoteError, match="too-few-clients"):
        there[0].receive(close(server.terms, range(2)))
    with pytest.raises(RemoteError, match="not-delivered"):
        there[0].receive(close(server.terms, range(5)))
    ask = m.OpenSet(server.terms, m.ids(range(4)), (), ((1,),), ())
    with pytest.raises(RemoteError, match="second-set"):  # it has signed none
        there[0].receive(m.encode(ask))
    messages = server.close()
    closed = {helper: there[helper].receive(data) for helper, data in messages.items()}
    signed = []
    for data in closed.values():
        message = m.decode_from_helper(data, server.terms)
        assert isinstance(message, m.SignedSet)
        signed.append(m.SetSignature(message.helper, message.signature))
    with pytest.raises(RemoteError, match="too-few-signatures"):
        there[0].receive(m.encode(msgspec.structs.replace(ask, signatures=tuple(signed[:2]))))
    with pytest.raises(MalformedMessage):  # one signature three times
        there[0].receive(m.encode(msgspec.structs.replace(ask, signatures=(signed[0],) * 3)))
    swapped = (msgspec.structs.replace(signed[1], helper=0), signed[1], signed[2])
    with pytest.raises(RemoteError, match="bad-signature"):
        there[0].receive(m.encode(msgspec.structs.replace(ask, signatures=swapped)))
    with pytest.raises(RemoteError, match="not-held"):  # the seed of the set {0}
        there[0].receive(m.encode(msgspec.structs.replace(ask, signatures=tuple(signed), send=((0,),))))


def spoilt(data: bytes, terms: HelpedTerms, identity: Identity | None = None, **changes: Any) -> bytes:
    """An upload with other fields; signed again by `identity`."""
    message = msgspec.structs.replace(m.decode_upload(data, terms), **changes)
    if identity is not None:
        from cflpriv.protocols.one_message.client import signed_upload

        return m.encode(signed_upload(identity, terms, message.names, message.vector, message.boxes, message.commitments))
    return m.encode(message)


def refusals(scene: Scene, server: HelpedServer, uploads: dict[int, bytes]) -> dict[int, str]:
    for client, data in uploads.items():
        server.receive(client, data)
    there = scene.all()
    server.delivered({helper: there[helper].receive(data) for helper, data in server.deliver().items()})
    return {client: code for client, (_, code) in server.refused.items()}


def test_uploads_that_helpers_cannot_use() -> None:
    scene = Scene(6)
    announced = scene.announced()
    server = scene.server(scene.terms(announced), announced)
    good = {client: scene.upload(client, server) for client in range(6)}
    terms, own = server.terms, scene.identities
    first = m.decode_upload(good[0], terms)
    boxes = (msgspec.structs.replace(first.boxes[0], box=bytes(len(first.boxes[0].box))), *first.boxes[1:])
    flipped = bytes([first.commitments[0] ^ 1]) + first.commitments[1:]
    bad = {
        0: spoilt(good[0], terms, vector=bytes(len(first.vector))),  # changed on the way
        1: spoilt(good[1], terms, own[1], boxes=first.boxes),  # the boxes of client 0
        2: spoilt(good[2], terms, own[2], boxes=boxes),  # a box of zeros
        3: spoilt(good[3], terms, own[3], commitments=flipped),  # another seed than the hash
        4: spoilt(good[4], terms, own[5]),  # client 5 signs as client 4
    }
    message = m.decode_upload(bad[4], terms)
    bad[4] = m.encode(msgspec.structs.replace(message, client=4))
    codes = refusals(scene, server, bad)
    assert codes == {0: "bad-signature", 1: "bad-box", 2: "bad-box", 3: "other-seed", 4: "bad-signature"}
    assert server.members == ()
    with pytest.raises(TooFewClients):
        server.close()


def test_a_second_upload_is_refused_and_a_repeated_delivery_is_not() -> None:
    scene = Scene()
    server, there = delivered(scene, range(4))
    with pytest.raises(RemoteError, match="second-message"):
        server.receive(0, scene.upload(0, server))
    for same, code in ((True, None), (False, "second-message")):
        again = scene.server(server.terms, scene.announced())
        data = scene.upload(0, again)
        again.receive(0, data)
        message = m.decode_to_helper(again.deliver()[0])
        assert isinstance(message, m.UploadDelivery)
        if same:
            kept = next(iter(scene.stores[0]))
            assert kept
            continue
        answer = m.decode_from_helper(there[0].receive(m.encode(message)), server.terms)
        assert isinstance(answer, m.UploadsRead)
        assert [refusal.code for refusal in answer.refused] == [code]
    server.close()
    with pytest.raises(RemoteError, match="wrong-stage"):  # a late upload stays closed
        server.receive(4, scene.upload(4, server))


def test_a_round_ends_with_the_next_key() -> None:
    scene = Scene()
    server, there = delivered(scene, range(4))
    assert scene.helper(0).announcement(1) == scene.announced()[0]  # the same round again
    scene.announced(2)
    with pytest.raises(RemoteError, match="wrong-round"):
        there[0].receive(close(server.terms, range(4)))
    with pytest.raises(RemoteError, match="old-slot"):
        there[0].announcement(1)
    assert not any(name.startswith("uploads/") for name in scene.stores[0])


def test_helpers_and_clients_check_the_terms() -> None:
    scene = Scene(5)
    announced = scene.announced()
    terms = scene.terms(announced)
    replaced = msgspec.structs.replace
    helper = scene.helper(0)
    for changed, code in (
        (replace_keys(terms), "wrong-round"),
        (replaced(terms, session=bytes(16)), "wrong-context"),
        (replaced(terms, roster=bytes(32)), "wrong-context"),
        (replaced(terms, colluding=2), "bad-terms"),
        (replaced(terms, minimum=2), "minimum-too-low"),
        (replaced(terms, levels=2**30), "bad-terms"),
        (replaced(terms, keys=terms.keys[:2]), "bad-terms"),
        (replaced(terms, round=9), "wrong-round"),
    ):
        with pytest.raises(RemoteError, match=code):
            helper.receive(close(changed, range(5)))
    policy = replaced(agreeable(terms), after=(0, 5))
    invites: list[tuple[HelpedTerms, dict[str, Any], str]] = [
        (terms, {"after": (1, 0)}, "wrong-slot"), (terms, {"model": bytes([1]) * 32}, "unlisted-model"), (terms, {"models": 2},
        "unlisted-model"),
        (terms, {"min_cohort": 4}, "minimum-too-low"), (terms, {"cohort_change": 1}, "cohort-change"), (terms, {"dimension": 5},
        "bad-terms"),
        (terms, {"clients": 4}, "bad-terms"), (terms, {"clip": (2.0, 3.0)}, "bad-terms"), (terms, {"session": bytes(16)}, "wrong-context"),
        (terms, {"spread": 100.0}, "too-unequal"), (replaced(terms, roster=bytes(32)), {}, "wrong-roster"),
        (replaced(terms, colluding=2), {}, "bad-terms"), (replace_keys(terms), {}, "bad-signature"), (replaced(terms, round=2), {},
        "bad-signature"),
    ]  # fmt: skip
    for proposed, changes, code in invites:
        data = m.encode(m.HelpedInvite(proposed, tuple(announced.values())))
        with pytest.raises(RemoteError, match=code):
            accept(data, scene.identities[0], replaced(policy, **changes), 1, scene.roster)
    with pytest.raises(RemoteError, match="bad-terms"):
        accept(m.encode(m.HelpedInvite(terms, tuple(announced.values()))), scene.identities[0], policy, 2, scene.roster)


def replace_keys(terms: HelpedTerms) -> HelpedTerms:
    return msgspec.structs.replace(terms, keys=((0, bytes(32)), *terms.keys[1:]))


def test_helpers_keys_of_the_servers_own_are_refused() -> None:
    scene, other = Scene(), Scene()
    announced = scene.announced()
    own = other.announced()
    message = m.decode_announcement(own[0])
    forged = m.encode(msgspec.structs.replace(message, helper=1))
    for swapped in ({**announced, 1: forged}, {**announced, 1: own[0]}):
        terms = scene.terms(swapped)
        with pytest.raises(RemoteError, match="bad-signature"):
            accept(m.encode(m.HelpedInvite(terms, tuple(swapped.values()))), scene.identities[0], agreeable(terms), 1, scene.roster)


def test_misuse() -> None:
    scene = Scene()
    announced = scene.announced()
    terms = scene.terms(announced)
    stranger = Identity.create(0)
    with pytest.raises(LocalError, match="not-on-roster"):
        Helper(stranger, scene.roster, HelperPolicy(SESSION), {})
    with pytest.raises(LocalError, match="not-on-roster"):
        accept(scene.server(terms, announced).invite, stranger, agreeable(terms), 1, scene.roster)
    with pytest.raises(LocalError, match="no-roster"):
        HelpedServer(terms, announced, Roster((stranger.public(),)))
    with pytest.raises(LocalError, match="bad-terms"):
        HelpedServer(msgspec.structs.replace(terms, minimum=1), announced, scene.roster)
    with pytest.raises(LocalError, match="no-result"):
        _ = scene.server(terms, announced).result
    accepted = accept(scene.server(terms, announced).invite, scene.identities[0], agreeable(terms), 1, scene.roster)
    record = SumRecord()
    with pytest.raises(LocalError, match="bad-values"):
        upload(accepted, scene.identities[0], agreeable(terms), record, Contribution(np.zeros(3)))
    assert "0 names" in repr(record)  # nothing was written
    assert context(terms) != context(msgspec.structs.replace(terms, sum=1))
    for field, value in (("clients", 2), ("dimension", 0), ("clip", -1.0), ("colluding", 4), ("min_cohort", 1)):
        with pytest.raises((ValueError, TooFewClients)):
            scene.terms(announced, **{field: value})


def test_the_next_key_erases_seeds_also_if_the_process_ends_at_any_point() -> None:
    """Whoever has the store after a key was announced has no seeds of the round before."""
    for ends in range(4):
        scene = Scene()
        server, there = delivered(scene, range(2))
        server.receive(2, scene.upload(2, server))
        server.delivered({helper: there[helper].receive(data) for helper, data in server.deliver().items()})

        class Ending(dict[str, bytes]):
            left = ends

            def _step(self) -> None:
                if self.left == 0:
                    raise KeyboardInterrupt
                self.left -= 1

            def __setitem__(self, name: str, value: bytes) -> None:
                self._step()
                super().__setitem__(name, value)

            def __delitem__(self, name: str) -> None:
                self._step()
                super().__delitem__(name)

        store = Ending(scene.stores[0])
        assert sum(name.startswith("uploads/") for name in store) == 2
        try:
            scene.helper(0, store).announcement(2)
        except KeyboardInterrupt:
            store.left = 100
        assert scene.helper(0, store).announcement(2)
        assert not any(name.startswith("uploads/") for name in store)


def test_a_helper_whose_disk_is_full_signs_nothing_that_it_could_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same question again must not find the set in memory."""
    scene = Scene()
    log = FolderLog(tmp_path)
    helper = scene.helper(0, log)
    announced = {0: helper.announcement(1), **scene.announced(1, present=(1, 2, 3))}
    server = scene.server(scene.terms(announced), announced)
    for client in range(5):
        server.receive(client, scene.upload(client, server))
    helper.receive(server.deliver()[0])
    close = m.encode(m.CloseSet(server.terms, m.ids(range(5))))

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(log_module, "_flush", full)
        with pytest.raises(OSError, match="No space"):
            helper.receive(close)
    with pytest.raises(OSError, match="start again"):
        helper.receive(close)
    log.close()
