"""A run folder that was edited is told from one that was not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import in_process

from cflpriv.errors import InputError
from cflpriv.experiments import parse_config, run_experiment
from cflpriv.experiments.digests import FILE, OF_AUDITS, digest_of, record_digests
from cflpriv.experiments.report.report import write_report
from cflpriv.experiments.report.run_files import read_run
from cflpriv.experiments.run.verify import verify

TREE = {
    "data": {"clients": 6, "samples_per_client": 20},
    "model": {"hidden": 4},
    "training": {"rounds": 2},
    "run": {"record": "full"},
}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "run"
    run_experiment(parse_config(TREE), folder)
    return folder


@pytest.fixture
def run_folder(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def rewritten(name: str, change: Callable[[dict], None]) -> Callable[[Path], None]:  # type: ignore[type-arg]
    def edit(folder: Path) -> None:
        tree = json.loads((folder / name).read_text(encoding="utf-8"))
        change(tree)
        (folder / name).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")

    return edit


def appended(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes() + b"\n")

    return edit


EDITS: dict[str, Callable[[Path], None]] = {
    "summary.json": rewritten("summary.json", lambda tree: tree.update(accuracy_mean=0.988)),
    "measured.json": rewritten("measured.json", lambda tree: tree["truth"].update({"0": 7})),
    **{name: appended(name) for name in ("config.toml", "environment.json", "rounds.jsonl", "evidence.npz", "transcript/messages.jsonl")},
}


@pytest.mark.slow
def test_a_folder_as_its_run_left_it_is_verified(run_folder: Path) -> None:
    found = verify(run_folder)
    assert found.problems == ()
    assert len(found.digest) == 32
    assert read_run(run_folder).problems == ()
    assert "Verified:" in write_report(run_folder).read_text(encoding="utf-8")
    assert verify(run_folder) == found  # a report changes nothing that it reads


@pytest.mark.parametrize("name", EDITS)
def test_each_file_that_a_report_reads_is_checked(run_folder: Path, name: str) -> None:
    EDITS[name](run_folder)
    assert any(name in problem and "is not as the run left it" in problem for problem in verify(run_folder).problems)


@pytest.mark.parametrize("name", [name for name in EDITS if name != "config.toml"])
def test_each_file_that_is_missing_is_named(run_folder: Path, name: str) -> None:
    (run_folder / name).unlink()
    assert any(name in problem for problem in verify(run_folder).problems)


@pytest.mark.parametrize("name", ["final.json", "final.safetensors", "final.clients.safetensors"])
def test_a_checkpoint_that_was_changed_is_found(run_folder: Path, name: str) -> None:
    appended(f"checkpoints/{name}")(run_folder)
    (problem,) = verify(run_folder).problems
    assert f"checkpoints/{name}: is not as the run left it" in problem


def test_a_checkpoint_of_another_name_is_found(run_folder: Path) -> None:
    (run_folder / "checkpoints" / "round_0000009.json").write_text("{}", encoding="utf-8")
    (problem,) = verify(run_folder).problems
    assert "checkpoints/round_0000009.json: is not as the run left it" in problem


@pytest.mark.parametrize("name", [".DS_Store", ".nfs0000000000000001"])
def test_hidden_files_of_a_desktop_or_a_file_system_are_no_checkpoints(run_folder: Path, name: str) -> None:
    (run_folder / "checkpoints" / name).write_text("x", encoding="utf-8")
    assert verify(run_folder).problems == ()
    assert f"checkpoints/{name}" not in json.loads((record_digests(run_folder), (run_folder / FILE).read_text(encoding="utf-8"))[1])


def test_a_checkpoint_file_named_like_a_pattern_is_found(run_folder: Path) -> None:
    (run_folder / "checkpoints" / "round_[9].json").write_text("{}", encoding="utf-8")
    (problem,) = verify(run_folder).problems
    assert "checkpoints/round_[9].json: is not as the run left it" in problem


def test_a_folder_handed_on_without_checkpoints_is_verified_but_for_them(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(run_folder).unchecked == ""
    (run_folder / "checkpoints" / "final.clients.safetensors").unlink()
    assert verify(run_folder).problems == ()
    assert verify(run_folder).unchecked == "checkpoints/final.clients.safetensors is missing or cannot be read"
    shutil.rmtree(run_folder / "checkpoints")
    assert in_process(monkeypatch, "verify", str(run_folder)) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert "not checked: " in out
    assert "checkpoints/final.json is missing" in out


def test_checkpoints_of_an_earlier_version_are_named_as_not_checked(run_folder: Path) -> None:
    known = json.loads((run_folder / FILE).read_text(encoding="utf-8"))
    (run_folder / FILE).write_text(
        json.dumps({name: digest for name, digest in known.items() if not name.startswith("checkpoints/")}), encoding="utf-8"
    )
    assert verify(run_folder).problems == ()
    assert "checkpoints/ has no digests" in verify(run_folder).unchecked


@pytest.mark.slow
def test_a_report_says_what_is_not_verified(run_folder: Path) -> None:
    EDITS["summary.json"](run_folder)
    page = write_report(run_folder).read_text(encoding="utf-8")
    assert "Not verified:" in page
    assert "summary.json: accuracy_mean = 0.988, where the run" in page
    assert "Verified:" not in page
    assert page.count("Files were changed, so figures may be false.") == 5  # the summary in a sentence, and four answers
    assert "files changed, figures may be false" in page  # beside the scores of the table
    assert 'class="answer good' not in page


def _one_byte_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [_one_byte_flipped, Path.unlink])
def test_a_report_finds_whatever_damage_to_a_transcript_is_found_elsewhere(run_folder: Path, damage: Callable[[Path], None]) -> None:
    damage(sorted((run_folder / "transcript").glob("payloads_*"))[0])
    (problem,) = verify(run_folder).problems
    assert read_run(run_folder).problems == (problem,)


@pytest.mark.parametrize(
    ("key", "value"), [("accuracy_mean", 0.988), ("accuracy_mean_last_rounds", 1.0), ("ari", -0.5), ("rounds_skipped", 7), ("messages", 1)]
)
def test_an_edited_figure_is_found_also_where_digests_were_written_anew(run_folder: Path, key: str, value: float) -> None:
    before = digest_of(run_folder)
    rewritten("summary.json", lambda tree: tree.update({key: value}))(run_folder)
    record_digests(run_folder)
    assert verify(run_folder).digest != before  # and by whoever noted it
    assert [problem for problem in verify(run_folder).problems if f"{key} = {value!r}, where" in problem]


def test_an_audit_is_sealed_as_well(run_folder: Path) -> None:
    (run_folder / "audit.json").write_text("[]\n", encoding="utf-8")
    assert any("audit.json" in problem for problem in verify(run_folder).problems)
    record_digests(run_folder, OF_AUDITS)
    assert verify(run_folder).problems == ()
    EDITS["config.toml"](run_folder)
    record_digests(run_folder, OF_AUDITS)  # an audit seals what it wrote itself, and nothing else
    assert any("config.toml" in problem for problem in verify(run_folder).problems)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"config.toml": 3}', "null"])
def test_a_damaged_table_of_digests_is_no_crash(run_folder: Path, content: str) -> None:
    (run_folder / FILE).write_text(content, encoding="utf-8")
    assert verify(run_folder).problems
    assert read_run(run_folder).problems


@pytest.mark.parametrize(("name", "content"), [("summary.json", "[]"), ("summary.json", "null"), ("rounds.jsonl", "[" * 200_000)])
@pytest.mark.parametrize("measured", [True, False])
def test_files_of_another_shape_are_no_crash(run_folder: Path, name: str, content: str, measured: bool) -> None:
    (run_folder / name).write_text(content, encoding="utf-8")
    if not measured:
        (run_folder / "measured.json").unlink()
    assert verify(run_folder).problems


@pytest.mark.parametrize("left", ["nothing", "those of an earlier summary"])
def test_a_run_that_was_killed_before_its_digests_is_finished_by_resume(run_folder: Path, left: str) -> None:
    if left == "nothing":
        (run_folder / FILE).unlink()
    else:
        rewritten(FILE, lambda tree: tree.update({"summary.json": "0" * 32}))(run_folder)
    before = json.loads((run_folder / "summary.json").read_text(encoding="utf-8"))
    run_experiment(parse_config(TREE), run_folder, resume=True)
    assert verify(run_folder).problems == ()
    assert json.loads((run_folder / "summary.json").read_text(encoding="utf-8"))["accuracy_mean"] == before["accuracy_mean"]


def test_an_active_audit_alone_is_no_run_and_no_contradiction(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(parse_config(TREE).to_toml(), encoding="utf-8")
    (tmp_path / "active_audit.json").write_text("[]\n", encoding="utf-8")
    record_digests(tmp_path)
    assert verify(tmp_path).problems == ()


def test_older_and_unfinished_folders_are_not_verified(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / FILE).unlink()
    assert any("digests.json: is missing" in problem for problem in verify(run_folder).problems)
    with pytest.raises(InputError, match="is not a run folder"):
        verify(tmp_path)


def test_the_command(run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(monkeypatch, "verify", str(run_folder), "--digest", digest_of(run_folder)) == 0
    assert f"verified: {run_folder}, digest {digest_of(run_folder)}" in capsys.readouterr().out
    assert in_process(monkeypatch, "verify", str(run_folder), "--digest", "0" * 32) == 1
    EDITS["summary.json"](run_folder)
    assert in_process(monkeypatch, "verify", str(run_folder)) == 1
    assert "not verified: " in capsys.readouterr().out
    assert in_process(monkeypatch, "verify", str(run_folder / "no")) == 2
