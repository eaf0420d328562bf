"""What mkdocs adds to the pages of this folder: a page a rule, CONTRIBUTING.md and CHANGELOG.md, and programs where a page names one.

A rule's page is its docstring, in which the place of the example is taken by `programs/ggNNN.py`, what gradguard says of it
(`ggNNN.txt`, which a test compares) and `ggNNN_fixed.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from gradguard.cli.rule_pages import FAMILIES, cell, page
from gradguard.rules.base import Rule
from gradguard.rules.registry import all_rules

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "docs" / "programs"
REPOSITORY_FILES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_config(config: Any) -> Any:
    """The navigation gets the rules, by family."""
    families: list[Any] = ["rules.md"]
    for family, title in FAMILIES.items():
        pages = [{f"{rule.code} {rule.name}": _path(rule)} for rule in all_rules() if rule.family == family]
        families.append({f"{family} {title}": pages})
    for entry in config["nav"]:
        if "Rules" in entry:
            entry["Rules"] = families
    return config


def on_files(files: Files, config: Any) -> Files:
    """The pages that have no file in this folder."""
    for rule in all_rules():
        files.append(File.generated(config, _path(rule), content=rule_page(rule)))
    for path, name in REPOSITORY_FILES.items():
        files.append(File.generated(config, path, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """What is only for the tests goes, programs that are named come in, and the list of rules leads to their pages."""
    if page.file.src_uri == "rules.md":
        return rules_page()
    text = re.sub(r"<!-- setup\n.*?-->\n", "", markdown, flags=re.S)
    text = text.replace("<!-- pictures -->", _pictures(page.file.src_uri.count("/")))
    text = re.sub(r"<!-- file: (\S+) -->", lambda named: _fenced((ROOT / named[1]).read_text(), "python", named[1]), text)
    if page.file.src_uri in REPOSITORY_FILES:
        text = _code_fenced(text)
    return text


def rules_page() -> str:
    """All rules, by family."""
    lines = ["# Rules", "", "One page a rule; `gradguard explain CODE` shows the same. Codes never change their meaning once released.", ""]
    for family, title in FAMILIES.items():
        lines += [f"## {family}: {title}", "", "| code | name | what it recognises |", "| --- | --- | --- |"]
        rules = [rule for rule in all_rules() if rule.family == family]
        lines += [f"| [{rule.code}]({_path(rule)}) | {rule.name} | {cell(rule.summary)} |" for rule in rules]
        lines.append("")
    return "\n".join(lines)


def rule_page(rule: Rule) -> str:
    """A rule's page, with the programs in place of its example."""
    text = _code_fenced(page(rule))
    failing = PROGRAMS / f"{rule.code.lower()}.py"
    if not failing.exists():
        return text
    shown = _programs(failing)
    found = re.search(r"^## Example\n.*?(?=^## )", text, re.M | re.S)
    if found is None:
        return f"{text}\n\n{shown}"
    return text[: found.start()] + shown + "\n" + text[found.end() :]


def _programs(failing: Path) -> str:
    broken, repaired = failing.read_text(), failing.with_name(f"{failing.stem}_fixed.py").read_text()
    before, after = broken.splitlines(), repaired.splitlines()
    changes = [change for change in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if change[0] != "equal"]
    removed = [number + 1 for _, first, last, _, _ in changes for number in range(first, last)]
    added = [number + 1 for _, _, _, first, last in changes for number in range(first, last)]
    start = "torchrun --nproc-per-node 2 -m gradguard run" if "init_process_group" in broken else "gradguard run"
    return "\n\n".join(
        [
            "## A failing program",
            _fenced(broken, "python", failing.name, removed),
            "## What gradguard says",
            _fenced(failing.with_suffix(".txt").read_text(encoding="utf-8"), "text", f"{start} {failing.name}"),
            "## Repaired",
            _fenced(repaired, "python", "", added),
        ]
    )


def _pictures(depth: int) -> str:
    """What stands under pictures/, each above its name."""
    parts = []
    for path in sorted((ROOT / "docs" / "pictures").glob("*.png")):
        name = path.stem.replace("_", " ").replace("-", " ")
        parts.append(f"![{name}]({'../' * depth}pictures/{path.name})\n*{name}*\n")
    return "\n".join(["## What they look like\n", *parts]) if parts else ""


def _fenced(text: str, language: str, title: str = "", lines: Sequence[int] = ()) -> str:
    options = (f' title="{title}"' if title else "") + (f' hl_lines="{" ".join(map(str, lines))}"' if lines else "")
    return f"```{language}{options}\n{text.rstrip()}\n```"


def _code_fenced(text: str) -> str:
    """Indented code as fenced code, which has colours; docstrings have it right below a heading or a line of text."""
    result: list[str] = []
    indented: list[str] = []
    fenced = False

    def close() -> None:
        if indented:
            code = "\n".join(line[4:] for line in indented).rstrip()
            python = not re.search(r"[─▶]", code)
            result.extend(["", "```python" if python else "```text", *code.splitlines(), "```", ""])
            indented.clear()

    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if not fenced and (line.startswith("    ") or (indented and not line.strip())):
            indented.append(line)
            continue
        close()
        result.append(line)
    close()
    return "\n".join(result) + "\n"


def _path(rule: Rule) -> str:
    return f"rules/{rule.code.lower()}.md"
