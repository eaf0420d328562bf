"""Settings files that are found, not named: whose are obeyed, how far the search goes, what they may not do."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradguard.config import files
from gradguard.config.settings import load_settings
from gradguard.core.errors import ConfigError


def found_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    return load_settings().level


def test_the_search_ends_at_the_top_of_the_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "gradguard.yaml").write_text("level: strict\n")
    inner = project / "repo" / "package" / "deep"
    assert found_from(inner, monkeypatch) == "standard"  # no project: the working directory alone
    assert found_from(project, monkeypatch) == "strict"
    (project / "repo" / "setup.cfg").touch()
    assert found_from(inner, monkeypatch) == "standard"
    (project / "repo" / "gradguard.yaml").write_text("level: watch\n")
    assert found_from(inner, monkeypatch) == "watch"
    (project / "setup.cfg").touch()  # the outermost project file counts, as of a package within a project ...
    (project / "repo" / "gradguard.yaml").unlink()
    assert found_from(inner, monkeypatch) == "strict"
    (project / "repo" / ".git").touch()  # ... but nothing outside of a checkout
    assert found_from(inner, monkeypatch) == "standard"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners are not told apart")
@pytest.mark.parametrize("name", ["gradguard.yaml", "pyproject.toml"])
@pytest.mark.parametrize("through_link", [False, True])
def test_files_of_other_users_are_not_obeyed_and_said_once(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, through_link: bool
) -> None:
    text = "level: strict\n" if name.endswith("yaml") else '[tool.gradguard]\nlevel = "strict"\n'
    file = project / name
    other = project / "target"
    (other if through_link else file).write_text(text)
    if through_link:
        file.symlink_to(other)
    assert load_settings().level == "strict"
    foreign = other if through_link else file
    plain = Path.stat
    owner = os.geteuid() + 1
    monkeypatch.setattr(
        Path, "stat", lambda path, **how: SimpleNamespace(st_uid=owner, st_mode=0o100644) if path in (file, foreign) else plain(path, **how)
    )
    assert load_settings().level == "standard"
    assert load_settings().level == "standard"
    assert caplog.text.count("belongs to another user") == 1 and str(file) in caplog.text
    assert load_settings(config=file).level == "strict"  # named, it is obeyed


def test_a_found_file_reports_into_its_project_only(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = project / "repo"
    (repo / "deep").mkdir(parents=True)
    (repo / ".git").touch()
    monkeypatch.chdir(repo / "deep")
    (repo / "link").symlink_to(project)
    config = repo / "gradguard.yaml"
    for path in (project / "out.jsonl", "../../out.jsonl", "../link/out.jsonl"):
        config.write_text(f"level: watch\nreport: {path}\n")
        with pytest.raises(ConfigError, match=r"gradguard\.yaml:2:9: a file that was found can only report into its project"):
            load_settings()
        assert load_settings is not None and str(load_settings_named(config).report) == str(path)
    config.write_text("report: ../logs/out.jsonl\n")
    assert str(load_settings().report) == "../logs/out.jsonl"


def load_settings_named(config: Path):
    held = config.rename(config.with_name("named.yaml"))
    try:
        return load_settings(config=held)
    finally:
        held.rename(config)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("alias.yaml", BOMB + "level: *h\n", r"alias\.yaml:5:\d+: amounts to more than 10000"),
        ("merge.yaml", BOMB + "rules:\n  <<: *h\n", r"merge\.yaml:5:\d+: amounts to more than 10000"),
        ("deep.yaml", "level: " + "[" * 3000 + "]" * 3000 + "\n", r"deep\.yaml:1:\d+: is nested more than 20 deep"),
        ("blocks.yaml", "\n".join(" " * depth + "a:" for depth in range(200)), r"blocks\.yaml:21:\d+: is nested more than 20 deep"),
        ("self.yaml", "rules: &r\n  GG6: *r\n", r"self\.yaml:2:8: `\*r` stands inside"),
        ("deep.toml", "level = " + "[" * 3000 + "]" * 3000 + "\n", r"deep\.toml: is nested too deeply"),
        ("large.yaml", "#" * (1 << 20) + "\nlevel: strict\n", r"large\.yaml: is larger than a megabyte"),
        ("long.yaml", f"level: {'x' * 100_000}\n", r"long\.yaml:1:8: `level` cannot be"),
        ("wide.yaml", f"level: [{'x, ' * 9000}]\n", r"wide\.yaml:1:8: `level` cannot be"),
        ("digits.yaml", f"journal: {{ops: [0x{'f' * 9000}]}}\n", r"digits\.yaml:1:16: `journal\.ops` cannot be"),
    ],
)
def test_hostile_text_is_refused_in_few_words(project: Path, name: str, text: str, message: str) -> None:
    (project / name).write_text(text)
    began = time.perf_counter()
    with pytest.raises(ConfigError, match=message) as refused:
        load_settings(config=project / name)
    assert time.perf_counter() - began < 5
    assert len(str(refused.value).splitlines()[0]) < 400


def test_problems_show_no_control_characters(project: Path) -> None:
    (project / "bad.yaml").write_text("level: '\u202e\u200bevil'\n\"\\e[31m\u2067x\": 1\n")
    with pytest.raises(ConfigError) as refused:
        load_settings(config=project / "bad.yaml")
    assert "\\u202e" in str(refused.value)
    assert not set(str(refused.value)) & set("\x1b\u202e\u2067\u200b")
    files._told_foreign.clear()
