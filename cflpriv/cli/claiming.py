"""The command that puts published statements to the test: `claims`."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .shared import DataDir, print_line

__all__ = ["claims"]


def claims(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The claim; default: list them.")] = None,
    scale: Annotated[
        float, typer.Option("--scale", help="Factor up to 1 for the number of seeds; below 1 the claim stays undecided.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="The first seed.")] = 0,
    out: Annotated[Path, typer.Option("--out", help="The folder that holds a folder for each run of a claim.")] = Path("runs/claims"),
    page: Annotated[Path | None, typer.Option("--page", help="Write the table of all verdicts in --out to this file.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Put a published statement to the test, and print a verdict by a rule set before; the same command again resumes it."""
    from ..attacks.claims.judging import judge_claim, listed_claims, verdict_in_words, write_page

    if name is None and (scale != 1.0 or seed or data_dir is not None):
        raise InputError("--scale, --seed, --data-dir: are for the runs of a claim; name one")
    if name is not None:
        verdict = judge_claim(name, out / f"{name}-s{seed}", data_dir, scale=scale, seed=seed, report=print_line)
        print_line("\n".join(verdict_in_words(name, verdict)))
    if page is not None:
        judged, repeated = write_page(out, page)
        print_line(f"written: {page}, {judged} claim(s) with a verdict, {repeated} repeated")
    elif name is None:
        print_line("\n".join(f"{claim:<28} {statement}" for claim, statement in listed_claims().items()))
