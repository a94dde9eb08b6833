"""`python -m cflpriv` is the command line, as `python -m cflpriv.cli` is."""

from runpy import run_module

if __name__ == "__main__":
    run_module("cflpriv.cli", run_name="__main__")
