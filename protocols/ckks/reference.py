"""The naive way, as the reference for tests and benchmarks: one `CKKSVector.dot` for each pair of vectors."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import LocalError

__all__ = ["naive_block", "naive_context"]


def naive_context(ring: int = 8192, bits: tuple[int, ...] = (60, 40, 60), scale_bits: int = 40) -> Any:
    """A TenSEAL context with the Galois keys that `dot` rotates by."""
    try:
        import tenseal
    except ImportError:
        raise LocalError("no-tenseal", "CKKS needs TenSEAL, which is not installed: pip install tenseal, or 'cflpriv[ckks]'") from None
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=ring, coeff_mod_bit_sizes=list(bits))
    context.generate_galois_keys()
    context.global_scale = 2.0**scale_bits
    return context


def naive_block(left: list[Any], right: list[Any]) -> npt.NDArray[np.float64]:
    """The p × p inner products of two clients' encrypted vectors (`tenseal.ckks_vector`), computed and decrypted one by one."""
    return np.array([[u.dot(v).decrypt()[0] for v in right] for u in left])
