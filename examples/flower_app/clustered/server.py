"""The SuperLink's side: an experiment's config, over the Grid. It holds no data."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from cflpriv import build_population, load_config
from cflpriv.flower import serve
from cflpriv.flower.client import read_roster

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    config = load_config(str(settings["experiment"]))
    # The digits are public, so the shape of a sample and the true groups (for scoring) come from the same config. Where data are private,
    # give cflpriv.flower.server.standing_in(shape, classes) and no truth.
    population = build_population(config.data)
    serve(
        grid,
        config,
        str(settings["out"]),
        population,
        clients=int(settings["clients"]),
        truth={client.id: group for client, group in zip(population.clients, population.groups, strict=True)},
        roster=read_roster(Path(str(settings["roster"]))) if settings["roster"] else None,
        deadline_seconds=float(settings["deadline-seconds"]),
        resume=True,  # the same run again, e.g. after SuperLink and SuperNodes were restarted, goes on from the last complete round
    )
