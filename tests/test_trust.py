"""No command runs the code that a run folder names, unless its user says so; then only the code of the run."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest
from command_line import in_process

from cflpriv import plugins
from cflpriv.attacks.adversary import load_view
from cflpriv.attacks.audit import audit_run
from cflpriv.cli import app
from cflpriv.engine.workers import Workers
from cflpriv.errors import InputError
from cflpriv.experiments import load_config, load_sweep, run_experiment
from cflpriv.experiments.digests import FILE, record_digests
from cflpriv.experiments.run.export import export_model
from cflpriv.experiments.run.workers import ended
from cflpriv.experiments.sweep.sweep import SweepCell, SweepSetting, sweep_of
from cflpriv.experiments.trust import RECORDED
from cflpriv.protocols import ledger
from cflpriv.transports.hosts import Seat

CODE = """
import os
from pathlib import Path
import cflpriv
Path(os.environ.get("RAN", __file__ + ".ran")).touch()  # a fork server has an older environment
cflpriv.register_callback("own", cflpriv.Callback)
"""
CONFIG = (
    '[data]\nclients = 4\n[model]\nhidden = 4\n[training]\nrounds = 1\n[algorithm]\nname = "fedavg"\n[run]\nrecord = "full"\n'
    'plugins = ["evil.py"]\n'
)
SWEEP = CONFIG + "[sweep]\nseeds = [0]\naudit = false\n"


@pytest.fixture(autouse=True)
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that the plugin makes when it runs."""
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    _as_in_a_new_process()
    yield tmp_path / "ran"
    _as_in_a_new_process()


def _as_in_a_new_process() -> None:
    for name in ("evil", "evil2"):
        plugins._loaded.pop(f"cflpriv_plugin_{name}", None)
        sys.modules.pop(f"cflpriv_plugin_{name}", None)
    plugins.CALLBACKS.pop("own", None)


@pytest.fixture(scope="module")
def stranger_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a sweep with a plugin, as a stranger makes them."""
    place = tmp_path_factory.mktemp("stranger")
    (place / "evil.py").write_text(CODE, encoding="utf-8")
    (place / "c.toml").write_text(CONFIG, encoding="utf-8")
    (place / "grid.toml").write_text(SWEEP, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAN", str(place / "ran"))
        run_experiment(load_config(place / "c.toml"), place / "run")
        assert in_process(patch, "sweep", str(place / "grid.toml"), "--out", str(place / "sweep"), "--workers", "1") == 0
    assert has_run(place / "ran")
    for path in (place / "ran", *place.rglob("*.ran")):
        path.unlink(missing_ok=True)
    return place


def has_run(ran: Path) -> bool:
    """Whether the code ran, in this process or in one that it started."""
    return ran.exists() or any(ran.parent.rglob("*.ran"))


def without_plugin(text: str) -> str:
    return text.replace('plugins = ["evil.py"]\n', "")


@pytest.fixture(
    params=[
        pytest.param("as it was made", marks=pytest.mark.slow),
        pytest.param("changed", marks=pytest.mark.slow),
        "changed and sealed again",
        "begun only",
        "config alone",
    ]
)
def stranger(request: pytest.FixtureRequest, stranger_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of folder; folders `run` and `sweep` with code in them in the working directory, and a user's own `c.toml` without."""
    monkeypatch.chdir(tmp_path)
    for name in ("run", "sweep"):
        shutil.copytree(stranger_files / name, tmp_path / name)
        (tmp_path / name / "evil.py").write_text(CODE, encoding="utf-8")
        for file in (tmp_path / name).rglob("*.toml"):
            text = file.read_text(encoding="utf-8")
            assert str(stranger_files / "evil.py") in text
            if request.param != "as it was made":
                file.write_text(text.replace(str(stranger_files / "evil.py"), str(tmp_path / name / "evil.py")), encoding="utf-8")
    if request.param == "changed and sealed again":
        record_digests(tmp_path / "run")
    if request.param == "begun only":
        for name in (FILE, "summary.json", "environment.json"):
            (tmp_path / "run" / name).unlink()
    if request.param == "config alone":
        for path in (tmp_path / "run").iterdir():
            if path.name not in ("config.toml", "evil.py"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    (tmp_path / "c.toml").write_text(without_plugin(CONFIG), encoding="utf-8")
    (tmp_path / "grid.toml").write_text(without_plugin(SWEEP), encoding="utf-8")
    return str(request.param)


LINES = {
    "run": ["run c.toml --out run --resume", "run run/config.toml --out new", "run sweep/config.toml --out new"],
    "advise": ["advise c.toml --out run --resume", "advise run/config.toml --out new", "advise sweep/config.toml --out new"],
    "sweep": ["sweep grid.toml --out sweep --list", "sweep sweep/sweep.toml --out sweep --merge", "sweep run/config.toml"],
    "audit": [
        "audit run --budget quick --attacks update_norms", "audit run --active --attacks second_sum", "audit run --foreign",
        "audit run/config.toml --active --attacks second_sum", "audit sweep",
    ],
    "verify": ["verify run", "verify sweep"],
    "report": ["report run", "report sweep", "report ."],
    "export": ["export run --model 0 --out m.pt", "export run --client 0 --out m.pt"],
    "predict": ["predict run run/rows.csv --model 0"],
    "reproduce": ["reproduce cfl-label-swap --data-dir nowhere --out run", "reproduce cfl-label-swap --data-dir nowhere --out sweep"],
    "claims": ["claims no_such_claim --out run"],
    "init": ["init run/new.toml"],
    "examples": ["examples run"],
    "explain": ["explain run.plugins"],
    "contract": ["contract run/config.toml", "contract run/config.toml --digest", "contract run/config.toml --infer schedule.json"],
    "list": ["list"],
    "helper": ["helper run/config.toml", "helper c.toml"],
}  # fmt: skip


def test_every_command_is_asked() -> None:
    names = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    assert names == set(LINES)


@pytest.mark.parametrize("command", LINES)
def test_no_command_runs_the_code_of_a_folder(
    command: str, stranger: str, ran: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in LINES[command]:
        if stranger == "config alone" and line.startswith(("run run/config.toml", "advise run/config.toml")):
            continue  # nothing distinguishes the file from a configuration that its user wrote, and chose to run
        if stranger == "config alone" and "run/config.toml --active" in line:
            continue
        code = in_process(monkeypatch, *line.split())
        shown = capsys.readouterr()
        assert not has_run(ran), line
        assert "Traceback" not in shown.err, line
        assert code in (0, 1, 2), line


@pytest.mark.slow
def test_no_run_of_a_sweep_or_a_claim_runs_the_code_of_its_folder(stranger: str, ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in (
        "sweep grid.toml --out sweep", "sweep sweep/sweep.toml --out sweep", "sweep sweep/sweep.toml --out new",
        "claims signatures_are_safe --data-dir nowhere --out run",
    ):  # fmt: skip
        assert in_process(monkeypatch, *line.split()) in (0, 2), line
        assert not has_run(ran), (stranger, line)


NAMED = "run.plugins = ['"


def test_a_command_that_needs_the_code_says_how_to_allow_it(
    stranger_files: Path, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run names a callback of the code, so nothing can continue without the code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "c.toml").write_text(CONFIG + 'callbacks = ["own"]\n', encoding="utf-8")
    run_experiment(load_config(tmp_path / "c.toml"), tmp_path / "run")
    (tmp_path / "c.toml").write_text(without_plugin(CONFIG) + 'callbacks = ["own"]\n', encoding="utf-8")
    for line in (
        "audit run --budget quick --attacks update_norms", "audit run --active --attacks second_sum", "export run --model 0 --out m.pt",
        "run c.toml --out run --resume", "run run/config.toml --out new",
    ):  # fmt: skip
        _as_in_a_new_process()
        ran.unlink(missing_ok=True)
        assert in_process(monkeypatch, *line.split()) == 2, line
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert f"config.toml: {NAMED}{tmp_path / 'evil.py'}']: is code that did not run; allow it with --trust" in error
        assert not ran.exists(), line
        assert in_process(monkeypatch, *line.split(), "--trust") == 0, (line, capsys.readouterr().err)
        assert ran.exists(), line
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        _as_in_a_new_process()
        ran.unlink()
        assert in_process(monkeypatch, *line.split(), "--plugin", "evil.py") == 0, (line, capsys.readouterr().err)
        assert ran.exists(), line


@pytest.mark.parametrize("kind", ["the code", "the configuration", "an earlier version"])
def test_trust_is_for_the_code_of_the_run(
    kind: str, stranger_files: Path, ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "c.toml").write_text(CONFIG, encoding="utf-8")
    run_experiment(load_config(tmp_path / "c.toml"), tmp_path / "run")
    _as_in_a_new_process()
    ran.unlink()
    words = "evil.py: is not as the run left it"
    if kind == "the code":
        (tmp_path / "evil.py").write_text(CODE + "\n", encoding="utf-8")
    elif kind == "the configuration":
        (tmp_path / "run" / "evil2.py").write_text(CODE, encoding="utf-8")
        path = tmp_path / "run" / "config.toml"
        text = path.read_text(encoding="utf-8").replace(str(tmp_path / "evil.py"), str(tmp_path / "run" / "evil2.py"))
        path.write_text(text, encoding="utf-8")
        words = "config.toml: is not as the run left it"
    else:
        path = tmp_path / "run" / "environment.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({key: value for key, value in record.items() if key != "plugins"}), encoding="utf-8")
        record_digests(tmp_path / "run")
        words = "environment.json: holds no digest of"
    for line in (
        "audit run --budget quick --attacks update_norms", "audit run --active --attacks second_sum", "export run --model 0 --out m.pt",
        "run c.toml --out run --resume", "run run/config.toml --out new",
    ):  # fmt: skip
        if kind == "the code" and line.startswith("run c.toml"):
            continue  # the user's own configuration names the file as it is now
        assert in_process(monkeypatch, *line.split(), "--trust") == 2, line
        assert words in capsys.readouterr().err, line
        assert not ran.exists(), line


@pytest.mark.parametrize("pattern", RECORDED)
def test_a_folder_that_was_handed_on_in_part_is_a_run_folder(pattern: str, ran: Path, tmp_path: Path) -> None:
    left = tmp_path / "run" / pattern.replace("*", "1")
    left.parent.mkdir(parents=True)
    left.touch()
    (tmp_path / "run" / "evil.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "run" / "config.toml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "run" / "sweep.toml").write_text(SWEEP, encoding="utf-8")
    (tmp_path / "link.toml").symlink_to(tmp_path / "run" / "config.toml")
    for path in (tmp_path / "run" / "config.toml", tmp_path / "link.toml"):
        assert load_config(path).run.plugins == ()
    load_sweep(tmp_path / "run" / "sweep.toml")
    assert not ran.exists()


def test_folders_of_other_programs_make_no_run_folder(ran: Path, tmp_path: Path) -> None:
    """A user's own configuration in a project that has checkpoints, and the folders of its runs."""
    for name in ("checkpoints/epoch_1.pt", "locks/here", "runs/c/digests.json", "report.html", "results.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "evil.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "c.toml").write_text(CONFIG, encoding="utf-8")
    assert load_config(tmp_path / "c.toml").run.plugins == (str(tmp_path / "evil.py"),)
    assert ran.exists()


def test_compiled_code_beside_a_plugin_never_runs(ran: Path, tmp_path: Path) -> None:
    """Python runs `__pycache__` in place of a file of the same time and length; a reader of the file would not see that code."""
    import py_compile

    file, other = tmp_path / "evil.py", tmp_path / "other.py"
    other.write_text(CODE, encoding="utf-8")
    file.write_text("pass".ljust(len(CODE)) + "\n", encoding="utf-8")
    other.write_text(CODE + "\n", encoding="utf-8")
    os.utime(other, (1, 1))
    os.utime(file, (1, 1))
    cached = Path(py_compile.compile(str(other), cfile=str(tmp_path / "c.pyc")) or "")
    (tmp_path / "__pycache__").mkdir(exist_ok=True)
    cached.rename(tmp_path / "__pycache__" / f"evil.{sys.implementation.cache_tag}.pyc")
    found = subprocess.run([sys.executable, "-c", "import evil"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert found.returncode == 0
    assert ran.exists(), "what Python itself does"
    ran.unlink()
    plugins.load_plugin(file)
    assert not ran.exists()


def test_functions_run_none_either(stranger_files: Path, ran: Path, tmp_path: Path) -> None:
    shutil.copytree(stranger_files / "run", tmp_path / "run")
    shutil.copytree(stranger_files / "sweep", tmp_path / "sweep")
    assert load_config(tmp_path / "run" / "config.toml").run.plugins == ()
    assert load_view(tmp_path / "run").messages
    export_model(tmp_path / "run", tmp_path / "m.pt", cluster=0)
    audit_run(tmp_path / "run", attacks=["update_norms"], budget="quick")
    assert [cell.seed for cell in load_sweep(tmp_path / "sweep" / "sweep.toml").cells] == [0]
    (tmp_path / "sweep" / "sweep.toml").write_text(  # a name and sections that only the code knows, and code in an entry of its own
        without_plugin(SWEEP)
        + f'algorithms = [{{ name = "mine", run = {{ plugins = ["{stranger_files / "evil.py"}"] }} }}]\nprotections = ["mine"]\n',
        encoding="utf-8",
    )
    sweep = sweep_of(tmp_path / "sweep")
    assert sweep is not None
    assert "'mine' is not known" in sweep.cells[0].problem
    with pytest.raises(InputError, match="'mine'"):
        load_sweep(tmp_path / "sweep" / "sweep.toml")
    assert not ran.exists()


@pytest.mark.slow
def test_processes_import_nothing_from_the_working_directory(tmp_path: Path) -> None:
    """Commands start Python processes, in a folder that may hold a `numpy.py`."""
    folder = tmp_path / "stranger"
    folder.mkdir()
    for name in ("numpy", "struct", "socket", "msgspec", "tenseal", "torch", "signal"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise ImportError\n", encoding="utf-8")
    config = without_plugin(CONFIG).replace("[run]", '[protection]\ngram = ["ckks"]\n[run]\nworkers = 2').replace('"fedavg"', '"pacfl"')
    (folder / "c.toml").write_text(config, encoding="utf-8")
    (folder / "s.toml").write_text(without_plugin(SWEEP).replace("seeds = [0]", "seeds = [0, 1]"), encoding="utf-8")
    command = str(Path(sys.executable).with_name("cflpriv"))
    on_ray = ["run c.toml --out ray --hosts 2 --set protection.gram=[]"] if find_spec("ray") else []
    for line in ("run c.toml --out run", "sweep s.toml --out runs --workers 2", *on_ray):
        done = subprocess.run([command, *line.split()], cwd=folder, capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["resumes.jsonl", "rounds.jsonl", "transcript/messages.jsonl"])
def test_nothing_is_written_through_a_link_of_a_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to `.bashrc` would make its user's shell run what the folder's maker has the command write."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(without_plugin(CONFIG), encoding="utf-8")
    run_experiment(load_config(tmp_path / "c.toml"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")  # so that a resumed run begins again
    path, target = tmp_path / "run" / name, tmp_path / "bashrc"
    target.write_bytes(path.read_bytes() if path.exists() else b"umask 022\n")
    before = target.read_bytes()
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    assert in_process(monkeypatch, "run", "c.toml", "--out", "run", "--resume") in (1, 2)
    assert target.read_bytes() == before
    error = capsys.readouterr().err
    assert "is a link, and nothing is written through one" in error
    assert name in error


def test_no_ledger_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "bashrc").write_text("umask 022\n", encoding="utf-8")
    (tmp_path / "ledger.json.part").symlink_to(tmp_path / "bashrc")
    with pytest.raises(OSError, match="is a link"):
        ledger._write(tmp_path / "ledger.json", "charges")
    assert (tmp_path / "bashrc").read_text(encoding="utf-8") == "umask 022\n"


def test_workers_run_the_text_that_was_checked(tmp_path: Path) -> None:
    """A file may change between the check of its digest and the start of a worker."""
    file = tmp_path / "evil.py"
    file.write_text(f"open({str(tmp_path / 'text')!r}, 'a').write('old ')\n", encoding="utf-8")
    plugins.load_plugin(file)
    file.write_text(f"open({str(tmp_path / 'text')!r}, 'a').write('new ')\n", encoding="utf-8")
    texts = plugins.loaded_plugins()
    _as_in_a_new_process()
    Seat(texts)
    assert (tmp_path / "text").read_text(encoding="utf-8") == "old old "


@pytest.mark.slow
def test_processes_run_the_text_that_was_checked(tmp_path: Path) -> None:
    file = tmp_path / "evil.py"
    file.write_text(f"open({str(tmp_path / 'text')!r}, 'a').write('old ')\n", encoding="utf-8")
    plugins.load_plugin(file)
    file.write_text(f"open({str(tmp_path / 'text')!r}, 'a').write('new ')\n", encoding="utf-8")
    assert list(ended([SweepCell("one", SweepSetting("a", "b"), 0, None)], attrgetter("name"), 1)) == [("one", "one")]
    workers = Workers(1)
    workers._pipes[0].send(None)
    workers._processes[0].join()
    workers.close()
    assert (tmp_path / "text").read_text(encoding="utf-8") == "old old old "


@pytest.mark.parametrize(
    "text", ["run = 3", "[[run]]", '[run]\nplugins = "evil.py"', '[run]\nplugins = {"evil.py" = 1}', "[run]\nplugins = [[1]]"]
)
def test_plugins_of_another_type_are_refused_in_one_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil2.py").touch()
    (tmp_path / "c.toml").write_text(text, encoding="utf-8")
    assert in_process(monkeypatch, "run", "c.toml", "--plugin", "evil2.py", "--plugin", "evil2.py") == 2
    error = capsys.readouterr().err
    assert error.startswith("cflpriv: c.toml: ")
    assert error.count("\n") == 1


def test_the_code_of_an_entry_of_a_sweep_is_named_and_is_beside_the_file(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid").mkdir()
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    (tmp_path / "grid" / "evil.py").write_text(CODE, encoding="utf-8")
    entry = 'algorithms = [{ name = "fedavg", run = { plugins = ["evil.py"], callbacks = ["own"] } }]\n'
    (tmp_path / "grid" / "sweep.toml").write_text(without_plugin(SWEEP) + entry, encoding="utf-8")
    assert load_sweep(tmp_path / "grid" / "sweep.toml").cells[0].problem == ""
    assert ran.exists()
    _as_in_a_new_process()
    ran.unlink()
    (tmp_path / "grid" / "sweep.csv").touch()
    named = rf"run.plugins = \['{tmp_path}/grid/evil.py'\]: is code that did not run; allow it with --plugin FILE"
    with pytest.raises(InputError, match=named):
        load_sweep(tmp_path / "grid" / "sweep.toml")
    assert not ran.exists()
    (tmp_path / "grid" / "keys.toml").write_text(without_plugin(SWEEP) + 'keys = { "run.plugins" = [["evil.py"], []] }\n', encoding="utf-8")
    with pytest.raises(InputError, match="use `\\[run\\] plugins`"):
        load_sweep(tmp_path / "grid" / "keys.toml")


def test_run_and_sweep_say_which_code_they_leave_out(
    stranger_files: Path, ran: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in (f"run {stranger_files}/run/config.toml --out new", f"sweep {stranger_files}/sweep/sweep.toml --out grid --list"):
        assert in_process(monkeypatch, *line.split()) == 0
        assert "is code that did not run" in capsys.readouterr().out
        assert not ran.exists()


def test_a_link_to_a_configuration_is_trusted_as_the_run_is(stranger_files: Path, ran: Path, tmp_path: Path) -> None:
    (tmp_path / "link.toml").symlink_to(stranger_files / "run" / "config.toml")
    assert load_config(tmp_path / "link.toml").run.plugins == ()
    assert not ran.exists()
    assert load_config(tmp_path / "link.toml", trust=True).run.plugins == (str(stranger_files / "evil.py"),)
    assert ran.exists()


def test_trust_says_where_to_name_a_file_that_is_elsewhere(stranger_files: Path, ran: Path, tmp_path: Path) -> None:
    shutil.copytree(stranger_files / "run", tmp_path / "run")
    for name in ("config.toml", "environment.json"):
        path = tmp_path / "run" / name
        path.write_text(path.read_text(encoding="utf-8").replace(str(stranger_files), "/another/machine"), encoding="utf-8")
    record_digests(tmp_path / "run")
    with pytest.raises(InputError, match=r"/another/machine/evil\.py: no such file here; --plugin FILE runs it"):
        load_config(tmp_path / "run" / "config.toml", trust=True)


def test_an_active_audit_of_its_own_folder_can_be_trusted(ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "c.toml").write_text(CONFIG + 'callbacks = ["own"]\n', encoding="utf-8")
    for line in ("audit c.toml --active --attacks second_sum --out active", "audit active --active --attacks second_sum --trust"):
        assert in_process(monkeypatch, *line.split()) == 0, line
        assert ran.exists()
        _as_in_a_new_process()
        ran.unlink()
