"""An estimator in scikit-learn's conventions over runs, audits and reports. Like `cli` it may import all else, and nothing imports it."""

from .clustered import ClusteredFL

__all__ = ["ClusteredFL"]
