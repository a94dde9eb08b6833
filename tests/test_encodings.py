"""Files are read and written as UTF-8 whatever the locale, and programs print in whatever encoding the terminal takes."""

import ast
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from checkout import ROOT
from command_line import in_process

from cflpriv import cli, load_config
from cflpriv.errors import InputError
from cflpriv.streams import encode_readably

FOLDERS = ("cflpriv", "protocols", "attacks", "benchmarks", "examples", "tests")


def scripts(*folders: str) -> list[Path]:
    """The Python files of these folders; the links in cflpriv/ to other folders are not followed."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path.resolve().is_relative_to(ROOT / folder)]


CANDIDATE = re.compile(r"^(?!.*encoding).*\b((read_text|write_text|open|fdopen)\(|text=|universal_newlines=)", re.MULTILINE)
"""A line of a file that is worth parsing."""


def calls(text: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


def leaves_the_encoding_open(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the encoding of the machine's locale, because it names none.

    A bare `x.open()` is not judged: things other than paths have such a method, too.
    """
    of, options = call.func, {one.arg: one.value for one in call.keywords}
    name = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
    module = of.value.id if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) else ""
    if "encoding" in options or None in options:  # None: `**options`
        return False
    match name:
        case "read_text" | "write_text":
            return len(call.args) <= (name == "write_text")
        case "run" | "Popen" | "check_output" | "check_call":
            return bool({"text", "universal_newlines"} & set(options))
        case "open" | "fdopen":
            place = 1 if isinstance(of, ast.Name) or module in ("os", "gzip", "bz2", "lzma", "io") else 0
            mode = options.get("mode", call.args[place] if len(call.args) > place else None)
            if mode is None:
                return isinstance(of, ast.Name) or name == "fdopen" or bool({"newline", "errors", "buffering"} & set(options))
            return isinstance(mode, ast.Constant) and set(str(mode.value)) <= set("rwxat+")
    return False


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("path.read_text()", True), ("path.read_text('utf-8')", False), ("path.write_text(words)", True), ("open(path)", True),
        ("path.write_text(words, encoding='utf-8')", False), ("open(path, 'rb')", False), ("path.open('a')", True), ("store.open()", False),
        ("path.open(newline='')", True), ("os.fdopen(number, 'w')", True), ("os.open(path, os.O_RDONLY)", False),
        ("subprocess.run(words, text=True)", True), ("subprocess.Popen(words, text=True, encoding='utf-8')", False),
        ("subprocess.run(words, capture_output=True)", False), ("subprocess.run(words, **options)", False),
    ],
)  # fmt: skip
def test_the_reader_of_calls_sees_which_name_no_encoding(text: str, is_open: bool) -> None:
    assert [leaves_the_encoding_open(call) for call in calls(text)] == [is_open]


def test_every_file_is_read_and_written_in_a_named_encoding() -> None:
    paths = scripts(*FOLDERS)
    assert len(paths) > 400
    texts = {path: text for path in paths if CANDIDATE.search(text := path.read_text(encoding="utf-8"))}
    found = [f"{path}:{call.lineno}" for path, text in texts.items() for call in calls(text) if leaves_the_encoding_open(call)]
    assert not found


# --- what is printed ------------------------------------------------------------------------------------------------------------------

ENCODINGS = ("ascii", "latin-1", "cp1252", "cp437")
SMALL = '[training]\nrounds = 1\n[data]\nclients = 4\n[run]\nrecord = "full"\n'
NOT_UTF8 = os.fsdecode(b"data\xe9")
NAME = os.fsdecode("–λ".encode())
"""A file's name in UTF-8, as the command line is given it."""


class Terminal:
    """Standard output and standard error in one encoding, where what is not in it is an error unless the program sees to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
        self.monkeypatch, self.encoding = monkeypatch, encoding

    def run(self, *words: str, code: int = 0) -> str:
        """Run `cflpriv` with these words; what it prints on both streams. Fails for another exit code, and for a traceback."""
        buffers = {"stdout": io.BytesIO(), "stderr": io.BytesIO()}
        streams = {name: io.TextIOWrapper(buffers[name], self.encoding, "strict") for name in buffers}
        for name, stream in streams.items():
            self.monkeypatch.setattr(sys, name, stream)
        ended = in_process(self.monkeypatch, *words)
        for stream in streams.values():
            stream.flush()
        said = "".join(buffers[name].getvalue().decode(stream.encoding) for name, stream in streams.items())
        assert ended == code, said
        assert said
        return said


@pytest.fixture(params=["ascii", "cp1252", *(pytest.param(name, marks=pytest.mark.slow) for name in ("latin-1", "cp437"))])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Terminal:
    monkeypatch.chdir(tmp_path)
    return Terminal(monkeypatch, request.param)


NOT_PRINTED = re.compile(r'"""(?s:.*?)"""|(?:^|  )#.*', re.MULTILINE)
"""Docstrings and comments."""


def test_every_character_that_is_printed_reads_well_in_ascii() -> None:
    paths = [path for path in scripts("cflpriv", "protocols", "attacks", "examples") if path.name not in ("streams.py", "text.py")]
    found = set("".join(NOT_PRINTED.sub("", path.read_text(encoding="utf-8")) for path in paths)) - set(map(chr, range(128)))
    assert {"–", "ε", "×"} < found
    assert not {character for character in found if b"\\" in encode_readably(character, "ascii")}


def test_what_an_encoding_lacks_is_written_in_ascii() -> None:
    assert encode_readably("10 × 2 – ε, λ, Σ²", "ascii") == b"10 x 2 - epsilon, lambda, Sigma2"
    assert encode_readably("10 × 2 – ε", "cp1252") == b"10 \xd7 2 \x96 epsilon"
    assert encode_readably("10 × 2 – ε", "cp437") == b"10 x 2 - \xee"
    assert encode_readably(f"{NOT_UTF8} – ε") == b"data\\xe9 \xe2\x80\x93 \xce\xb5"
    assert encode_readably("é中", "ascii") == b"\\xe9\\u4e2d"


def test_commands_print_in_every_encoding(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.toml").write_text(SMALL, encoding="utf-8")
    assert "8×8" in terminal.run("list").replace("8x8", "8×8")
    terminal.run("--help")
    for name in typer.main.get_command(cli.app).commands:  # type: ignore[attr-defined]
        terminal.run(name, "--help")
    for words in (["explain", "privacy"], ["explain", "training"], ["claims"], ["--version"], ["init", f"new{NAME}.toml"]):
        terminal.run(*words)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich shows progress bars
    terminal.run("run", f"{NAME}.toml", "--out", NAME)
    monkeypatch.delenv("FORCE_COLOR")
    for words in (["verify", NAME], ["report", NAME], ["export", NAME, "--out", f"{NAME}.pt", "--model", "0"]):
        terminal.run(*words)
    for words in (
        ["explain", NAME],
        [NAME],
        ["run", f"no{NAME}.toml"],
        ["run", f"{NAME}.toml", "--set", f"{NAME}=2"],
        ["report", f"no{NAME}"],
        ["init", "--algorithm", NAME],
    ):
        assert terminal.run(*words, code=2).startswith("cflpriv: ")


@pytest.mark.slow
def test_long_commands_print_in_every_encoding(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.toml").write_text(SMALL, encoding="utf-8")
    (tmp_path / "sweep.toml").write_text(SMALL + '[sweep]\nalgorithms = ["fedavg", "pacfl"]\n', encoding="utf-8")
    terminal.run("run", f"{NAME}.toml", "--out", NAME)
    terminal.run("audit", NAME, "--budget", "quick")
    terminal.run("audit", f"{NAME}.toml", "--active", "--out", f"active{NAME}")
    terminal.run("report", NAME)
    for words in ([], ["--list"], ["--merge"]):
        terminal.run("sweep", "sweep.toml", "--out", f"sweep{NAME}", *words)
    terminal.run("reproduce", "pacfl-gaussians", "--scale", "0.1")
    terminal.run("claims", "gdp_accountant_is_a_bound", "--scale", "0.1")
    terminal.run("claims", "--page", f"{NAME}.md")
    terminal.run("examples", f"examples{NAME}")


def test_printed_files_are_utf8(terminal: Terminal, tmp_path: Path) -> None:
    """`cflpriv init > FILE` gives a file that `cflpriv run` reads, whatever the terminal takes."""
    (tmp_path / "printed.toml").write_bytes(terminal.run("init", "--algorithm", "fedsoft").encode())
    terminal.run("init", "asked.toml", "--algorithm", "fedsoft")
    assert "σ" in (tmp_path / "asked.toml").read_text(encoding="utf-8")
    assert (tmp_path / "printed.toml").read_bytes() == (tmp_path / "asked.toml").read_bytes()


# --- examples and benchmarks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in scripts("examples") if path.name != "check_ledger.py"], ids=lambda path: path.name)
def test_an_example_prints_in_every_encoding(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if "print(" in text.partition('if __name__ == "__main__":')[0] and "__main__" in text and "cflpriv" in text:
        assert 'if __name__ == "__main__":\n    printable_streams()\n' in text


# --- files from other editors, and names that are not UTF-8 ----------------------------------------------------------------------------


def test_a_byte_order_mark_is_no_part_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert load_config(path).data.clients == 4
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes()), "ascii"))
    assert load_config("-") == load_config(path)


def test_another_encoding_of_a_configuration_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "notepad.toml"
    for encoding in ("utf-16", "latin-1"):
        path.write_bytes(f"# é\n{SMALL}".encode(encoding))
        with pytest.raises(InputError, match=r"notepad\.toml: cannot be read \('utf-8' codec"):
            load_config(path)


def test_names_that_are_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, reports and messages take such names; a configuration, which is UTF-8, cannot hold one, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    terminal, folder = Terminal(monkeypatch, "utf-8"), tmp_path / NOT_UTF8
    folder.mkdir()
    (tmp_path / "small.toml").write_text(SMALL, encoding="utf-8")
    (folder / "plugin.py").write_text("", encoding="utf-8")
    run = f"{NOT_UTF8}/run"
    assert r"run folder: data\xe9/run" in terminal.run("run", "small.toml", "--out", run)
    for words in (["verify", run], ["report", run], ["report", NOT_UTF8], ["export", run, "--out", f"{NOT_UTF8}.pt", "--model", "0"]):
        assert r"data\xe9" in terminal.run(*words)
    assert r"data\xe9" in (folder / "report.html").read_text(encoding="utf-8")
    said = terminal.run("run", "small.toml", "--out", "other", "--plugin", f"{NOT_UTF8}/plugin.py", code=2)
    assert said.lstrip("\n").startswith("cflpriv: small.toml: run.plugins = ")  # an old rich ends its progress with an empty line
    assert said.endswith("is not UTF-8, as a configuration is; rename the file or its folder\n")
    assert not (tmp_path / "other").exists()


# --- processes of their own -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}, {"PYTHONIOENCODING": "cp1252"}],
    ids=["C", "cp1252"],
)
def test_a_process_prints_in_a_terminal_encoding(environment: dict[str, str]) -> None:
    """Without torch, which takes seconds to import."""
    code = r"from cflpriv.streams import printable_streams; printable_streams(); print('\u2013 \u03b5'); raise SystemExit('\u2013 \u03bb')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, **environment}, cwd=ROOT)
    dash = b"\x96" if environment["PYTHONIOENCODING"] else b"-"
    assert (done.stdout, done.stderr) == (dash + b" epsilon\n", dash + b" lambda\n")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("utf8", ["0", "1"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_commands_in_processes_of_their_own(encoding: str, utf8: str, locale: str, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL, encoding="utf-8")
    changes = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": utf8, "LC_ALL": locale, "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    for words in (["cflpriv", "list"], ["cflpriv", "run", "small.toml"], ["benchmarks", "gpu", "--help"]):
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, env={**os.environ, **changes}, cwd=tmp_path)
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
        done.stdout.decode(encoding)


def test_reports_of_folders_whose_names_are_not_utf8(terminal: Terminal, tmp_path: Path) -> None:
    """A name stands on the page, in tables and in pictures, whose library takes no bytes."""
    (tmp_path / "a.toml").write_text(SMALL.replace("full", "headers"), encoding="utf-8")
    folder = tmp_path / NOT_UTF8
    folder.mkdir()
    for number in range(2):
        terminal.run("run", "a.toml", "--out", f"{folder}/{NOT_UTF8}{number}")
    assert "report.html" in terminal.run("report", str(folder))
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert r"data\xe90" in page
    assert r"data\xe91" in (folder / "results.csv").read_text(encoding="utf-8")


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    assert load_config(tmp_path / "a.toml").data.clients == 4
