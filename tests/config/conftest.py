"""Rules for the tests of this folder: a family of its own, found on disk as real rules are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradguard.rules
import gradguard.runtime.guard  # everything is loaded before the rules on disk are swapped for those of the tests
from gradguard.rules import registry

_RULE = '''"""What it is: a rule of the tests."""
from pydantic import BaseModel, ConfigDict, Field
from gradguard.rules.base import Rule

def recognise(incident):
    return None

RULE = Rule({code!r}, {name!r}, "summary of {name}", recognise)
'''
_OPTIONS = """
class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    window: int = Field(default=3, ge=1, description="steps looked back")
    ratio: float = Field(default=0.5, description="how much is too much")
"""
RULES = {
    "gg6_testing": [
        ("GG601", "stale-gradients", True),
        ("GG604", "optimizer-orphaned-parameters", False),
        ("GG612", "scheduler-order", False),
    ],
    "gg9_testing": [("GG901", "lonely-rule", True)],
}


@pytest.fixture(autouse=True)
def rules_of_the_tests(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Exactly the rules above, whatever the package ships."""
    home = tmp_path_factory.mktemp("rules")
    for family, members in RULES.items():
        (home / family).mkdir()
        (home / family / "__init__.py").write_text("")
        for code, name, options in members:
            (home / family / f"{code.lower()}.py").write_text(_RULE.format(code=code, name=name) + (_OPTIONS if options else ""))
    monkeypatch.setattr(gradguard.rules, "__path__", [str(home)])
    _forget()
    yield
    _forget()


def _forget() -> None:
    registry.all_rules.cache_clear()
    registry.rules_for.cache_clear()
    for module in [name for name in sys.modules if "_testing" in name and name.startswith("gradguard.rules.")]:
        del sys.modules[module]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder that is the working directory, without settings in the environment."""
    for name in list(os.environ):
        if name.upper().startswith("GRADGUARD_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
