"""The lists in pyproject.toml name every folder that must be installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradguard.rules.registry import all_rules

if sys.version_info < (3, 11):
    pytest.skip("tomllib is new in Python 3.11", allow_module_level=True)

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def test_every_package_is_listed() -> None:
    mapped = SETUPTOOLS["package-dir"]
    tops = {"gradguard": ROOT / "gradguard", **{name: ROOT / folder for name, folder in mapped.items()}}
    found = set()
    for name, top in tops.items():
        for folder in [top, *(path for path in top.rglob("*") if path.is_dir())]:
            if any(folder.glob("*.py")) or any(folder.glob("*.yaml")):
                found.add(".".join([name, *folder.relative_to(top).parts]))
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_all_importable() -> None:
    """Every module of the core imports, also where no optional package is installed."""
    import importlib
    import pkgutil

    import gradguard

    for module in pkgutil.walk_packages(gradguard.__path__, "gradguard."):
        if module.name != "gradguard.__main__":
            importlib.import_module(module.name)


def test_nothing_but_the_declared_dependencies_is_needed() -> None:
    command = [sys.executable, str(Path(__file__).with_name("bare_install.py")), "--hide-extras"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"{len(all_rules())} rules of 8 families" in done.stdout


def test_a_module_is_known_by_its_name() -> None:
    shared = {"__init__", "__main__", "rule", "spans", "wording"}  # the same thing of each rule or family
    names = [path.stem for path in (ROOT / "gradguard").rglob("*.py") if path.stem not in shared]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_contributing_shows_every_folder() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = [path.parent.name for path in (ROOT / "gradguard").glob("*/__init__.py")]
    assert folders and [name for name in folders if f"| `{name}` |" not in text] == []


def test_no_import_circles() -> None:
    """Also between modules of one folder, which the layers do not hold apart."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("gradguard", cache_dir=None)
    circles = []
    for module in sorted(graph.modules - {"gradguard"}):
        reached, ahead = set(), [module]
        while ahead:
            new = graph.find_modules_directly_imported_by(ahead.pop()) - reached
            reached |= new
            ahead += new
        if module in reached:
            circles.append(module)
    assert circles == []
