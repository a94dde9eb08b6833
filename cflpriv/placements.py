"""Who was moved in a run, who belongs to no cluster, and which clusters were opened: for console, summary and report."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["NAME", "placement_text", "placements_of"]

NAME = "placements"
"""An algorithm notes this of a round, or of newcomers, if anything happened: "changed" and "unplaced" list clients,
"moved" has [client, from, to], where from is None for a client that was in no cluster, "opened" the first clients by cluster, "merged" by
cluster below the minimum cohort size the one that its members joined; "found_anew" is the number of groups where all clients were compared
again."""
MOST_NAMED = 10


def placements_of(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What happened, in the order of rounds: of each round's newcomers, then of the clients that were placed again."""
    events = []
    for row in rows:
        events += [{"round": row["round"], **event} for event in (*row.get("admissions", ()), row.get(NAME)) if event]
    return events


def placement_text(notes: Mapping[str, Any]) -> str:
    """One line; empty if nothing happened."""
    parts = []
    if changed := notes.get("changed"):
        parts.append(f"the data of {_clients(changed)} changed")
    moves = {(was, now) for _, was, now in notes.get("moved", ())}
    for was, now in sorted(moves, key=str):
        own = [client for client, *move in notes["moved"] if tuple(move) == (was, now)]
        parts.append(f"{_clients(own)} moved from {'no cluster' if was is None else f'cluster {was}'} to cluster {now}")
    if found := notes.get("found_anew"):
        parts.append(f"the groups of all clients were found anew: {found}")
    for label, clients in (notes.get("opened") or {}).items():
        parts.append(f"cluster {label} opened for {_clients(clients)}")
    for label, into in (notes.get("merged") or {}).items():
        parts.append(f"cluster {label} was too small and joined cluster {into}")
    if unplaced := notes.get("unplaced"):
        parts.append(f"{_clients(unplaced)} in no cluster")
    return "; ".join(parts)


def _clients(ids: Sequence[int]) -> str:
    if len(ids) > MOST_NAMED:
        return f"{len(ids)} clients"
    return f"client{'' if len(ids) == 1 else 's'} {', '.join(map(str, sorted(ids)))}"
