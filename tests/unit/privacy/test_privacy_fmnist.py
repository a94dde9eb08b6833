"""On Fashion-MNIST: the signature release of `examples/pacfl_dp_fmnist.toml` keeps the clustering at ε = 1 and at ε = 0.5."""

import os
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import numpy as np
import pytest
from checkout import EXAMPLES


def script() -> ModuleType:
    spec = spec_from_file_location("dp_signatures", EXAMPLES / "dp_signatures.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.skipif("CFLPRIV_DATA" not in os.environ, reason="needs Fashion-MNIST: set CFLPRIV_DATA")
@pytest.mark.parametrize(("epsilon", "least"), [(1.0, 0.99), (0.5, 0.9)])
def test_the_signature_release_keeps_the_clusters(epsilon: float, least: float) -> None:
    scores = np.array([script().quality(seed, epsilon, 32, None) for seed in range(10)])
    print(f"\nepsilon {epsilon:g}, 10 seeds: (K given, automatic, best silhouette)")
    print(f"median {np.median(scores, axis=0)}, worst {scores.min(axis=0)}")
    assert np.median(scores[:, 0]) >= least
