"""`gradguard config` on real files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gradguard.cli.config_command import app, starter
from gradguard.config.files import preset
from gradguard.config.settings import load_settings

runner = CliRunner()


def test_show_tells_each_value_and_its_source(project: Path) -> None:
    (project / "gradguard.yaml").write_text("level: strict\nrules:\n  GG6: log\n  GG601: {window: 5}\n")
    done = runner.invoke(app, ["show"])
    assert done.exit_code == 0
    rows = [line.split(None, 2) for line in done.output.splitlines()]
    assert rows[0] == ["level", "strict", "gradguard.yaml:1"]
    assert ["trace.mode", "always", "preset strict"] in rows
    assert ["rules.GG6.action", "log", "gradguard.yaml:3"] in rows
    assert ["rules.GG601.window", "5", "gradguard.yaml:4"] in rows
    assert ["report", "none", "preset strict"] in rows


def test_show_as_json_and_as_yaml(project: Path) -> None:
    (project / "debug.yaml").write_text("rules:\n  GG6: off\nreport: x.jsonl\n")
    done = runner.invoke(app, ["show", "--config", "debug.yaml", "--level", "watch", "--format", "json"])
    shown = json.loads(done.output)
    assert shown["level"] == {"value": "watch", "source": "argument level"}
    assert shown["rules.GG6.action"] == {"value": "off", "source": "debug.yaml:2"}
    done = runner.invoke(app, ["show", "--config", "debug.yaml", "--level", "watch", "--format", "yaml"])
    assert "  mode: never  # preset watch\n" in done.output
    (project / "again.yaml").write_text(done.output)
    settings = load_settings(config="again.yaml")
    assert settings.model_dump() == load_settings("watch", config="debug.yaml").model_dump()


def test_show_fails_with_the_problem(project: Path) -> None:
    done = runner.invoke(app, ["show", "--level", "strct"])
    assert done.exit_code == 1
    assert "did you mean `strict`?" in done.stderr


def test_check_lists_the_problems_of_every_file(project: Path) -> None:
    (project / "good.yaml").write_text("level: strict\n")
    (project / "bad.yaml").write_text("levle: strict\nrules: {GG699: off}\n")
    (project / "pyproject.toml").write_text("[tool.gradguard]\nsummary = 'perhaps'\n")
    done = runner.invoke(app, ["check", "good.yaml", "bad.yaml", "pyproject.toml", "gone.yaml"])
    assert done.exit_code == 1
    assert done.stdout == "good.yaml: right\n"
    for head in ("4 problems", "bad.yaml:1:1:", "bad.yaml:2:9:", "pyproject.toml:2:11:", "gone.yaml: does not exist"):
        assert head in done.stderr
    assert runner.invoke(app, ["check", "good.yaml"]).exit_code == 0


def test_check_without_files_checks_what_is_in_force(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.invoke(app, ["check"]).exit_code == 0
    monkeypatch.setenv("GRADGUARD_LEVEL", "loud")
    done = runner.invoke(app, ["check"])
    assert done.exit_code == 1 and "GRADGUARD_LEVEL" in done.stderr


def test_init_writes_a_file_that_says_only_the_level(project: Path) -> None:
    done = runner.invoke(app, ["init", "--level", "strict"])
    assert (done.exit_code, done.output) == (0, "wrote gradguard.yaml\n")
    text = (project / "gradguard.yaml").read_text()
    assert yaml.safe_load(text) == {"level": "strict"}
    assert runner.invoke(app, ["check"]).exit_code == 0


def test_init_does_not_overwrite(project: Path) -> None:
    (project / "my.yaml").write_text("summary: true\n")
    done = runner.invoke(app, ["init", "my.yaml"])
    assert done.exit_code == 1 and "--force" in done.stderr
    assert (project / "my.yaml").read_text() == "summary: true\n"
    assert runner.invoke(app, ["init", "my.yaml", "--force"]).exit_code == 0
    assert "level: standard" in (project / "my.yaml").read_text()
    done = runner.invoke(app, ["init", "no/such/folder.yaml"])
    assert done.exit_code == 1 and "cannot be written" in done.stderr
    assert runner.invoke(app, ["init", "--level", "loud"]).exit_code == 2


@pytest.mark.parametrize("level", ["watch", "standard", "strict", "forensic"])
def test_what_the_starting_file_shows_is_what_the_level_means(level: str, project: Path) -> None:
    text = re.sub(r"^#(?=(?:  )?\w)", "", starter(level), flags=re.MULTILINE)
    (project / "full.yaml").write_text(text)
    assert yaml.safe_load((project / "full.yaml").read_text()).keys() == preset(level).keys()
    assert load_settings(config="full.yaml").model_dump() == load_settings(level).model_dump()


def test_the_schema_knows_every_setting_and_every_rule(project: Path) -> None:
    schema = json.loads(runner.invoke(app, ["schema"]).output)
    assert schema["properties"]["level"]["enum"] == ["off", "watch", "standard", "strict", "forensic"]
    assert schema["additionalProperties"] is False
    rules = schema["properties"]["rules"]["properties"]
    assert {"GG6", "GG9", "GG601", "stale-gradients", "GG901", "lonely-rule"} <= set(rules)
    option = rules["GG601"]["anyOf"][1]["properties"]["window"]
    assert (option["type"], option["minimum"], option["description"]) == ("integer", 1, "steps looked back")
    assert rules["GG601"]["description"] == "summary of stale-gradients"
    assert set(schema["$defs"]) == {"Trace", "Actions", "Journal", "Ranks"}
