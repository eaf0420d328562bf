"""`gradguard explain` and `gradguard rules`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_programs import environment

from gradguard.cli.main import main
from gradguard.cli.rule_pages import as_markdown
from gradguard.rules.registry import all_rules, families, get_rule

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


def test_explain_by_code_and_by_name(capsys: Captured) -> None:
    assert call("explain", "GG101") == 0
    by_code = capsys.readouterr().out
    assert call("explain", "inplace-modified-saved-tensor") == 0
    assert capsys.readouterr().out == by_code
    for words in ("GG101 inplace-modified-saved-tensor", "What it is", "Why it is wrong", "Use instead", "Fix safety"):
        assert words in by_code


def test_explain_lower_case_and_family(capsys: Captured) -> None:
    assert call("explain", "gg101") == 0
    assert "GG101" in capsys.readouterr().out
    assert call("explain", "GG1") == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) > 1 and all(line.startswith("GG1") for line in listed)


def test_unknown_rule_names_the_nearest(capsys: Captured) -> None:
    assert call("explain", "inplace-modified-saved-tensr") == 2
    told = capsys.readouterr()
    assert "inplace-modified-saved-tensor" in told.err and told.out == ""
    assert call("explain", "GG199") == 2
    assert call("rules", "--family", "GG9") == 2


def test_rules_in_each_format(capsys: Captured) -> None:
    assert call("rules") == 0
    assert len(capsys.readouterr().out.splitlines()) == len(all_rules())
    assert call("rules", "--family", "GG1", "--format", "json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {rule["family"] for rule in listed} == {"GG1"}
    assert get_rule("GG101").docs in [rule["docs"] for rule in listed]
    assert call("rules", "--format", "markdown") == 0
    printed = capsys.readouterr().out
    assert all(f"### {rule.code} {rule.name}" in printed for rule in all_rules())
    assert all(f"## {family}xx" in printed for family in families())


def test_rules_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert page == as_markdown(all_rules()) + "\n", "run: make docs/rules.md"


def test_version_and_demo() -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gradguard", *arguments], capture_output=True, text=True, env=environment(), timeout=300
        )

    assert command("--version").stdout.startswith("gradguard ")
    shown = command("demo")
    assert shown.returncode == 0
    assert "GG101" in shown.stdout and "step 200: loss" in shown.stdout


def test_importing_the_package_leaves_the_command_line_out() -> None:
    program = "import sys, gradguard; print([m for m in ('typer', 'click', 'libcst', 'jinja2', 'numpy.testing') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=300)
    assert done.stdout == "[]\n"
