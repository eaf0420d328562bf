"""What a diagnosis does, and what a rule may be set to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradguard.config.rule_settings import Action, options_model

if TYPE_CHECKING:
    from pydantic import BaseModel

    from gradguard.config.settings import Settings
    from gradguard.core.diagnosis import Diagnosis
    from gradguard.rules.base import Rule

_SHORTEST_FAMILY = len("GG1")


class Policy:
    """Settings turned into decisions.

    A rule named by code or name outranks its family, a longer prefix a shorter one, and `rules` outranks `actions`, no
    matter which source stated which.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._stated: dict[str, Action | None] = {}
        self._options: dict[str, BaseModel | None] = {}

    def action_for(self, diagnosis: Diagnosis, *, raised: bool) -> Action:
        """What to do with a diagnosis.

        Args:
            diagnosis: what was found; one of severity `info` never warns or raises.
            raised: whether it explains an exception. "raise" then means that the diagnosis takes the exception's place,
                every other action that the exception passes unchanged.
        """
        action = self._action(diagnosis.code, raised=raised)
        if diagnosis.severity == "info" and action in ("warn", "raise"):
            return "log"
        return action

    def asks(self, rule: Rule, *, raised: bool) -> bool:
        """Whether the rule need be asked at all: what it would say is not switched off."""
        return self._action(rule.code, raised=raised) != "off"

    def options(self, rule: Rule) -> BaseModel | None:
        """The rule's thresholds and windows as its own `Options` model; None when the rule has nothing to set."""
        if rule.code not in self._options:
            model = options_model(rule)
            setting = self.settings.rules.get(rule.code)
            self._options[rule.code] = None if model is None else model.model_validate(setting.options if setting else {})
        return self._options[rule.code]

    def _action(self, code: str, *, raised: bool) -> Action:
        if self.settings.level == "off":
            return "off"
        if code not in self._stated:
            self._stated[code] = self._stated_for(code)
        stated = self._stated[code]
        if stated is not None:
            return stated
        return self.settings.actions.exceptions if raised else self.settings.actions.silent

    def _stated_for(self, code: str) -> Action | None:
        for length in range(len(code), _SHORTEST_FAMILY - 1, -1):
            setting = self.settings.rules.get(code[:length])
            if setting is not None and setting.action is not None:
                return setting.action
        return None
