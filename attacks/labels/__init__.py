"""Labels and numbers of samples, from updates in the clear and from sums of them."""
