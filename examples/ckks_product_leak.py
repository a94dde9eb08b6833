"""Why encrypted products are rerandomised: without it, a key holder recovers what it was not meant to see.

Run with: python examples/ckks_product_leak.py (a few seconds; needs TenSEAL)
"""

from cflpriv.attacks.compared.ckks_products import products_from_bare, share_recovered, toy_products
from cflpriv.protocols.entropy import system_entropy
from cflpriv.streams import printable_streams


def main() -> None:
    played = toy_products(system_entropy)
    wanted = played.packing.targets(0)
    print(
        f"{len(played.rows)} clients, ring of {len(played.secret)}; exactly recovered beside each pair's {len(wanted)} wanted coefficients:"
    )
    for name, seen in (("bare products, masked", played.bare), ("rerandomised, as sent", played.fresh)):
        found = products_from_bare(seen, played.secret, played.q, wanted)
        print(f"  {name}: {share_recovered(found, played):.3f} (by chance {1 / played.q:.0e})")


if __name__ == "__main__":
    printable_streams()
    main()
