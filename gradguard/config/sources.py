"""The sources of settings, checked one by one and merged in their precedence.

pydantic-settings reads the environment and does the merging; each source is validated on its own first, so that an error
names the file, line and column that states the wrong value, even where a stronger source would have hidden it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from gradguard.config.fields import DEFAULT_LEVEL, Origin, Settings
from gradguard.config.files import (
    FileProblems,
    KeyPath,
    Place,
    Problem,
    SettingsFile,
    deep_merge,
    nearest_project_files,
    open_settings,
    preset_file,
    shown,
)
from gradguard.config.rule_settings import brief, canonical_rules, did_you_mean, nearest
from gradguard.core.errors import ConfigError, UnknownRuleError

ENV_PREFIX = "GRADGUARD_"
_NESTED = "__"
# shows internal faults with their traceback, no part of what a run means; and what gradguard tells the processes that it starts
_NOT_SETTINGS = frozenset({"GRADGUARD_DEBUG", "GRADGUARD_SHARED", "GRADGUARD_TRIAL", "GRADGUARD_WORKER"})
Kind = Literal["preset", "pyproject", "project file", "config file", "environment", "argument"]


@dataclass
class Layer:
    """What one source states."""

    kind: Kind
    data: dict[str, Any]
    locate: Callable[[KeyPath, bool], Place]
    """(path of a setting, whether the key is meant rather than its value) -> position."""
    spelt: dict[KeyPath, KeyPath] = field(default_factory=dict)
    """Canonical path of a rule's setting -> its path as spelt in the source."""
    project: Path | None = None
    """Of a file that was found and not named: where its report may stand."""

    def origin(self, path: KeyPath) -> Origin:
        """Where the value at `path` comes from."""
        if self.kind == "preset":
            return Origin("preset", str(self.data["level"]))
        place = self.locate(self.spelt.get(path, path), True)
        return Origin(self.kind, place.source, place.line)


class _LayerSource(PydanticBaseSettingsSource):
    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self._layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._layer.data.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._layer.data


class _Environment(BaseSettings, Settings):
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter=_NESTED, env_ignore_empty=True, extra="forbid")


def resolve(level: str | None, config: str | os.PathLike[str] | None, overrides: Mapping[str, Any]) -> Settings:
    """See `gradguard.config.settings.load_settings`."""
    problems: list[Problem] = []
    layers = list(_layers(level, config, overrides, problems))
    for layer in layers:
        problems += check_layer(layer)
    fail_on(problems)
    chosen = next((layer.data["level"] for layer in reversed(layers) if "level" in layer.data), DEFAULT_LEVEL)
    layers.insert(0, file_layer("preset", preset_file(chosen)))
    return merge(layers)


def _layers(
    level: str | None, config: str | os.PathLike[str] | None, overrides: Mapping[str, Any], problems: list[Problem]
) -> Iterator[Layer]:
    """All sources but the preset, the weakest first; what cannot be read goes to `problems`."""
    try:
        toml, yml = nearest_project_files()
        if toml is not None:
            yield file_layer("pyproject", toml)
        if yml is not None:
            yield file_layer("project file", yml)
    except FileProblems as error:
        problems += error.problems
    if config is not None:
        try:
            yield config_layer(Path(config))
        except FileProblems as error:
            problems += error.problems
    yield from _environment(problems)
    arguments = _nested_arguments(level, overrides)
    if arguments:
        yield Layer("argument", arguments, lambda path, at_key: Place(".".join(path)))


def file_layer(kind: Kind, file: SettingsFile) -> Layer:
    """The layer that a file states."""
    # a copy of the outermost level is enough: nothing deeper is written to
    return Layer(kind, dict(file.data), lambda path, at_key: file.locate(path, at_key=at_key), project=file.project)


def config_layer(path: Path) -> Layer:
    """The layer of a file named by the user.

    Raises:
        FileProblems: missing or unreadable.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        try:
            siblings = [name for name in os.listdir(path.parent) if name.endswith((".yaml", ".yml", ".toml"))]
        except OSError:
            siblings = []
        raise FileProblems([Problem(Place(shown(path)), f"{what}{did_you_mean(path.name, siblings)}")])
    return file_layer("config file", open_settings(path))


def _environment(problems: list[Problem]) -> Iterator[Layer]:
    given = sorted(
        name
        for name, value in os.environ.items()
        if name.upper().startswith(ENV_PREFIX) and value != "" and name.upper() not in _NOT_SETTINGS
    )
    if not given:
        return
    fields = tuple(Settings.model_fields)
    for name in given:
        first = name[len(ENV_PREFIX) :].split(_NESTED, 1)[0].lower()
        if first not in fields:
            near = nearest(first, fields)
            hint = f"did you mean `{ENV_PREFIX}{near.upper()}`?" if near else f"settings are {', '.join(fields)}"
            problems.append(Problem(Place(name), f"unknown setting; {hint}"))
    try:
        data = EnvSettingsSource(_Environment)()
    except ValueError as error:  # SettingsError, whose home differs between releases
        # the error names the field in quotes, not the variable
        fields_named = re.findall(r'"(\w+)"', str(error))
        culprit = ENV_PREFIX + (fields_named[0].upper() if fields_named else "*")
        hint = f"a section is set one by one ({ENV_PREFIX}TRACE{_NESTED}EVERY=500) or as one JSON object"
        problems.append(Problem(Place(culprit), f"is not JSON ({error.__cause__ or error}); {hint}"))
        return
    if isinstance(data.get("rules"), dict):
        # a shell variable cannot hold the dash of a rule's name
        data["rules"] = {key.replace("_", "-"): value for key, value in data["rules"].items()}

    def locate(path: KeyPath, at_key: bool) -> Place:
        for depth in range(len(path), 0, -1):
            wanted = (ENV_PREFIX + _NESTED.join(path[:depth])).upper().replace("-", "_")
            for name in given:
                if name.upper() == wanted:
                    return Place(name)
        return Place("environment")

    yield Layer("environment", data, locate)


def _nested_arguments(level: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in {"level": level, **overrides}.items():
        if value is None:
            continue
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        *parents, last = name.replace(_NESTED, ".").split(".")
        entry: dict[str, Any] = {last: value}
        for parent in reversed(parents):
            entry = {parent: entry}
        nested = deep_merge(nested, entry)
    return nested


def check_layer(layer: Layer) -> list[Problem]:
    """Everything wrong in one source; brings its `rules` to one spelling."""
    problems: list[Problem] = []
    for name, value in list(layer.data.items()):
        if value is None and (name == "rules" or _fields_at((name,))):
            del layer.data[name]  # `trace:` with everything below it commented out
    for name in ("report", "html"):
        file = layer.data.get(name)
        if layer.project is not None and isinstance(file, str) and not Path(file).resolve().is_relative_to(layer.project.resolve()):
            message = f"a file that was found can only report into its project, {shown(layer.project)}"
            problems.append(Problem(layer.locate((name,), False), message))
    rules = layer.data.get("rules")
    plain = {key: value for key, value in layer.data.items() if key != "rules"}
    if isinstance(rules, Mapping):
        found = canonical_rules(rules)
        layer.data["rules"], layer.spelt = found.rules, found.origins
        problems += [Problem(layer.locate(path, at_key), message, unknown) for path, message, at_key, unknown in found.problems]
    elif rules is not None:
        plain["rules"] = rules
    try:
        Settings.model_validate(plain)
    except ValidationError as error:
        for detail in error.errors():
            path = tuple(str(part) for part in detail["loc"])
            unknown = detail["type"] == "extra_forbidden"
            problems.append(Problem(layer.locate(path, unknown), _said(path, dict(detail))))
    return sorted(problems, key=lambda problem: (problem.place.source, problem.place.line or 0, problem.place.column or 0))


def _said(path: KeyPath, detail: dict[str, Any]) -> str:
    dotted, value = ".".join(path), detail["input"]
    if detail["type"] == "extra_forbidden":
        elsewhere = [name for name in _all_fields() if name.rsplit(".", 1)[-1] == path[-1]]
        if elsewhere:
            return f"unknown setting `{dotted}`; did you mean `{elsewhere[0]}`?"
        return f"unknown setting `{dotted}`{did_you_mean(path[-1], _fields_at(path[:-1]), listed=True)}"
    if detail["type"] == "literal_error":
        allowed = [word.strip("'\"") for word in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        hint = '; write "off" in quotes' if value is False and "off" in allowed else did_you_mean(value, allowed)
        return f"`{dotted}` cannot be {brief(value)}: {' | '.join(allowed)}{hint}"
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        known = _fields_at(path)
        return f"`{dotted}` is a section, not {brief(value)}{': it takes ' + ', '.join(known) if known else ''}"
    message = str(detail["msg"])
    return f"`{dotted}` cannot be {brief(value)}: {message[0].lower()}{message[1:]}"


def _fields_at(path: KeyPath) -> list[str]:
    model: type[BaseModel] = Settings
    for part in path:
        entry = model.model_fields.get(part)
        if entry is None or not (isinstance(entry.annotation, type) and issubclass(entry.annotation, BaseModel)):
            return []
        model = entry.annotation
    return list(model.model_fields)


def _all_fields() -> list[str]:
    return [".".join((*above, name)) for above in ((), *((name,) for name in Settings.model_fields)) for name in _fields_at(above)]


def fail_on(problems: list[Problem]) -> None:
    """Raises what the problems amount to, if there are any.

    Raises:
        ConfigError: lists every problem.
        UnknownRuleError: the same, where all of them are rules that do not exist.
    """
    if not problems:
        return
    kind = UnknownRuleError if all(problem.unknown_rule for problem in problems) else ConfigError
    head = "" if len(problems) == 1 else f"{len(problems)} problems in the settings\n"
    raise kind(head + "\n".join(map(str, problems)))


def merge(layers: list[Layer]) -> Settings:
    """Checked layers, the weakest first, as settings that know where each value came from."""

    class Merged(BaseSettings):
        model_config = SettingsConfigDict(extra="allow")

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(_LayerSource(settings_cls, layer) for layer in reversed(layers))

    settings = Settings.model_validate(Merged().model_extra or {})
    settings._sources.update(_origins(settings, layers))
    return settings


def _origins(settings: Settings, layers: list[Layer]) -> Iterator[tuple[str, Origin]]:
    for path in _leaves(settings.model_dump()):
        for layer in reversed(layers):
            if _states(layer.data, path):
                yield ".".join(path), layer.origin(path)
                break
        else:
            yield ".".join(path), Origin("default", "")


def _leaves(data: Mapping[str, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key)


def _states(data: Mapping[str, Any], path: KeyPath) -> bool:
    value: Any = data
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True
