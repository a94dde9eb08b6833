"""What a coalition of a lying server, t helpers and clients sees, and the attack on two of three helpers.

Error rate: each distribution test is a chi-square test at 1e-7; with the 56 cases of one run, a run fails by chance with less than 1e-5.
"""

from itertools import combinations, product

import numpy as np
import pytest
from scipy.stats import chi2

from cflpriv.protocols.errors import RemoteError
from cflpriv.protocols.keys import sign
from cflpriv.protocols.one_message import helper as helper_module
from cflpriv.protocols.one_message import messages as m
from cflpriv.protocols.one_message import quorum, seed_sets
from cflpriv.protocols.one_message.terms import context, held
from cflpriv.protocols.secagg.vectors import add_masks, unwrap

from .scene import Scene, levels

ALPHA = 1e-7
MODULUS = 4
COORDINATES = 1 << 13


def seen_by(helpers: int, colluding: int, coalition: tuple[int, ...], inputs: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """What the coalition computes, modulo 4: of each client the upload less all masks that the coalition knows (n, d), and the sum (d,)."""
    scene = Scene(len(inputs), helpers, colluding)
    announced = scene.announced()
    server = scene.server(scene.terms(announced, dimension=COORDINATES, bits=16), announced)
    uploads = [scene.upload(client, server, values=np.full(COORDINATES, value / 1000)) for client, value in enumerate(inputs)]
    there = scene.all()
    for client, data in enumerate(uploads):
        server.receive(client, data)
    scene.finish(server, there)
    agreed, rows = context(server.terms), []
    for client, data in enumerate(uploads):
        row = np.frombuffer(m.decode_upload(data, server.terms).vector, "<u2").copy()
        known: dict[int, bytes] = {}
        for helper in coalition:
            kept = there[helper]._uploads(agreed)[0][client]
            known |= {number: kept.seeds[32 * at : 32 * at + 32] for at, number in enumerate(held(server.terms, helper))}
        add_masks(row, [(m.mask_key(agreed, client, number, seed), -1) for number, seed in known.items()])
        rows.append(row[:COORDINATES])
    return np.array(rows) % MODULUS, server.result.block() % MODULUS


def surprise(rows: np.ndarray) -> float:
    """The probability that uniform rows (k, d) modulo 4 give so uneven a histogram of their columns."""
    cells = (MODULUS ** np.arange(len(rows))) @ rows
    counts = np.bincount(cells, minlength=MODULUS ** len(rows))
    expected = rows.shape[1] / counts.size
    return float(chi2.sf((((counts - expected) ** 2) / expected).sum(), counts.size - 1))


COALITIONS = [
    (helpers, colluding, coalition)
    for helpers, colluding in ((2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3), (5, 1), (5, 2), (5, 3), (5, 4))
    for coalition in combinations(range(helpers), colluding)
]


@pytest.mark.parametrize(("helpers", "colluding", "coalition"), COALITIONS)
def test_the_view_of_a_coalition_is_simulated_from_the_sum(helpers: int, colluding: int, coalition: tuple[int, ...]) -> None:
    """Clients 0 to 2 are honest; all others collude, so what shows of them is nothing new. Modulo 4 the three rows are uniform, whatever
    the inputs are, and with the sum of their masks they give the sum of the inputs, which the simulator is given. A simulator that draws
    three
    uniform rows has the same distribution, as the masks of different coordinates are those of different blocks of AES."""
    rows, total = seen_by(helpers, colluding, coalition, [1, -2, 3])
    assert surprise(rows) > ALPHA
    assert total.shape == (COORDINATES,)


def test_one_helper_more_reads_every_value() -> None:
    """The same test with t + 1 helpers has power: rows are no longer uniform."""
    for helpers, colluding in ((2, 1), (3, 1), (4, 1), (5, 2)):
        rows, total = seen_by(helpers, colluding, tuple(range(colluding + 1)), [1, -2, 3])
        assert surprise(rows) < ALPHA
        assert (rows.sum(axis=0) % MODULUS == total).all()  # the rows are the clients' own levels


def test_no_two_sets_get_a_quorum_whatever_honest_helpers_sign() -> None:
    """All helpers of which t sign everything, h up to 7: every way in which the honest ones sign one of two sets each, or none."""
    for helpers in range(2, 8):
        for colluding in range(1, helpers):
            needed = quorum(helpers, colluding)
            for signs in product((0, 1, None), repeat=helpers - colluding):
                signatures = [signs.count(which) + colluding for which in (0, 1)]
                assert min(signatures) < needed


def split_view(scene: Scene, needed: int) -> bool:
    """Whether a server with the last helper reads client 0 by showing the other helpers two sets."""
    announced = scene.announced()
    server = scene.server(scene.terms(announced), announced)
    uploads = {client: scene.upload(client, server) for client in range(scene.clients)}
    for client, data in uploads.items():
        server.receive(client, data)
    there, terms = scene.all(), server.terms
    for helper, data in server.deliver().items():
        there[helper].receive(data)
    traitor = scene.helpers - 1
    agreed = context(terms)
    kept = there[traitor]._uploads(agreed)[0]
    sets = [tuple(range(scene.clients)), tuple(range(1, scene.clients))]
    names = [m.set_name(agreed, [kept[client].digest for client in members]) for members in sets]
    seed = seed_sets(scene.helpers, scene.colluding).index((traitor,))  # the seed that the traitor lacks
    answers = []
    for number, (members, name) in enumerate(zip(sets, names, strict=True)):
        honest = [number] if number == 0 else list(range(1, traitor))
        signatures = {}
        for helper in honest:
            closed = m.decode_from_helper(there[helper].receive(m.encode(m.CloseSet(terms, m.ids(members)))), terms)
            assert isinstance(closed, m.SignedSet)
            signatures[helper] = closed.signature
        signatures[traitor] = sign(scene.holders[traitor], m.CLOSE, *m.closing(traitor, name))
        signed = tuple(m.SetSignature(helper, signature) for helper, signature in sorted(signatures.items()))
        ask = m.OpenSet(terms, m.ids(members), signed, ((seed,),), ())
        opened = m.decode_from_helper(there[honest[0]].receive(m.encode(ask)), terms)
        assert isinstance(opened, m.OpenedMasks)
        answers.append(np.frombuffer(opened.masks[0], "<u4"))
    row = np.frombuffer(m.decode_upload(uploads[0], terms).vector, "<u4").copy()
    places = {number: kept[0].seeds[32 * at : 32 * at + 32] for at, number in enumerate(held(terms, traitor))}
    add_masks(row, [(m.mask_key(agreed, 0, number, own), -1) for number, own in places.items()])
    read = unwrap(row - (answers[0] - answers[1]), 32)[:4]
    return bool((read == levels(0, 4)).all())


def test_two_of_three_helpers_would_open_two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a quorum of two the server and one of three helpers read a client's value; with the rule's three, or four helpers, they do
    not."""
    for scene in (Scene(helpers=3), Scene(helpers=4)):
        with pytest.raises(RemoteError, match="too-few-signatures"):
            split_view(scene, 3)
    monkeypatch.setattr(helper_module, "quorum", lambda helpers, colluding: 2)
    assert split_view(Scene(helpers=3), 2)
