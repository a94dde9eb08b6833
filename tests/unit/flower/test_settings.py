"""What an operator gets wrong in a client's settings is one line in the client's own log, and a word for the server."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from agreements import contract_of
from fake_grid import FakeGrid
from flwr.clientapp import ClientApp

from cflpriv.errors import InputError
from cflpriv.federation.server import FederationServer
from cflpriv.federation.transport import OverBytes
from cflpriv.flower import GridTransport, cflpriv_mod, client_app, read_settings, write_identities
from cflpriv.protocols.entropy import public_entropy

IDENTITY = 'identity = "keys/client0.key"\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (IDENTITY, r"\[protection\] is missing"),
        (IDENTITY + '[protecton]\nsum = "secagg"', r"protecton = \{'sum': 'secagg'\}: is not a key here; known are identity, roster"),
        (IDENTITY + '[protection]\n[privcy]\nunit = "sample"', r"client0.toml: privcy = \{'unit': 'sample'\}: is not a key here"),
        (IDENTITY + 'roser = "keys/roster.txt"\n[protection]', "roser = 'keys/roster.txt': is not a key here"),
        (IDENTITY + "app = 3\n[protection]", r"app = 3: is a table, \[app\]"),
        (IDENTITY + '[protection]\nmin_cohort = "3"', r"\[protection\] min_cohort = '3': expected `int`, got `str`"),
        (IDENTITY + "[protection]\nmin_cohort = 2.5", r"\[protection\] min_cohort = 2.5: expected `int`, got `float`"),
        (IDENTITY + '[protection]\ngram = "haar"', r"\[protection\] gram = 'haar': expected a list of names, in brackets"),
        (IDENTITY + '[protection]\nsecagg_mode = "activ"', r"\[protection\] secagg_mode = 'activ': known are 'active', 'passive'"),
        (IDENTITY + '[protection]\ngather = "none"', r"client0.toml: \[protection\] gather = 'none': was removed: values that are"),
        (IDENTITY + "[protection]\n[privacy]\nepsilonn = 1.0", r"\[privacy\] epsilonn = 1.0: is not a key here; known are choice_share"),
        (IDENTITY + '[protection]\n[privacy]\nunit = "sampel"', r"\[privacy\] unit = 'sampel': known are 'none', 'sample', 'client'"),
        (IDENTITY + '[protection]\n[privacy]\nunit = "sample"\nepsilon = "1"', r"\[privacy\] epsilon = '1': expected `float`, got `str`"),
        (IDENTITY + "protection = 3", r"protection = 3: is a table"),
        (IDENTITY + "roster = 3\n[protection]", "roster = 3: give the path"),
        (IDENTITY + "state = 3\n[protection]", "state = 3: give the path"),
        ("identity = 3\n[protection]", "identity = 3: give the path"),
        ('identity = "short.key"\n[protection]', "short.key: is not a key file"),
        ('identity = "negative.key"\n[protection]', "negative.key: is not a key file"),
        (IDENTITY + 'state = "keys/client0.key"\n[protection]', ""),  # a file where the folder should be: seen when it is used
        ("identity = ", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_wrong_settings_are_a_line_and_a_word(tmp_path: Path, text: str | None, line: str) -> None:
    write_identities(tmp_path / "keys", 1, public_entropy("settings"))
    (tmp_path / "short.key").write_text("0\nabcd\nabcd\n", encoding="utf-8")
    (tmp_path / "negative.key").write_text(
        (tmp_path / "keys" / "client0.key").read_text(encoding="utf-8").replace("0", "-1", 1), encoding="utf-8"
    )
    path = tmp_path / "client0.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    if line:
        with pytest.raises(InputError, match=line):
            read_settings(path)

    def data(context: Any, tables: Any) -> Any:
        raise AssertionError("no task was asked for")

    stock = ClientApp(mods=[cflpriv_mod()])
    stock.query("cflpriv")(lambda message, context: message)
    for app in (client_app(data), stock):
        grid = FakeGrid({1: app}, {1: {"settings": str(path)}})
        fed = FederationServer(OverBytes(GridTransport(grid)))  # type: ignore[arg-type]
        assert fed.enrol() == ()
        assert fed.refusals == [(-1, "enrol", "bad-settings")]
        assert not grid.errors, "no text of an exception reaches the server"


def test_a_run_without_settings_ends_at_once_and_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CFLPRIV_SETTINGS", raising=False)

    def data(context: Any, tables: Any) -> Any:
        raise AssertionError("no task was asked for")

    grid = FakeGrid(dict.fromkeys(range(4), client_app(data)), {node: {"partition-id": node, "num-partitions": 4} for node in range(4)})
    staged = GridTransport(grid)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^4 of 4 places have no settings file: .*'settings=.* CFLPRIV_SETTINGS to the folder"):
        staged.welcome_all(FederationServer(OverBytes(staged)), 4, 3600.0)
    assert [stage[0] for stage in staged.stages] == ["enrol"], "it is not asked again"


def test_a_node_without_settings_beside_enough_others_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CFLPRIV_SETTINGS", raising=False)
    write_identities(tmp_path / "keys", 2, public_entropy("settings"))
    configs: dict[int, dict[str, Any]] = {9: {}}
    for number in range(2):
        path = tmp_path / f"client{number}.toml"
        path.write_text(f'identity = "keys/client{number}.key"\n[protection]\n', encoding="utf-8")
        configs[number] = {"settings": str(path)}

    def data(context: Any, tables: Any) -> Any:
        raise AssertionError("no task was asked for")

    grid, told = FakeGrid(dict.fromkeys(configs, client_app(data)), configs), list[str]()
    staged = GridTransport(grid)  # type: ignore[arg-type]
    fed = FederationServer(OverBytes(staged), contract=contract_of(None))
    staged.welcome_all(fed, 2, 3600.0, told.append)
    assert fed.clients == (0, 1)
    assert fed.refusals == [(-1, "enrol", "no-settings")]
    assert told == ["2 of 2 clients are here"]


def test_a_superlink_that_knows_no_node_says_what_to_restart() -> None:
    staged = GridTransport(FakeGrid({}), poll_seconds=0.01)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"0 of 4 clients answered .*; the SuperLink knows no SuperNode; .* restart the SuperNodes, too"):
        staged.welcome_all(FederationServer(OverBytes(staged)), 4, 0.1)
