"""`gradguard config`: shows, checks and creates settings."""

from __future__ import annotations

import json
import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer

from gradguard.config.settings import LEVELS, Action, Settings, load_settings
from gradguard.core.errors import ConfigError

app = typer.Typer(name="config", help="Show, check and create settings.", no_args_is_help=True, pretty_exceptions_enable=False)

_STARTER_HEAD = """\
# Settings of gradguard for this project. What is commented out shows the value it has at level "{level}"; remove the # to
# set it, here and above its section. `gradguard config check` validates this file, `gradguard config show` tells what is in
# force and why, `gradguard rules` lists the rules.

"""


class Format(str, Enum):
    """How `show` prints."""

    text = "text"
    yaml = "yaml"
    json = "json"


@app.command()
def show(
    level: Annotated[str | None, typer.Option(metavar="LEVEL", help=" | ".join(LEVELS))] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="A file of settings, as for `gradguard run`.")] = None,
    format: Annotated[Format, typer.Option(help="How to print.")] = Format.text,
) -> None:
    """Print the settings in force here, each with the source that set it."""
    try:
        settings = load_settings(level=level, config=config)
    except ConfigError as error:
        _fail(error)
    rows = [(name, value, str(settings.sources[name])) for name, value in _flat(settings)]
    if format is Format.json:
        typer.echo(json.dumps({name: {"value": value, "source": source} for name, value, source in rows}, indent=2))
    elif format is Format.yaml:
        typer.echo(_as_yaml(settings.model_dump(mode="json"), rows), nl=False)
    else:
        shown = [(name, _word(value), source) for name, value, source in rows]
        first, second = (max(len(row[column]) for row in shown) for column in (0, 1))
        for name, value, source in shown:
            typer.echo(f"{name:<{first}}  {value:<{second}}  {source}")


@app.command()
def check(
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Files to check; none: everything in force here.")] = None,
) -> None:
    """Validate settings files; every problem is listed, and the exit status is 1 if there is one."""
    from gradguard.config.files import FileProblems
    from gradguard.config.sources import check_layer, config_layer, fail_on

    if not files:
        try:
            load_settings()
        except ConfigError as error:
            _fail(error)
        typer.echo("the settings in force here are right")
        return
    problems = []
    for file in files:
        try:
            found = check_layer(config_layer(file))
        except FileProblems as error:
            found = error.problems
        if not found:
            typer.echo(f"{file}: right")
        problems += found
    try:
        fail_on(problems)
    except ConfigError as error:
        _fail(error)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="Where to write.")] = Path("gradguard.yaml"),
    level: Annotated[str, typer.Option(metavar="LEVEL", help=" | ".join(LEVELS[1:]))] = "standard",
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Write a commented file of settings to start from."""
    if level not in LEVELS[1:]:
        raise typer.BadParameter(f"{level!r}: one of {', '.join(LEVELS[1:])}", param_hint="--level")
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(starter(level))
    except FileExistsError:
        _fail(f"{file} exists; --force overwrites it")
    except OSError as error:
        _fail(f"{file} cannot be written: {error.strerror or error}")
    typer.echo(f"wrote {file}")


@app.command()
def schema() -> None:
    """Print a JSON schema of the settings, for editors that complete and check YAML."""
    typer.echo(json.dumps(settings_schema(), indent=2))


def starter(level: str) -> str:
    """A file of settings in which only the level is set, and everything else shown commented out."""
    from gradguard.config.files import preset_text

    body = preset_text(level).split(f"level: {level}\n", 1)[1]
    lines = [re.sub(r"^(?=\s*[^\s#])", "#", line) for line in body.splitlines()]
    return _STARTER_HEAD.format(level=level) + f"# {' | '.join(LEVELS)}\nlevel: {level}\n" + "\n".join(lines) + "\n"


def settings_schema() -> dict[str, Any]:
    """The JSON schema of a settings file, every rule and family with its summary and its options."""
    from gradguard.config.rule_settings import options_model
    from gradguard.rules.registry import all_rules, families

    schema = Settings.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    action = {"enum": list(get_args(Action)), "type": "string"}
    entries: dict[str, Any] = {}
    for family in families():
        entries[family] = {"description": f"every rule of {family}", "anyOf": [action, _mapping(action, {})]}
    for rule in all_rules():
        model = options_model(rule)
        options = model.model_json_schema() if model else {}
        schema.setdefault("$defs", {}).update(options.get("$defs", {}))
        entry = {"description": rule.summary, "anyOf": [action, _mapping(action, options.get("properties", {}))]}
        entries[rule.code] = entries[rule.name] = entry
    schema["properties"]["rules"] = {
        "type": "object",
        "description": schema["properties"]["rules"]["description"],
        "properties": entries,
        # longer prefixes, such as GG60, and codes in small letters
        "patternProperties": {"^[Gg][Gg][0-9]+$": {"anyOf": [action, {"type": "object"}]}},
        "additionalProperties": False,
    }
    schema["$defs"].pop("RuleSetting", None)
    return schema


def _mapping(action: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"action": action, **options}, "additionalProperties": False}


def _flat(settings: Settings) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []

    def walk(value: Any, name: str) -> None:
        if isinstance(value, dict) and name not in settings.sources:
            for key, below in value.items():
                walk(below, f"{name}.{key}" if name else key)
        elif name in settings.sources:
            rows.append((name, value))

    walk(settings.model_dump(mode="json"), "")
    return rows


def _word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return value if isinstance(value, str) else json.dumps(value)


def _as_yaml(data: dict[str, Any], rows: list[tuple[str, Any, str]]) -> str:
    import yaml

    sources = {name: source for name, _, source in rows}
    lines: list[str] = []

    def write(mapping: dict[str, Any], above: str, indent: str) -> None:
        for key, value in mapping.items():
            name = f"{above}.{key}" if above else key
            if isinstance(value, dict) and value:
                lines.append(f"{indent}{key}:")
                write(value, name, indent + "  ")
            elif name in sources or value == {}:
                # gradguard's own reader knows no `off` as a boolean, so the quotes would only confuse
                dumped = yaml.safe_dump(value, default_flow_style=True, width=10_000)
                text = "off" if value == "off" else dumped.removesuffix("\n...\n").strip()
                lines.append(f"{indent}{key}: {text}" + (f"  # {sources[name]}" if name in sources else ""))

    write(data, "", "")
    return "\n".join(lines) + "\n"


def _fail(why: object) -> NoReturn:
    typer.echo(str(why), err=True)
    raise typer.Exit(1)
