"""The settings in force: loaded from where they are set, over the level's preset. `gradguard.config.fields` has what can be set."""

from __future__ import annotations

import os
from typing import Any

from gradguard.config.fields import (
    DEFAULT_LEVEL,
    LEVELS,
    Actions,
    ColorMode,
    Contents,
    Journal,
    Level,
    Origin,
    RuleSetting,
    Settings,
    Trace,
    TracebackMode,
    TraceMode,
)
from gradguard.config.rule_settings import Action

__all__ = [
    "DEFAULT_LEVEL",
    "LEVELS",
    "Action",
    "Actions",
    "ColorMode",
    "Contents",
    "Journal",
    "Level",
    "Origin",
    "RuleSetting",
    "Settings",
    "Trace",
    "TraceMode",
    "TracebackMode",
    "load_settings",
    "settings_for",
    "wanted_color",
]


def load_settings(level: str | None = None, config: str | os.PathLike[str] | None = None, **overrides: Any) -> Settings:
    """The settings in force here.

    Sources in rising precedence: the level's preset, `[tool.gradguard]` of the nearest pyproject.toml that has one, the
    nearest gradguard.yaml (both searched from the working directory upwards), the file `config`, environment variables
    (`GRADGUARD_LEVEL=strict`, `GRADGUARD_TRACE__EVERY=500`), the arguments. Mappings are merged key by key; a rule named by
    its code in one source and by its name in another is the same rule.

    Args:
        level: a level's name.
        config: a YAML file, or a TOML file (its `[tool.gradguard]` table if it has one, else the whole file).
        **overrides: settings by name; nested ones as mappings or as `trace__every=500`. None means "not given".

    Raises:
        ConfigError: every problem found, each with file, line and column, and what would be right.
        UnknownRuleError: the same, where all that is wrong are rules that do not exist.
    """
    # pydantic-settings takes about 0.2 s to import (measured, on top of torch); only who loads settings pays for it.
    from gradguard.config.sources import resolve

    return resolve(level, config, overrides)


_known: dict[Any, Settings] = {}


def settings_for(level: str | None, config: Any, report: Any, overrides: dict[str, Any]) -> Settings:
    """`load_settings`, once for the same arguments in the same folder: `with gradguard():` in a loop must be cheap.

    Raises:
        ConfigError: as `load_settings`.
    """
    key: tuple[Any, ...] | None
    try:
        key = (level, str(config), str(report), tuple(sorted(overrides.items())), os.getcwd(), os.environ.get("GRADGUARD_LEVEL"))
        known = _known.get(key)
    except (TypeError, OSError):  # unhashable overrides, or a folder that is gone
        key, known = None, None
    if key is None:  # outside the handler: what is wrong with a setting did not come of the one above
        return load_settings(level=level, config=config, report=report, **overrides)
    if known is None:
        if len(_known) > 64:
            _known.clear()
        known = _known[key] = load_settings(level=level, config=config, report=report, **overrides)
    return known


def wanted_color(settings: Settings) -> bool | None:
    """Whether to colour what goes to stderr; None: as the stream and the environment have it."""
    return {"auto": None, "always": True, "never": False}[settings.color]
