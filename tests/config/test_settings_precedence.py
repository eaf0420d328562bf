"""Which source wins, and what `sources` tells of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.config.files import preset
from gradguard.config.settings import LEVELS, Settings, Trace, load_settings
from gradguard.core.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_each_of_six_sources_outranks_the_one_before(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [(load_settings().trace.every, str(load_settings().sources["trace.every"]))]

    write(project / "pyproject.toml", '[project]\nname = "x"\n\n[tool.gradguard]\ntrace.every = 1\n')
    seen.append((load_settings().trace.every, str(load_settings().sources["trace.every"])))
    write(project / "gradguard.yaml", "trace:\n  every: 2\n")
    seen.append((load_settings().trace.every, str(load_settings().sources["trace.every"])))
    config = write(project / "more" / "debug.yaml", "# one\n# two\ntrace: {every: 3}\n")
    seen.append((load_settings(config=config).trace.every, str(load_settings(config=config).sources["trace.every"])))
    monkeypatch.setenv("GRADGUARD_TRACE__EVERY", "4")
    seen.append((load_settings(config=config).trace.every, str(load_settings(config=config).sources["trace.every"])))
    last = load_settings(config=config, trace__every=5)
    seen.append((last.trace.every, str(last.sources["trace.every"])))

    assert seen == [
        (1000, "preset standard"),
        (1, "pyproject.toml:5"),
        (2, "gradguard.yaml:2"),
        (3, "more/debug.yaml:3"),
        (4, "environment GRADGUARD_TRACE__EVERY"),
        (5, "argument trace.every"),
    ]


def test_a_section_is_merged_key_by_key(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project / "pyproject.toml", "[tool.gradguard.trace]\nfirst_steps = 7\nevery = 10\n")
    write(project / "gradguard.yaml", "trace:\n  every: 20\n")
    monkeypatch.setenv("GRADGUARD_TRACE__AFTER_CHANGE", "9")
    trace = load_settings(trace={"after_incident": 11}).trace
    assert (trace.first_steps, trace.every, trace.after_change, trace.after_incident) == (7, 20, 9, 11)


@pytest.mark.parametrize("level", LEVELS)
def test_the_strongest_source_that_names_a_level_chooses_the_preset(level: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project / "gradguard.yaml", "level: watch\nsummary: true\n")
    assert load_settings().level == "watch"
    monkeypatch.setenv("GRADGUARD_LEVEL", "forensic")
    assert load_settings().trace.contents == "all"
    settings = load_settings(level)
    assert settings.level == level
    assert settings.summary, "what a file states outranks the preset"
    assert settings.trace.mode == preset(level)["trace"]["mode"]
    assert str(settings.sources["trace.mode"]) == f"preset {level}"


def test_files_are_searched_upwards_and_the_nearest_counts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project / "pyproject.toml", "[tool.gradguard]\ncolor = 'never'\n")
    write(project / "gradguard.yaml", "level: strict\n")
    inner = project / "pkg" / "deep"
    inner.mkdir(parents=True)
    # a pyproject.toml without the table does not hide the one above it
    write(project / "pkg" / "pyproject.toml", "[tool.other]\nx = 1\n")
    monkeypatch.chdir(inner)
    settings = load_settings()
    assert (settings.level, settings.color) == ("strict", "never")
    write(project / "pkg" / "gradguard.yaml", "level: off\n")
    assert load_settings().level == "off"


def test_a_broken_pyproject_matters_only_if_it_speaks_of_gradguard(project: Path) -> None:
    write(project / "pyproject.toml", "[project\n")
    assert load_settings().level == "standard"
    write(project / "pyproject.toml", "[tool.gradguard]\nlevel = strict\n")
    with pytest.raises(ConfigError, match=r"pyproject\.toml:2:9: is not TOML"):
        load_settings()


def test_a_toml_config_file_needs_no_table(project: Path) -> None:
    plain = write(project / "plain.toml", 'level = "strict"\n')
    tabled = write(project / "tabled.toml", '[tool.gradguard]\nlevel = "watch"\n')
    assert load_settings(config=plain).level == "strict"
    assert load_settings(config=str(tabled)).level == "watch"


def test_a_rule_named_by_code_and_by_name_is_one_rule(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project / "pyproject.toml", '[tool.gradguard.rules]\nGG601 = {action = "log", window = 8}\ngg6 = "warn"\n')
    write(project / "gradguard.yaml", "rules:\n  stale-gradients: raise\n  GG604: off\n")
    monkeypatch.setenv("GRADGUARD_RULES__OPTIMIZER_ORPHANED_PARAMETERS", "log")
    settings = load_settings(rules={"scheduler-order": {"action": "raise"}})
    assert {selector: (rule.action, rule.options) for selector, rule in settings.rules.items()} == {
        "GG601": ("raise", {"window": 8}),
        "GG6": ("warn", {}),
        "GG604": ("log", {}),
        "GG612": ("raise", {}),
    }
    assert {name: str(origin) for name, origin in settings.sources.items() if name.startswith("rules")} == {
        "rules.GG601.action": "gradguard.yaml:2",
        "rules.GG601.window": "pyproject.toml:2",
        "rules.GG6.action": "pyproject.toml:3",
        "rules.GG604.action": "environment GRADGUARD_RULES__OPTIMIZER_ORPHANED_PARAMETERS",
        "rules.GG612.action": "argument rules.scheduler-order.action",
    }


def test_environment_takes_json_numbers_and_null_words(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADGUARD_RULES", '{"GG9": "raise"}')
    monkeypatch.setenv("GRADGUARD_RULES__GG601__WINDOW", "12")
    monkeypatch.setenv("GRADGUARD_SUMMARY", "yes")
    monkeypatch.setenv("gradguard_color", "never")
    monkeypatch.setenv("GRADGUARD_LEVEL", "")
    settings = load_settings()
    assert settings.rules["GG9"].action == "raise"
    assert settings.rules["GG601"].options == {"window": 12}
    assert (settings.summary, settings.color, settings.level) == (True, "never", "standard")


def test_none_as_an_argument_means_not_given(project: Path) -> None:
    write(project / "gradguard.yaml", "report: run.jsonl\nlevel: strict\n")
    settings = load_settings(level=None, config=None, report=None)
    assert (settings.report, settings.level) == (Path("run.jsonl"), "strict")


def test_settings_made_by_hand_lie_over_their_preset() -> None:
    assert Settings(level="strict").trace.mode == "always"
    assert Settings(level="strict", trace=Trace(every=5)).trace.model_dump() == Settings(level="strict").trace.model_dump() | {"every": 5}
    assert Settings(level="watch", trace={"contents": "all"}).trace.mode == "never"
    assert Settings().model_dump() == Settings(level="standard").model_dump()
    with pytest.raises(ValueError, match="unknown rule 'GG699'"):
        Settings(rules={"GG699": "off"})


def test_settings_survive_a_round_trip_and_a_pickle(project: Path) -> None:
    import pickle

    settings = load_settings("forensic", rules={"stale-gradients": {"action": "log", "window": 2}}, report="x.jsonl")
    assert Settings.model_validate(settings.model_dump()).model_dump() == settings.model_dump()
    assert Settings.model_validate_json(settings.model_dump_json()).model_dump() == settings.model_dump()
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_every_setting_has_a_source_and_a_description(project: Path) -> None:
    def leaves(model: type, above: str = "") -> set[str]:
        found: set[str] = set()
        for name, entry in model.model_fields.items():
            assert entry.description, name
            below = entry.annotation
            found |= leaves(below, f"{above}{name}.") if isinstance(below, type) and hasattr(below, "model_fields") else {above + name}
        return found

    assert set(load_settings().sources) == leaves(Settings) - {"rules"}
