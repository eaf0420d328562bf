"""What a diagnosis does."""

from __future__ import annotations

from typing import Any

import pytest
from settings_helpers import diagnosis

from gradguard.config.policy import Policy
from gradguard.config.settings import Settings
from gradguard.rules.registry import get_rule


@pytest.mark.parametrize(
    ("level", "exception", "silent"),
    [
        ("off", "off", "off"),
        ("watch", "raise", "warn"),
        ("standard", "raise", "warn"),
        ("strict", "raise", "raise"),
        ("forensic", "raise", "raise"),
    ],
)
def test_levels(level: Any, exception: str, silent: str) -> None:
    policy = Policy(Settings(level=level))
    assert policy.action_for(diagnosis(), raised=True) == exception
    assert policy.action_for(diagnosis(), raised=False) == silent
    assert policy.action_for(diagnosis(severity="warning"), raised=False) == silent


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, "warn"),
        ({"GG6": "log"}, "log"),
        ({"GG6": "log", "GG601": "raise"}, "raise"),
        ({"GG601": "raise", "GG6": "log"}, "raise"),
        ({"GG6": "log", "stale-gradients": "off"}, "off"),
        ({"GG6": "log", "GG60": "raise"}, "raise"),
        ({"gg6": "log"}, "log"),
        ({"GG604": "off", "GG9": "off"}, "warn"),
        ({"GG601": {"window": 2}, "GG6": "log"}, "log"),
        ({"GG601": {"window": 2, "action": "raise"}}, "raise"),
    ],
)
def test_the_more_exact_selector_wins(rules: dict[str, Any], expected: str) -> None:
    assert Policy(Settings(rules=rules)).action_for(diagnosis(), raised=False) == expected


def test_a_rule_outranks_the_level_for_exceptions_too() -> None:
    policy = Policy(Settings(level="strict", rules={"GG601": "log"}))
    assert policy.action_for(diagnosis(), raised=True) == "log"
    assert policy.action_for(diagnosis("GG604", "optimizer-orphaned-parameters"), raised=True) == "raise"


@pytest.mark.parametrize("action", ["log", "warn", "raise"])
def test_info_is_only_ever_logged(action: Any) -> None:
    policy = Policy(Settings(level="strict", rules={"GG601": action}))
    assert policy.action_for(diagnosis(severity="info"), raised=False) == "log"


def test_info_stays_off_where_it_is_off() -> None:
    assert Policy(Settings(rules={"GG6": "off"})).action_for(diagnosis(severity="info"), raised=False) == "off"


def test_off_means_off_whatever_the_rules_say() -> None:
    policy = Policy(Settings(level="off", rules={"GG601": "raise"}))
    assert policy.action_for(diagnosis(), raised=True) == "off"
    assert not policy.asks(get_rule("GG601"), raised=True)


def test_rules_that_are_off_need_not_be_asked() -> None:
    policy = Policy(Settings(rules={"GG6": "off", "GG604": "warn"}))
    assert not policy.asks(get_rule("GG601"), raised=False)
    assert policy.asks(get_rule("GG604"), raised=False)
    assert policy.asks(get_rule("lonely-rule"), raised=False)


def test_options_come_as_the_rules_own_model() -> None:
    policy = Policy(Settings(rules={"stale-gradients": {"window": "12"}}))
    options: Any = policy.options(get_rule("GG601"))
    assert (options.window, options.ratio) == (12, 0.5)
    assert policy.options(get_rule("GG601")) is options
    assert policy.options(get_rule("GG604")) is None
    defaults: Any = policy.options(get_rule("GG901"))
    assert defaults.window == 3
