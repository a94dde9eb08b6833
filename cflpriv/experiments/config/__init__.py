"""A configuration: its sections and keys, the reference and the first file that follow from them."""
