"""The trap, as a regression test: what a key holder learns from a product that was masked but not rerandomised.

The attack is `attacks.ckks_products`; the scene is the protocol's own packing, products and masks, on a toy ring.
"""

import runpy

import numpy as np
import pytest
from checkout import ROOT

from cflpriv.attacks.compared.ckks_products import TOY, Ring, ToyProducts, products_from_bare, share_recovered, toy_products
from cflpriv.protocols.ckks.parameters import mask_std
from cflpriv.protocols.entropy import public_entropy

pytest.importorskip("tenseal", reason="TenSEAL is not installed: CKKS needs it")


@pytest.fixture(scope="module")
def trap() -> ToyProducts:
    """Three clients' pairs as a key holder receives them: bare with masked c₀, and rerandomised; and the true products."""
    made = toy_products(public_entropy("trap"))
    assert made.packing.group == 1
    assert set(made.secret) <= {-1, 0, 1}
    return made


def hidden(toy: ToyProducts) -> list[int]:
    return sorted(set(range(TOY.ring)) - set(toy.packing.targets(0)))


def test_bare_products_give_every_product_polynomial_away(trap: ToyProducts) -> None:
    found = products_from_bare(trap.bare, trap.secret, trap.q, trap.packing.targets(0))
    assert share_recovered(found, trap) == 1.0
    # signature material: the product of single coordinates, which no inner product shows
    centred = np.where(found[0, 1] > trap.q // 2, found[0, 1] - trap.q, found[0, 1]) / trap.packing.scale**2
    assert abs(centred[0] - trap.rows[0, 0, 0] * trap.rows[1, 0, -1]) < 0.05


def test_rerandomised_products_leave_the_attack_at_its_baseline(trap: ToyProducts) -> None:
    found = products_from_bare(trap.fresh, trap.secret, trap.q, trap.packing.targets(0))
    # a guess is right with probability 1/q ≈ 7e-9; of 474 coefficients one is right in 1 of 280 000 runs
    assert share_recovered(found, trap) == 0.0
    guess = np.concatenate([found[pair][hidden(trap)] for pair in trap.truth]) / trap.q
    true = np.concatenate([trap.truth[pair][hidden(trap)] for pair in trap.truth])
    # uncorrelated numbers: |r| √n is beyond 5 in fewer than 1 of 10^6 runs
    assert abs(np.corrcoef(guess, true)[0, 1]) * np.sqrt(len(true)) < 5


def test_wanted_coefficients_survive_rerandomising(trap: ToyProducts) -> None:
    ring, wanted = Ring(TOY.ring, trap.q), trap.packing.targets(0)
    secret = ring.dot(ring.forward, trap.secret % trap.q)
    for pair, (c0, c1, c2) in trap.fresh.items():
        a, b, c = (ring.dot(ring.forward, part) for part in (c0, c1, c2))
        decrypted = ring.dot(ring.backward, (a + b * secret % ring.q + c * secret % ring.q * secret % ring.q) % ring.q)
        off = (decrypted - trap.truth[pair]) % ring.q
        off = np.minimum(off, ring.q - off)
        assert off[wanted].max() < 6 * mask_std(TOY)  # the noise of one fresh encryption
        assert np.median(np.delete(off, wanted)) > ring.q / 16  # uniform elsewhere: the median is q/4


def test_the_example_says_both(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "ckks_product_leak.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "bare products, masked: 1.000" in said
    assert "rerandomised, as sent: 0.000" in said
