"""Why encrypted products are rerandomised: without it, a key holder recovers what it was not meant to see.

Run with: python examples/ckks_product_leak.py (a few seconds; needs TenSEAL)
"""

from cflpriv.attacks.compared.ckks_products import products_from_bare, share_recovered, toy_products
from cflpriv.protocols.entropy import system_entropy
from cflpriv.streams import printable_streams


def main() -> None:
    toy = toy_products(system_entropy)
    wanted = toy.packing.targets(0)
    print(f"{len(toy.rows)} clients, ring of {len(toy.secret)}; exactly recovered beside each pair's {len(wanted)} wanted coefficients:")
    for name, seen in (("bare products, masked", toy.bare), ("rerandomised, as sent", toy.fresh)):
        recovered = products_from_bare(seen, toy.secret, toy.q, wanted)
        print(f"  {name}: {share_recovered(recovered, toy):.3f} (by chance {1 / toy.q:.0e})")


if __name__ == "__main__":
    printable_streams()
    main()
