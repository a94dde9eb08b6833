"""A thin Flower app: everything it does is in cflpriv."""
