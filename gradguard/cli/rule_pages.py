"""The rules as a list for people and for machines; docs/rules.md is `as_markdown` of all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gradguard.rules.base import Rule
from gradguard.rules.registry import get_rule

FAMILIES = {
    "GG1": "In-place writes",
    "GG2": "Lifetime of the graph",
    "GG3": "Gradient path",
    "GG4": "The contract of backward",
    "GG5": "Numerics",
    "GG6": "Step protocol",
    "GG7": "Frameworks and ranks",
    "GG8": "Memory",
}


def heading(rule: Rule) -> str:
    """Code and name, as the rule's page is headed."""
    return f"{rule.code} {rule.name}"


def explain(selector: str) -> str:
    """The page of a rule, as markdown, by its code or name.

    Raises:
        UnknownRuleError: no such rule; the message names the nearest.
    """
    return page(get_rule(selector))


def page(rule: Rule) -> str:
    """The rule's page in Markdown, headed by its code and name whether or not its docs say them."""
    title = f"# {heading(rule)}"
    return rule.docs if rule.docs.startswith("# ") else f"{title}\n\n{rule.docs}"


def as_text(rules: Sequence[Rule]) -> str:
    """One line a rule."""
    width = max((len(rule.name) for rule in rules), default=0)
    return "\n".join(f"{rule.code}  {rule.name:<{width}}  {rule.summary}" for rule in rules)


def as_json(rules: Sequence[Rule]) -> str:
    """A JSON list, one object a rule."""
    return json.dumps([_plain(rule) for rule in rules], indent=2, ensure_ascii=False)


def as_markdown(rules: Sequence[Rule]) -> str:
    """All pages, by family, with a table in front."""
    lines = ["# Rules", "", "Printed by `gradguard rules --format markdown` from the rules themselves; do not edit.", ""]
    lines += ["| code | name | what it recognises |", "| --- | --- | --- |"]
    lines += [f"| [{rule.code}](#{_anchor(heading(rule))}) | {rule.name} | {cell(rule.summary)} |" for rule in rules]
    family = ""
    for rule in rules:
        if rule.family != family:
            family = rule.family
            lines += ["", f"## {family}xx: {FAMILIES.get(family, family)}"]
        lines += ["", _demoted(page(rule))]
    return "\n".join(lines)


def _plain(rule: Rule) -> dict[str, object]:
    return {
        "code": rule.code,
        "name": rule.name,
        "family": rule.family,
        "severity": rule.severity,
        "summary": rule.summary,
        "moments": sorted(rule.moments),
        "docs": rule.docs,
    }


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def cell(text: str) -> str:
    """Text as a table's cell has it."""
    return text.replace("|", "\\|")


def _demoted(docs: str) -> str:
    """A rule's page with its headings two levels lower, so that they nest under the family's."""
    lines, in_code = [], False
    for line in docs.splitlines():
        if line.startswith("```"):
            in_code = not in_code
        lines.append(f"##{line}" if line.startswith("#") and not in_code else line)
    return "\n".join(lines)
