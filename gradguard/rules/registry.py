"""Finds every rule file and answers look-ups by code, name or family prefix."""

from __future__ import annotations

import difflib
import logging
import pkgutil
import re
from functools import lru_cache
from importlib import import_module

import gradguard.rules as _package
from gradguard.core.errors import UnknownRuleError
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.moments import Moment
from gradguard.rules.base import Rule

_LOGGER = logging.getLogger("gradguard")
_RULE_FILE = re.compile(r"gg\d{3}(_|$)")
broken: list[tuple[str, Exception]] = []  # rule files that could not be loaded; a test holds that there are none


@lru_cache(maxsize=1)
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by code.

    Raises:
        ValueError: two rule files claim the same code or name.
    """
    found: dict[str, Rule] = {}
    names: set[str] = set()
    for family in pkgutil.iter_modules(_package.__path__, _package.__name__ + "."):
        if not family.ispkg:
            continue
        parent = import_module(family.name)
        for info in pkgutil.iter_modules(parent.__path__, parent.__name__ + "."):
            if not _RULE_FILE.match(info.name.rpartition(".")[2]):
                continue
            where = f"{info.name}.rule" if info.ispkg else info.name
            try:
                rule: Rule = import_module(where).RULE
            except internal_error() as error:  # a rule that a new torch release breaks must not take the others along
                broken.append((where, error))
                _LOGGER.error(
                    "gradguard cannot load its rule file %s: what it would find is not found (%s: %s)",
                    where,
                    type(error).__name__,
                    error,
                )
                continue
            if rule.code in found or rule.name in names:
                raise ValueError(f"two rules claim {rule.code} {rule.name} (the second is {where})")
            found[rule.code] = rule
            names.add(rule.name)
    return tuple(found[code] for code in sorted(found))


@lru_cache(maxsize=16)
def rules_for(moment: Moment) -> tuple[Rule, ...]:
    """The rules asked at one moment, the most specific first."""
    chosen = [rule for rule in all_rules() if moment in rule.moments]
    return tuple(sorted(chosen, key=lambda rule: (-rule.priority, rule.code)))


def families() -> tuple[str, ...]:
    """The family prefixes in use, such as GG1."""
    return tuple(sorted({rule.family for rule in all_rules()}))


def find_rules(selector: str) -> tuple[Rule, ...]:
    """The rules a selector means: a code (`GG101`), a name (`inplace-leaf`) or a family prefix (`GG1`).

    Raises:
        UnknownRuleError: nothing matches; the message names the nearest right selectors.
    """
    wanted = selector.strip()
    for rule in all_rules():
        if wanted.upper() == rule.code or wanted.lower() == rule.name:
            return (rule,)
    family = tuple(rule for rule in all_rules() if rule.code.startswith(wanted.upper()) and len(wanted) >= 3)
    if family:
        return family
    if wanted.upper().startswith("GG") and wanted[2:].isdigit():  # the nearest number is not the nearest meaning
        codes = [rule.code for rule in all_rules() if rule.code.startswith(wanted.upper()[:3])]
        near = difflib.get_close_matches(wanted.upper(), codes, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the families are {', '.join(families())}; `gradguard rules` lists all"
        raise UnknownRuleError(f"unknown rule {selector!r}; {hint}")
    known = [rule.code for rule in all_rules()] + [rule.name for rule in all_rules()] + list(families())
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5) or difflib.get_close_matches(wanted.upper(), known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `gradguard rules` lists them all"
    raise UnknownRuleError(f"unknown rule {selector!r}{hint}")


def get_rule(selector: str) -> Rule:
    """The one rule with this code or name.

    Raises:
        UnknownRuleError: unknown, or a family prefix.
    """
    found = find_rules(selector)
    if len(found) != 1:
        raise UnknownRuleError(f"{selector!r} is a family of {len(found)} rules; name one, such as {found[0].code}")
    return found[0]
