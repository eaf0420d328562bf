"""README.md and the pages under docs/: their code runs, their commands are understood, and what is shown of output is what is printed.

An output to keep true stands between two comments; `| tail N` shows the last N lines alone. `make shown` writes it anew:

    <!-- output: gradguard run examples/centered_features.py -->
    ```text
    ...
    ```
    <!-- /output -->

What a page's Python needs and does not show stands in a comment, `<!-- setup` ... `-->`.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
import yaml

from gradguard.cli.main import app
from gradguard.config.settings import load_settings
from gradguard.rules.registry import all_rules
from tests import shown
from tests.cases.zygote import run_apart

ROOT = shown.ROOT
SAME_WORDS = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="PyTorch's own words are those of 2.13")
WITHOUT_PROGRAM = {
    "GG705": "fails where a rank waits in vain, which takes a time limit of minutes",
    "GG709": "says how long a rank was waited for, which differs from run to run",
    "GG743": "does no harm in one process; in several the ranks' logs mix",
    "GG801": "needs a machine whose memory is full",
    "GG802": "needs a machine whose memory is full",
    "GG804": "needs a machine whose memory is full",
    "GG805": "needs a machine whose memory is full",
    "GG806": "needs a machine whose memory is full",
}
NEEDS = {"lightning", "transformers", "accelerate"}


class Block(NamedTuple):
    """A fenced block of a page, or a setup that is not shown."""

    page: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^<!-- (setup)\n(.*?)^-->$|^```(\w*)[^\n]*\n(.*?)^```$", text, re.M | re.S)
    name = str(page.relative_to(ROOT))
    return [Block(name, each[1] or each[3], each[2] if each[1] else each[4]) for each in found]


ALL = {page: blocks(page) for page in shown.pages()}


def of_language(*languages: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{block.page}-{number}")
        for found in ALL.values()
        for number, block in enumerate(found)
        if block.language in languages
    ]


# -- output ---------------------------------------------------------------------------------------------------------------------------


@SAME_WORDS
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{page.name}-{block['command']}")
        for page in shown.pages()
        for block in shown.BLOCK.finditer(page.read_text(encoding="utf-8"))
    ],
)
def test_shown_output_is_real(block: re.Match[str]) -> None:
    assert block["shown"] == shown.printed(block["command"], block["tail"]), "run: make shown"


def test_a_diagnosis_is_what_the_readme_shows_first() -> None:
    shows = [block["shown"] for block in shown.BLOCK.finditer((ROOT / "README.md").read_text(encoding="utf-8"))]
    assert shows[0].startswith("RuntimeError: ") and "[GG101]" in shows[1]


def test_every_text_is_output_or_a_drawing() -> None:
    for page, found in ALL.items():
        outputs = {block["shown"] for block in shown.BLOCK.finditer(page.read_text(encoding="utf-8"))}
        assert [block.text for block in found if block.language == "text" and block.text not in outputs and "──▶" not in block.text] == []
        assert {block.language for block in found} <= {"setup", "python", "sh", "yaml", "toml", "text"}, page


# -- rules ----------------------------------------------------------------------------------------------------------------------------


def test_every_rule_has_a_program() -> None:
    have = {path.stem.upper() for path in shown.PROGRAMS.glob("gg???.py")}
    assert have.isdisjoint(WITHOUT_PROGRAM)
    assert {rule.code for rule in all_rules()} == have | WITHOUT_PROGRAM.keys()


@pytest.mark.parametrize("program", sorted(path.stem for path in shown.PROGRAMS.glob("gg???.py")))
def test_program_of_a_rule(program: str) -> None:
    failing, repaired = shown.PROGRAMS / f"{program}.py", shown.PROGRAMS / f"{program}_fixed.py"
    for name in NEEDS:
        if re.search(rf"^(?:import|from) {name}\b", failing.read_text(), re.M):
            pytest.importorskip(name)
    status, text, said = shown.said_of(failing)
    assert {each["code"] for each in said} == {program.upper()}, text
    if torch.__version__.startswith("2.13."):
        shows = failing.with_suffix(".txt").read_text(encoding="utf-8")
        assert shown.plain(shows) == shown.plain(text), f"run: python -m tests.shown {program.upper()}"
    status, text, said = shown.run_guarded(repaired, level="strict", ranks=shown.has_ranks(repaired))
    assert (status, said) == (0, []), text


# -- code -----------------------------------------------------------------------------------------------------------------------------


def run_page(source: str) -> None:
    """A page's Python as one program, in a process of its own; tests among it are run as tests."""
    import warnings

    warnings.simplefilter("ignore")
    path = Path("test_page.py").absolute()
    path.write_text(source)
    exec(compile(source, str(path), "exec"), {"__name__": "page"})
    if "def test_" in source:
        sys.exit(int(pytest.main(["-q", "-p", "no:cacheprovider", path.name])))


CONTRIBUTING = ROOT / "CONTRIBUTING.md"  # its code is a rule and its tests, see the last test
WITH_PYTHON = [page for page, found in ALL.items() if page != CONTRIBUTING and any(block.language == "python" for block in found)]


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in WITH_PYTHON])
def test_python_runs(page: Path, tmp_path: Path) -> None:
    source = "\n".join(block.text for block in ALL[page] if block.language in ("setup", "python"))
    for name in NEEDS:
        if re.search(rf"^(?:import|from) {name}\b", source, re.M):
            pytest.importorskip(name)
    output = tmp_path / "printed.txt"
    status = run_apart(run_page, (source,), tmp_path, 120, output)
    text = output.read_text(errors="replace")
    assert status == 0, text
    assert "[GG" not in text  # of what a page recommends nothing is said


# -- commands -------------------------------------------------------------------------------------------------------------------------


def understood(words: list[str]) -> None:
    """The real parser takes the words; nothing is run."""
    command: Any = typer.main.get_command(app)
    name = "gradguard"
    while True:
        with command.make_context(name, list(words)) as context:
            rest = [*context._protected_args, *context.args] if hasattr(context, "_protected_args") else context.args
        if not hasattr(command, "commands"):
            return
        name, command, words = command.resolve_command(context, rest)


@pytest.mark.parametrize("block", of_language("sh"))
def test_commands_are_understood(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"[\w./-]+\.(?:jsonl|yaml)", block.text):
        Path(name).touch()
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        for name in (word for word in words if word.startswith("examples/")):
            assert (ROOT / name).exists(), line
        if words[:1] == ["torchrun"]:
            assert words[3:6] == ["-m", "gradguard", "run"], line
            words = words[4:]
        if not words or words[0] == ".ci/run" or words[:3] == ["pip", "install", "."]:
            continue
        if words[0] == "make":
            assert re.search(rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.M), line
        elif words[0] == "pytest":
            assert [word for word in words[1:] if not re.fullmatch(r"--gradguard=(?:watch|standard|strict|forensic)", word)] == [], line
        else:
            assert words[0] == "gradguard", line
            understood(words[1:])


@pytest.mark.parametrize("block", of_language("yaml", "toml"))
def test_settings_are_understood(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"settings.{block.language}"
    path.write_text(block.text)
    if block.text.startswith("# LightningCLI"):
        pytest.importorskip("lightning")
        for callback in yaml.safe_load(block.text)["trainer"]["callbacks"]:
            module, _, name = callback["class_path"].rpartition(".")
            getattr(import_module(module), name)(**callback["init_args"])
    else:
        assert block.language == "toml" or block.text.startswith("# gradguard.yaml\n")
        load_settings(config=path)


def test_named_files_and_targets_exist() -> None:
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = re.findall(r"\]\(([\w./-]+?)(?:#[\w-]+)?\)", text) + re.findall(r"\bexamples/\w+\.py\b", text)
        assert [each for each in named if not (ROOT / each).exists()] == [], name


def add_rule(rule: str, test: str) -> None:
    """The worked example of CONTRIBUTING.md, in a process of its own: the rule stands in a folder beside its family's."""
    import gradguard.rules.contract

    (folder := Path("contract")).mkdir()
    (folder / "gg419_layer_width.py").write_text(rule)
    Path("test_layer_width.py").write_text(test)
    gradguard.rules.contract.__path__.append(str(folder.absolute()))
    from gradguard.rules import registry

    registry.all_rules.cache_clear()
    registry.rules_for.cache_clear()
    assert registry.get_rule("GG419").docs.startswith("# GG419 layer-width")
    sys.exit(int(pytest.main(["-q", "-p", "no:cacheprovider", "test_layer_width.py"])))


def test_the_rule_of_contributing_works(tmp_path: Path) -> None:
    rule, test = (block.text for block in ALL[CONTRIBUTING] if block.language == "python")
    output = tmp_path / "printed.txt"
    assert run_apart(add_rule, (rule, test), tmp_path, 120, output) == 0, output.read_text()
    assert "3 passed" in output.read_text()
