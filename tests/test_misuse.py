"""Some two hundred misuses: each ends in one line that names what is wrong, with exit code 2 or 1, and writes nothing."""

import errno
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from command_line import in_process

from cflpriv.files import copy_examples

OK = '[data]\nclients = 4\n[model]\nhidden = 4\n[training]\nrounds = 1\n[algorithm]\nname = "fedavg"\n'
"""An experiment that takes a moment."""
SWEEP = OK + "[sweep]\nseeds = [0, 1]\n"
CSV = "a,b,label,who\n" + "".join(f"{i}.5,{i * i},{'xy'[i % 2]},{i % 3}\n" for i in range(30))
TABLE = '[data]\nsource = "csv"\npaths = ["own.csv"]\n'
FILES: dict[str, str | bytes] = {
    "ok.toml": OK,
    "sweep.toml": SWEEP,
    "broken.toml": "[data\nclients = 4\n",
    "twice.toml": "[data]\nclients = 4\nclients = 5\n",
    "binary.toml": b"\xff\xfe\x00\x01",
    "flat.toml": "data = 3\n",
    "section.toml": "[dta]\nclients = 4\n",
    "seedless.toml": OK + "[sweep]\nseeds = []\n",
    "key.toml": OK + "[sweep]\nseds = [0]\n",
    "entry.toml": OK + '[sweep]\nalgorithms = ["fedavgg"]\n',
    "dotless.toml": OK + "[sweep]\nkeys = { lr = [0.1] }\n",
    "idle.toml": OK + '[sweep]\naudit = false\nattacks = ["label_inference"]\n',
    "lazy.toml": OK + '[sweep]\naudit = false\nbudget = "quick"\n',
    "bound.toml": OK + '[sweep]\nchoose = { by = "accuracy_mean", runs = 5 }\n',
    "own.csv": CSV,
    "text.csv": CSV.replace("3.5", "three"),
    "empty.csv": "",
    "damaged.npz": b"PK\x03\x04 no archive",
    "failing.py": "raise KeyError('oh')\n",
    "twice.py": "import cflpriv\ncflpriv.register_callback('tensorboard', dict)\n",
    "leaving.py": "import sys\nsys.exit(3)\n",
    "unwritten.py": "def (\n",
    "deep.toml": "a = " + "[" * 5000 + "]" * 5000,
    "plain.txt": "text\n",
    "full/file": "x",
    "foreign/manifest.json": "{",
    "foreign2/foreign.toml": "format = 1\nclasses = 0\nshape = [1]\n",
    "foreign3/foreign.toml": "format = 1\nclasses = 2\nshape = [4]\nlr = 'x'\n",
    "foreign4/foreign.toml": "format = 1\nclasses = 2\nshape = [4]\n",
    "foreign5/foreign.toml": "a = " + "[" * 5000,
    "report1/summary.json": "{",
    "report2/summary.json": "[" * 100_000,
    "run1/config.toml": OK,
    "run2/config.toml": "x = [",
    "old/sweep.toml": "x",
    "bare/sweep.toml": "algorithm = 3\n",
    "word.toml": OK + "[sweep]\nseeds = ['a']\n",
    "same.toml": OK + "[sweep]\nseeds = [0, 0]\n",
    "single.toml": OK + "[sweep]\nkeys = { 'training.lr' = 3 }\n",
    "unit.toml": OK + "[sweep]\nepsilon = [1]\n",
    "hexagon.toml": OK + "[sweep]\nprotections = ['hexagon']\n",
    "typo.toml": OK + "[sweep]\nkeys = { 'trainign.lr' = [1] }\n",
    "attacks.toml": OK + "[sweep]\nattacks = ['nonsense']\n",
    "budget.toml": OK + "[sweep]\nbudget = 'lots'\n",
    "table.toml": TABLE + 'label_column = "label"\n',
    "textual.toml": TABLE.replace("own", "text") + 'label_column = "label"\n',
    "labelless.toml": TABLE + 'label_column = "class"\n',
    "missing.toml": TABLE.replace("own", "gone") + 'label_column = "label"\n',
    "hollow.toml": TABLE.replace("own", "empty") + 'label_column = "label"\n',
}

TABLES: dict[str, tuple[str | bytes, str]] = {
    "dup": ("a,a,label,who\n1,2,x,0\n3,4,y,1\n", "dup.csv: has two columns 'a'"),
    "short": (CSV + "1,2\n", "short.csv: row 32 has 2 cells, expected 4"),
    "long": (CSV + "1,2,x,0,9\n", "long.csv: row 32 has 5 cells, expected 4"),
    "header": ("a,b,label,who\n", "header.csv: has no rows"),
    "latin": (CSV.encode() + b"1,2,\xe9,0\n", "latin.csv: not a readable csv file"),
    "nul": (CSV.encode() + b"1,\x002,x,0\n", "nul.csv: row 32, column 'b'"),
    "quote": (CSV + '1,2,"x,0\n', "quote.csv: not a readable csv file"),
    "unlabelled": (CSV + "1,2,,0\n", "unlabelled.csv: row 32, column 'label': is empty"),
    "nobody": (CSV + "1,2,x,\n", "nobody.csv: row 32, column 'who': is empty"),
    "infinite": (CSV + "inf,2,x,0\n", "infinite.csv: row 32, column 'a': 'inf' is not a finite number; encode it"),
    "large": (CSV + "1e400,2,x,0\n", "large.csv: row 32, column 'a': '1e400' is not a finite number"),
    "gap": (CSV + ",2,x,0\n", "gap.csv: row 32, column 'a': '' is not a finite number; fill it"),
    "semicolons": (CSV.replace(",", ";"), "its columns are separated by something else than commas"),
    "tabs": (CSV.replace(",", "\t"), "its columns are separated by something else than commas"),
    "utf16": (CSV.encode("utf-16"), "utf16.csv: not a readable csv file"),
}
"""Faulty tables, and the words of each refusal."""
for _name, (_content, _) in TABLES.items():
    FILES[f"{_name}.csv"] = _content
    FILES[f"t_{_name}.toml"] = TABLE.replace("own", _name) + 'partition = "given"\nclient_column = "who"\nlabel_column = "label"\n'
USAGE = [  # what click itself refuses
    ("rnu ok.toml", "no such command 'rnu'; did you mean 'run'?"),
    ("run", "Missing argument 'CONFIG.toml'"),
    ("run ok.toml --otu x", click.NoSuchOption("--otu").format_message().rstrip(".")),  # click 8.5 changed these words
    ("run ok.toml --set", "Option '--set' requires an argument"),
    ("run ok.toml too.toml", "unexpected extra argument"),
    ("run ok.toml --hosts 0", "--hosts"),
    ("sweep sweep.toml --workers 0", "--workers"),
    ("sweep sweep.toml --workers 1000", "--workers"),
    ("sweep sweep.toml --only x", "--only"),
    ("export full", "Missing option '--out'"),
    ("export full --out x.pt --model a", "--model"),
    ("reproduce cfl-label-swap --scale much", "--scale"),
    ("explain", "Missing argument 'KEY'"),
]
FILE = [  # files and folders
    ("run gone.toml", "gone.toml: no such file"),
    ("run full", "full: cannot be read"),
    ("run binary.toml", "binary.toml: cannot be read"),
    ("run broken.toml", "broken.toml: is not TOML"),
    ("run twice.toml", "twice.toml: is not TOML"),
    ("run flat.toml", "data = 3: write it as a section"),
    ("run section.toml", "[dta] is not a section; did you mean 'data'?"),
    ("run sweep.toml", "`cflpriv sweep` runs a file that has one"),
    ("run nul\0.toml", "NUL"),
    ("run ok.toml --out nul\0", "NUL"),
    ("sweep sweep.toml --out nul\0", "NUL"),
    ("init nul\0.toml", "NUL"),
    ("report nul\0", "NUL"),
    ("run ok.toml --out plain.txt", "plain.txt: the output folder exists"),
    ("run ok.toml --out full", "full: the output folder exists"),
    ("run ok.toml --out plain.txt/run", "plain.txt/run: cannot be made"),
    ("run ok.toml --out full --resume", "full: the output folder exists"),
    ("sweep gone.toml", "gone.toml: no such file"),
    ("sweep sweep.toml --out full", "full: exists and holds no sweep"),
    ("audit gone", "gone: "),
    ("audit full", "full: "),
    ("audit gone --foreign", "gone: "),
    ("audit foreign --foreign", "foreign/foreign.toml: is missing"),
    ("verify gone", "gone: is not a run folder"),
    ("verify full", "full: is not a run folder"),
    ("report gone", "gone: no such folder"),
    ("report full", "full: is no run folder and holds none"),
    ("export gone --out x.pt", "gone"),
    ("export full --out x.bin", "x.bin"),
    ("init ok.toml", "ok.toml: "),
    ("init gone/my.toml", "gone/my.toml"),
    ("examples full", "full: exists; name a new folder"),
]
KEYS = [  # what --set, a section or a key is
    ("nonsense", "--set nonsense: expected section.key=value"),
    ("training.lr", "expected section.key=value"),
    ("=1", "expected section.key=value"),
    (".lr=1", "expected section.key=value"),
    ("trainign.lr=0.1", "[trainign] is not a section; did you mean 'training'?"),
    ("training.learning_rate=0.1", "learning_rate"),
    ("training.lr=fast", "lr = 'fast'"),
    ("training.lr=-1", "lr"),
    ("training.lr=nan", "lr"),
    ("training.rounds=-1", "training.rounds = -1: expected an integer ≥ 0"),
    ("training.rounds=1.5", "rounds = 1.5"),
    ("training.batch_size=-3", "batch_size"),
    ("training.epochs=0", "epochs"),
    ("training.momentum=1.5", "momentum"),
    ("training.optimizer=adamw", "optimizer = 'adamw'"),
    ("training.weights=exampels", "training.weights = 'exampels'"),
    ("training.sampling=globl", "globl"),
    ("training.participation=0", "participation"),
    ("training.participation=1.5", "participation"),
    ("training.dropout=1", "training.dropout = 1"),
    ("training.dropouts=[[0,1]]", "dropouts"),
    ("algorithm.name=pafcl", "'pafcl': is not known; did you mean 'pacfl'?"),
    ("algorithm.name=5", "name = 5"),
    ("algorithm.nope=1", "nope"),
    ("protection.sum=secag", "secag"),
    ("protection.gram=haar", "expected a list, in brackets"),
    ("protection.min_cohort=-2", "min_cohort"),
    ("protection.floor=2", "is called min_cohort now"),
    ("data.source=digit", "'digit'"),
    ("data.source=csv", "paths"),
    ("data.clients=0", "clients"),
    ("data.clients=1000000", "clients"),
    ("data.clients=many", "clients = 'many'"),
    ("data.partition=iidd", "iidd"),
    ("data.alpha=0.3", "alpha"),
    ("data.newcomers=4", "newcomers"),
    ("data.newcomers=-1", "data.newcomers = -1"),
    ("model.name=mpl", "mpl"),
    ("model.hidden=0", "model.hidden = 0"),
    ("model.dtype=float16", "dtype = 'float16'"),
    ("privacy.unit=samples", "unit = 'samples'"),
    ("privacy.unit=sample", "privacy."),
    ("run.seed=first", "seed = 'first'"),
    ("run.workers=0", "run.workers = 0"),
    ("run.workers=100000", "run.workers = 100000: expected an integer in [1, 512]"),
    ("run.record=everything", "record = 'everything'"),
    ("run.device=gpu", "device = 'gpu'"),
    ("run.target_accuracy=95", "run.target_accuracy = 95"),
    ("run.evaluate_every=0", "run.evaluate_every = 0"),
    ("run.callbacks=[\"tensorbord\"]", "'tensorbord' is not known; did you mean 'tensorboard'?"),
    ("run.plugins=[\"gone.py\"]", "gone.py: no such file"),
]  # fmt: skip
OPTIONS = [  # values of options, and options that do not go together
    ("run ok.toml --device gpu", "gpu"),
    ("run ok.toml --plugin gone.py", "gone.py: no such file"),
    ("run ok.toml --plugin plain.txt", "plain.txt: is no Python file"),
    ("run ok.toml --plugin failing.py", "failing.py: KeyError: 'oh'"),
    ("run ok.toml --plugin twice.py", "callback 'tensorboard': is registered twice"),
    ("list --plugin gone.py", "gone.py: no such file"),
    ("sweep ok.toml", "[sweep]"),
    ("sweep seedless.toml", "seeds"),
    ("sweep key.toml", "seds"),
    ("sweep entry.toml", "fedavgg"),
    ("sweep dotless.toml", "lr"),
    ("sweep idle.toml", "attacks = ['label_inference']: is not used, because audit = false; remove one of them"),
    ("sweep lazy.toml", "budget = 'quick': is not used, because audit = false"),
    ("sweep bound.toml", "privacy.unit = 'none'"),
    ("sweep sweep.toml --only 99", "--only 99: the sweep has the runs 1 to 2"),
    ("sweep sweep.toml --shard 5/4", "--shard 5/4"),
    ("sweep sweep.toml --shard x", "--shard x"),
    ("sweep sweep.toml --list --merge", "give one of them"),
    ("sweep sweep.toml --only 1 --shard 1/2", "give one of them"),
    ("sweep sweep.toml --merge", "holds no sweep"),
    ("audit full --out x", "--out: does not apply to a recorded run"),
    ("audit full --set run.seed=1", "--set: does not apply to a recorded run"),
    ("audit full --foreign --active", "--foreign, --active: give one of them"),
    ("audit full --foreign --out x", "--out: does not apply with --foreign, which takes --attacks and --plugin only"),
    ("audit full --foreign --set run.seed=1", "--set: does not apply with --foreign"),
    ("audit full --foreign --adversary server", "--adversary: does not apply with --foreign"),
    ("audit full --foreign --device cpu", "--device: does not apply with --foreign"),
    ("audit full --foreign --budget quick", "--budget: does not apply with --foreign"),
    ("audit full --foreign --data-dir x", "--data-dir: does not apply with --foreign"),
    ("audit ok.toml --active --adversary server", "--adversary: does not apply with --active"),
    ("audit ok.toml --active --budget quick", "--budget: does not apply with --active"),
    ("audit ok.toml --active --attacks nothing", "nothing"),
    ("reproduce cfl-label-swp", "cfl-label-swap"),
    ("reproduce cfl-label-swap --scale 2", "scale"),
    ("reproduce cfl-label-swap --scale 0", "scale"),
    ("reproduce cfl-label-swap --seeds 0", "seeds"),
    ("reproduce cfl-label-swap --cells ;", "--cells ';': names no cell"),
    ("init --algorithm pafcl", "pafcl"),
    ("explain learnig_rate", "learnig_rate"),
    ("run table.toml --set data.clients=3 --set data.label_column=klass", "klass"),
    ("run textual.toml", "text.csv"),
    ("run labelless.toml", "class"),
    ("run missing.toml", "gone.csv"),
    ("run hollow.toml", "empty.csv"),
    ("run ok.toml --set data.source=npz --set data.paths=[\"damaged.npz\"]", "damaged.npz"),
    ("run ok.toml --set data.source=mnist --data-dir gone", "gone"),
]  # fmt: skip
NUL = [  # in every path
    "verify nul\0", "audit nul\0", "export nul\0 --out x.pt", "export full --out nul\0.pt", "claims --page nul\0",
    "claims signatures_are_safe --out nul\0", "examples nul\0", "list --plugin nul\0", "run ok.toml --plugin nul\0",
    "run ok.toml --data-dir nul\0", "reproduce cfl-label-swap --out nul\0", "sweep nul\0", 'run ok.toml --set run.plugins=["nul\\u0000"]',
]  # fmt: skip
MORE = [  # folders where nothing can be written, damaged files, values out of their range
    ("run ok.toml --out /proc/x", "/proc/x: cannot be made"),
    ("sweep sweep.toml --out /proc/x", "/proc/x: cannot be written"),
    ("init /proc/x.toml", "/proc/x.toml: cannot be written"),
    ("init full", "full: exists"),
    ("examples /proc/x", "/proc/x: cannot be written"),
    ("audit ok.toml --active --out /proc/x", "/proc/x: cannot be written"),
    ("audit ok.toml --active --set training.lr=x", "lr = 'x'"),
    ("audit sweep.toml --active", "`cflpriv sweep` runs a file that has one"),
    ("audit run1", "run1: payloads were not recorded"),
    ("audit run2", "run2/config.toml: is not TOML"),
    ("audit foreign2 --foreign", "foreign2/foreign.toml: classes = 0"),
    ("audit foreign3 --foreign", "foreign3/foreign.toml: lr = 'x'"),
    ("audit foreign4 --foreign", "foreign4: has no update"),
    ("audit foreign5 --foreign", "foreign5/foreign.toml: is not TOML"),
    ("audit plain.txt --foreign", "plain.txt: no such folder"),
    ("report plain.txt", "plain.txt: no such folder"),
    ("report report1", "report1/summary.json: is damaged"),
    ("report report2", "report2/summary.json: is damaged (maximum recursion depth"),
    ("run deep.toml", "deep.toml: is not TOML (maximum recursion depth"),
    ("run /", "/: cannot be read"),
    ("run ok.toml --resume --out run2", "run2/config.toml: is not TOML"),
    ("run ok.toml --out old", "old: the output folder exists"),
    ("run ok.toml --device cuda:7", "device = 'cuda:7'"),
    ("run ok.toml --plugin leaving.py", "leaving.py: SystemExit: 3"),
    ("run ok.toml --plugin unwritten.py", "unwritten.py: SyntaxError"),
    ("sweep sweep.toml --out old", "old/sweep.toml: is not TOML"),
    ("sweep sweep.toml --out bare", "bare: holds another sweep"),
    ("sweep sweep.toml --only 0", "--only 0: the sweep has the runs 1 to 2"),
    ("sweep sweep.toml --shard 1/0", "--shard 1/0"),
    ("sweep sweep.toml --set training.lr=fast", "lr = 'fast'"),
    ("sweep word.toml", "seeds: 'a' is not a whole number"),
    ("sweep same.toml", "two cells are called"),
    ("sweep single.toml", "'training.lr' = 3: expected a dotted key and a list of values"),
    ("sweep unit.toml", "epsilon = [1]: no protection here has a privacy unit"),
    ("sweep hexagon.toml", "'hexagon': is not known"),
    ("sweep typo.toml", "[trainign] is not a section; did you mean 'training'?"),
    ("sweep attacks.toml", "attacks: 'nonsense' is not known"),
    ("sweep budget.toml", "budget: 'lots' is not known"),
    ("claims nothing", "claims 'nothing': is not known"),
    ("claims signatures_are_safe --scale 2", "--scale 2: is outside (0, 1]"),
    ("claims signatures_are_safe --scale nan", "--scale nan: is outside (0, 1]"),
    ("claims signatures_are_safe --seed -1", "--seed -1: is below 0"),
    ("claims --scale 0.5", "--scale, --seed, --data-dir: are for the runs of a claim"),
    ("claims --page new.md", "runs/claims: has no verdict.json"),
    ("reproduce cfl-label-swap --scale nan", "--scale nan: is outside (0, 1]"),
    ("reproduce cfl-label-swap --cells zzz", "--cells 'zzz'"),
    ("explain .", "'.': is not a key or a section"),
    ("run table.toml --set data.standardise=constants", "feature_mean = (): standardise = 'constants' needs it"),
    ("run table.toml --set data.feature_mean=[1]", "feature_mean = (1.0,): goes with standardise = 'constants'"),
    ("run table.toml --set data.feature_columns=[\"label\"]", "'label' is also the column of label, client or group"),
    ("run table.toml --set data.class_names=[\"x\"]", "'y' is not in data.class_names"),
    ("run table.toml --set data.group_column=zz", "has no column 'zz' (data.group_column)"),
    ("run table.toml --set data.test_share=1", "data.test_share = 1.0: expected a number in (0, 1)"),
    ("run table.toml --set data.value_range=[1,0]", "value_range = (1.0, 0.0)"),
    ("run ok.toml --set data.rotations=[45]", "45 is not a multiple of 90"),
    ("run ok.toml --set training.lr=true", "lr = True"),
    ("run ok.toml --set training.lr=1e400", "training.lr = inf: expected a finite number > 0"),
    ("run ok.toml --set algorithm.name=pacfl --set algorithm.k=100", "k = 100 clusters of 4 clients"),
    ("run ok.toml --set run.audit_parties=[\"nobody\"]", "'nobody' is not a party here"),
    ("run ok.toml --set privacy.unit=client --set privacy.epsilon=nan --set privacy.delta=1e-3", "privacy.epsilon = nan"),
    ("run ok.toml --set privacy.unit=client --set privacy.epsilon=8 --set privacy.delta=2", "privacy.delta = 2.0"),
]  # fmt: skip
CASES = [
    *USAGE,
    *FILE,
    *((line, "a path holds a character NUL") for line in NUL),
    *MORE,
    *((f"run t_{name}.toml", words) for name, (_, words) in TABLES.items()),
    *((f"run ok.toml --set {change}", words) for change, words in KEYS),
    *OPTIONS,
]


@pytest.fixture
def misused_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CFLPRIV_DATA", raising=False)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"" for path in found}


def one_line(err: str) -> str:
    assert err.startswith("cflpriv: "), err
    assert err.endswith("\n"), err
    assert err.count("\n") == 1, err
    return err


def test_there_are_two_hundred() -> None:
    assert len(CASES) >= 200
    assert len({line for line, _ in CASES}) == len(CASES)


@pytest.mark.parametrize(("line", "words"), CASES, ids=lambda found: found.replace("\0", "NUL"))
def test_one_line_and_nothing_written(
    line: str, words: str, misused_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(misused_folder)
    assert in_process(monkeypatch, *line.split(" ")) == 2
    assert words in one_line(capsys.readouterr().err)
    assert everything(misused_folder) == before


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "out of memory"),
        (RuntimeError("Storage size calculation overflowed with sizes=[9223372036854775807, 64]"), "out of memory"),
        (TypeError('empty(): failed to unpack the object with error "Overflow when unpacking long long\nframe #0"'), "out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "data.npz"), "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "data.npz"), "Permission denied"),
    ],
    ids=lambda found: type(found).__name__ if isinstance(found, Exception) else found,
)
def test_what_the_machine_refuses(
    error: Exception, words: str, misused_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("cflpriv.experiments.run.run.build_population", refuse)
    before = everything(misused_folder)
    assert in_process(monkeypatch, "run", "ok.toml") == 1
    assert words in one_line(capsys.readouterr().err)
    assert everything(misused_folder) == before


def test_what_a_finished_run_is_not_asked(
    misused_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (misused_folder / "ok.toml").write_text(OK + '[run]\nrecord = "full"\n', encoding="utf-8")
    assert in_process(monkeypatch, "run", "ok.toml", "--out", "run") == 0
    capsys.readouterr()
    before = everything(misused_folder)
    for line, words, code in (
        ("run ok.toml --out run", "run: the output folder exists", 2),
        ("run ok.toml --out run --resume --set training.lr=0.5", "training.lr is 0.5, but run/config.toml has 0.01", 2),
        ("export run --out x.pt --model 9", "9", 2),
        ("export run --out x.pt --client 99", "99", 2),
        ("export run --out x.pt --model 0 --client 0", "--model", 2),
        ("export run --out x.txt", "x.txt", 2),
        ("export run --out gone/x.pt", "gone/x.pt", 2),
        ("audit run --budget thorugh", "thorugh", 2),
        ("audit run --adversary sever", "sever", 2),
        ("audit run --attacks label_inferense", "label_inferense", 2),
        ("report run --plugin gone.py", "gone.py: no such file", 2),
    ):
        assert in_process(monkeypatch, *line.split()) == code, line
        assert words in one_line(capsys.readouterr().err), line
        assert everything(misused_folder) == before, line
    assert in_process(monkeypatch, "verify", "run", "--digest", "0" * 32) == 1
    assert capsys.readouterr().out.startswith("not verified: run: its digest is ")
    (misused_folder / "run" / "summary.json").write_text("{}", encoding="utf-8")
    assert in_process(monkeypatch, "verify", "run") == 1


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can be longer than a block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("line", "words", "code"),
    [
        ("init my.toml", "my.toml: cannot be written (File too large)", 2),
        ("init --schema my.json", "my.json: cannot be written (File too large)", 2),
        ("examples new", "new: cannot be written (File too large)", 2),
        ("run ok.toml --out deep/run", "File too large (everything completed is saved;", 1),
    ],
)
def test_a_full_disk_leaves_nothing_half_written(
    line: str, words: str, code: int, misused_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(misused_folder)
    with full_disk():
        assert in_process(monkeypatch, *line.split()) == code
    assert words in one_line(capsys.readouterr().err)
    assert everything(misused_folder) == before


def test_examples_in_nested_folders_are_copied_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "package" / "examples" / "app" / "inner" / "client.py"
    deep.parent.mkdir(parents=True)
    deep.write_text("x", encoding="utf-8")
    deep.chmod(0o444)  # as in an installation that is read-only
    monkeypatch.setattr("cflpriv.files.__file__", str(tmp_path / "package" / "files.py"))
    assert copy_examples(tmp_path / "new") == 1
    assert (tmp_path / "new" / "app" / "inner" / "client.py").read_text(encoding="utf-8") == "x"
    assert (tmp_path / "new" / "app" / "inner" / "client.py").stat().st_mode & 0o200


def test_a_name_that_is_too_long(misused_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(misused_folder)
    assert in_process(monkeypatch, "run", "ok.toml", "--out", "n" * 300) == 1
    assert "File name too long" in one_line(capsys.readouterr().err)
    assert everything(misused_folder) == before


def test_a_training_that_diverges_names_client_and_round(
    misused_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert in_process(monkeypatch, "run", "ok.toml", "--set", "training.lr=1e30", "--set", "training.rounds=3") == 1
    line = one_line(capsys.readouterr().err)
    assert "client" in line
    assert "round" in line


@pytest.mark.slow
@pytest.mark.parametrize(("line", "words"), [CASES[0], CASES[4], FILE[5], FILE[7], OPTIONS[3]], ids=lambda found: found)
def test_the_same_as_a_process_of_its_own(line: str, words: str, misused_folder: Path) -> None:
    before = everything(misused_folder)
    done = subprocess.run(
        [sys.executable, "-m", "cflpriv", *line.split()],
        capture_output=True,
        encoding="utf-8",
        check=False,
        cwd=misused_folder,
        timeout=120,
    )
    assert done.returncode == 2
    assert not done.stdout
    assert words in one_line(done.stderr)
    assert everything(misused_folder) == before


@pytest.mark.slow
def test_memory_that_is_really_gone(misused_folder: Path) -> None:
    code = (
        "import resource, sys\nfrom cflpriv.cli import main\nimport cflpriv.experiments.run.run\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, -1))\n"
        "sys.argv = ['cflpriv', 'run', 'ok.toml', '--set', 'model.hidden=100000000', '--out', 'run']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=False, cwd=misused_folder, timeout=120)
    assert done.returncode == 1
    assert one_line(done.stderr).startswith("cflpriv: out of memory; ")
