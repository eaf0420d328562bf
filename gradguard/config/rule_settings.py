"""The `rules` section: selectors brought to one spelling, actions and options checked.

A selector is a code, a name or a family prefix; in merged settings it is the code (`GG601`) or the prefix in capitals
(`GG6`), so that sources that spell a rule differently override each other.
"""

from __future__ import annotations

import difflib
import reprlib
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from gradguard.core.errors import UnknownRuleError

if TYPE_CHECKING:
    from gradguard.rules.base import Rule

Action = Literal["off", "log", "warn", "raise"]
KeyPath = tuple[str, ...]
ACTIONS: tuple[str, ...] = get_args(Action)


class RuleProblem(NamedTuple):
    """Something wrong in the `rules` section; `path` is in the spelling of the source, from the top of the settings."""

    path: KeyPath
    message: str
    at_key: bool
    """Whether the key is at fault, not its value."""
    unknown_rule: bool = False


class CanonicalRules(NamedTuple):
    """The `rules` section of one source, in one spelling."""

    rules: dict[str, dict[str, Any]]
    origins: dict[KeyPath, KeyPath]
    """Canonical path -> path in the spelling of the source."""
    problems: list[RuleProblem]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a misspelt one most likely means; None when nothing is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6) or difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return near[0] if near else None


def brief(value: Any) -> str:
    """What a source states, in as many characters as a message has room for."""
    writer = reprlib.Repr()
    writer.maxstring = writer.maxother = writer.maxlong = 60
    try:
        return writer.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return "that number"


def did_you_mean(word: object, known: Iterable[str], *, listed: bool = False) -> str:
    """`; did you mean ...?`; where nothing is near, the list of what is known if `listed`, else nothing."""
    known = list(known)
    near = nearest(word, known) if isinstance(word, str) else None
    if near:
        return f"; did you mean `{near}`?"
    return f"; known are {', '.join(f'`{name}`' for name in known)}" if listed and known else ""


def options_model(rule: Rule) -> type[BaseModel] | None:
    """The rule's `Options`, a pydantic model in the rule's file; None when the rule has nothing to set."""
    model = getattr(sys.modules.get(rule.recognise.__module__), "Options", None)
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def canonical_selector(selector: str) -> tuple[str, Rule | None]:
    """The one spelling of a selector, and the rule if it means a single rule by code or name.

    Raises:
        UnknownRuleError: no such rule or family; the message names the nearest.
    """
    from gradguard.rules.registry import find_rules

    found = find_rules(selector)
    wanted = selector.strip()
    if len(found) == 1 and (wanted.upper() == found[0].code or wanted.lower() == found[0].name):
        return found[0].code, found[0]
    return wanted.upper(), None


def canonical_rules(rules: Mapping[Any, Any]) -> CanonicalRules:
    """Checks one source's `rules` section and brings it to one spelling."""
    result = CanonicalRules({}, {}, [])
    spelt: dict[str, str] = {}
    for key, value in rules.items():
        path = ("rules", str(key))
        try:
            selector, rule = canonical_selector(str(key))
        except UnknownRuleError as error:
            result.problems.append(RuleProblem(path, str(error), at_key=True, unknown_rule=True))
            continue
        if selector in spelt:
            message = f"`{key}` and `{spelt[selector]}` are the same {'rule' if rule else 'family'}; keep one of them"
            result.problems.append(RuleProblem(path, message, at_key=True))
            continue
        spelt[selector] = str(key)
        entry, problems = _check_entry(path, value, rule)
        result.problems.extend(problems)
        if problems:
            continue
        result.rules[selector] = entry
        for name in entry:
            source = path if not isinstance(value, Mapping) else (*path, name)
            result.origins["rules", selector, name] = source
    return result


def _check_entry(path: KeyPath, value: Any, rule: Rule | None) -> tuple[dict[str, Any], list[RuleProblem]]:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if not isinstance(value, Mapping):
        return {"action": value}, _check_action(path, value)
    entry = {str(name): option for name, option in value.items()}
    problems = []
    if entry.get("action") is None:
        entry.pop("action", None)
    else:
        problems += _check_action((*path, "action"), entry["action"])
    options = {name: option for name, option in entry.items() if name != "action"}
    if options and rule is None:
        problems += [
            RuleProblem((*path, name), f"`{name}`: a family takes only `action`; options belong to single rules", at_key=True)
            for name in options
        ]
    elif options and rule is not None:
        checked, wrong = _check_options(path, options, rule)
        entry.update(checked)
        problems += wrong
    return entry, problems


def _check_action(path: KeyPath, value: Any) -> list[RuleProblem]:
    if isinstance(value, str) and value in ACTIONS:
        return []
    if value is False:
        return [RuleProblem(path, '`false` is no action; write "off"', at_key=False)]
    return [RuleProblem(path, f"{brief(value)} is no action: {' | '.join(ACTIONS)}{did_you_mean(value, ACTIONS)}", at_key=False)]


def _check_options(path: KeyPath, options: dict[str, Any], rule: Rule) -> tuple[dict[str, Any], list[RuleProblem]]:
    """The options as values of their declared types (the environment has only text), and what is wrong with them."""
    model = options_model(rule)
    if model is None:
        said = f"{rule.code} {rule.name} has no options; only `action` can be set"
        return {}, [RuleProblem((*path, name), f"`{name}`: {said}", at_key=True) for name in options]
    known = ["action", *model.model_fields]
    problems = [
        RuleProblem((*path, name), f"{rule.code} {rule.name} has no option `{name}`{did_you_mean(name, known, listed=True)}", at_key=True)
        for name in options
        if name not in known
    ]
    try:
        checked = model.model_validate({name: option for name, option in options.items() if name in known})
    except ValidationError as error:
        for detail in error.errors():
            where = (*path, *(str(part) for part in detail["loc"]))
            problems.append(RuleProblem(where, f"`{where[-1]}`: {detail['msg']}, not {brief(detail['input'])}", at_key=False))
        return {}, problems
    return checked.model_dump(exclude_unset=True), problems
