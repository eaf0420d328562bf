"""What is said of settings that cannot be used: where, what is wrong, what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradguard.config.settings import load_settings
from gradguard.core.errors import ConfigError, UnknownRuleError


def said(project: Path, text: str, name: str = "gradguard.yaml") -> str:
    (project / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings()
    return str(caught.value)


def heads(message: str) -> list[str]:
    """The lines that are no quoted source."""
    return [line for line in message.splitlines() if " | " not in line.replace("`", " ")[:8] and not line.lstrip().startswith("| ")]


def test_the_place_is_quoted_with_carets_under_it(project: Path) -> None:
    assert said(project, "level: strict\ntrace:\n  evry: 500\n") == (
        "gradguard.yaml:3:3: unknown setting `trace.evry`; did you mean `every`?\n   3 |   evry: 500\n     |   ^^^^"
    )


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("levle: strict", "1:1: unknown setting `levle`; did you mean `level`?"),
        ("every: 5", "1:1: unknown setting `every`; did you mean `trace.every`?"),
        ("level: strcit", "1:8: `level` cannot be 'strcit': off | watch | standard | strict | forensic; did you mean `strict`?"),
        ("trace: {mode: 'alway'}", "1:15: `trace.mode` cannot be 'alway': never | adaptive | always; did you mean `always`?"),
        ("trace:\n  every: -1", "2:10: `trace.every` cannot be -1: input should be greater than or equal to 0"),
        ("trace:\n  every: often",
         "2:10: `trace.every` cannot be 'often': input should be a valid integer, unable to parse string as an integer"),
        ("trace: all", "1:8: `trace` is a section, not 'all': it takes mode, first_steps, after_change, every, after_incident, contents, "
         "saved_tensors, locate_nonfinite, node_hooks"),
        ("actions:\n  silent: false", '2:11: `actions.silent` cannot be False: off | log | warn | raise; write "off" in quotes'),
        ("rules: [GG601]", "1:8: `rules` is a section, not ['GG601']"),
        ("rules:\n  GG602: off", "2:3: unknown rule 'GG602'; did you mean GG612 or GG604 or GG601?"),
        ("rules:\n  stale-gradient: off", "2:3: unknown rule 'stale-gradient'; did you mean stale-gradients?"),
        ("rules:\n  GG601: rais", "2:10: 'rais' is no action: off | log | warn | raise; did you mean `raise`?"),
        ("rules:\n  GG601: {action: never}", "2:19: 'never' is no action: off | log | warn | raise"),
        ("rules:\n  GG601:\n    windw: 3", "3:5: GG601 stale-gradients has no option `windw`; did you mean `window`?"),
        ("rules:\n  GG601:\n    window: 0", "3:13: `window`: Input should be greater than or equal to 1, not 0"),
        ("rules:\n  GG604:\n    window: 3", "3:5: `window`: GG604 optimizer-orphaned-parameters has no options; only `action` can be set"),
        ("rules:\n  GG6:\n    window: 3", "3:5: `window`: a family takes only `action`; options belong to single rules"),
        ("rules:\n  GG601: off\n  stale-gradients: warn", "3:3: `stale-gradients` and `GG601` are the same rule; keep one of them"),
        ("level: strict\nlevel: watch", "2:1: `level` is given twice, first in line 1; keep one of them"),
        ("trace:\n  every: 1\n  mode: never\n  every: 2", "4:3: `every` is given twice, first in line 2; keep one of them"),
        ("rules: {601: off}", "1:9: a key must be a word, and '601' is none; write it in quotes if it is meant"),
        ("- level", "1:1: settings are a mapping of `key: value` lines"),
        ("? [a, b]\n: c", "1:3: a key must be a word"),
        ("level: *preset", "1:8: is not YAML: found undefined alias 'preset'"),
        ("level: !!python/name:os.system x", "1:8: is not YAML: could not determine a constructor for the tag "
         "'tag:yaml.org,2002:python/name:os.system'"),
    ],
)  # fmt: skip
def test_yaml(text: str, head: str, project: Path) -> None:
    assert heads(said(project, text)) == [f"gradguard.yaml:{head}"]


def test_broken_yaml_says_where(project: Path) -> None:
    message = said(project, "level: strict\ntrace: {every: 5\n")
    assert message.startswith("gradguard.yaml:") and "is not YAML: while parsing a flow mapping" in message
    assert "is not UTF-8" in said_bytes(project, b"level: \xff\n")
    assert "is not YAML" in said_bytes(project, b"level: \x00\n")
    assert heads(said(project, "level: strict\n---\nlevel: watch\n"))[0].startswith(
        "gradguard.yaml:2:1: is not YAML: expected a single document"
    )


def said_bytes(project: Path, data: bytes) -> str:
    (project / "gradguard.yaml").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ('[tool.gradguard]\nlevle = "strict"', "2:1: unknown setting `levle`; did you mean `level`?"),
        ("[tool.gradguard]\n  trace.evry = 5", "2:3: unknown setting `trace.evry`; did you mean `every`?"),
        ("[tool.gradguard]\ntrace = { first_steps = 1, every = 'x' }",
         "2:36: `trace.every` cannot be 'x': input should be a valid integer, unable to parse string as an integer"),
        ("[tool.gradguard]\nlevel = 'watch'\n[tool.gradguard.trace]\nmode = 'no' # comment",
         "4:8: `trace.mode` cannot be 'no': never | adaptive | always"),
        ("[tool.gradguard.rules]\nGG601 = false", '2:9: `false` is no action; write "off"'),
        ("[tool.gradguard.rules.'stale-gradients']\nwindow = 0", "2:10: `window`: Input should be greater than or equal to 1, not 0"),
        ("[tool]\ngradguard = 3", "2:1: `tool.gradguard` must be a table"),
        ("[tool.gradguard]\nlevel = 'a'\nlevel = 'b'", None),
    ],
)  # fmt: skip
def test_toml(text: str, head: str | None, project: Path) -> None:
    message = said(project, text, "pyproject.toml")
    if head is None:
        assert "is not TOML" in message and message.startswith("pyproject.toml:3:")
    else:
        assert heads(message) == [f"pyproject.toml:{head}"]


def test_carets_stand_under_the_toml_value(project: Path) -> None:
    message = said(project, "[tool.gradguard]\nlevel = 'strcit'  # hm\n", "pyproject.toml")
    assert message.splitlines()[1:] == ["   2 | level = 'strcit'  # hm", "     |         ^^^^^^^^"]


def test_every_problem_of_every_source_is_listed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "pyproject.toml").write_text("[tool.gradguard]\ncolor = 'red'\n")
    (project / "debug.yaml").write_text("report: 5\n\nsummary: maybe\n")
    (project / "gradguard.yaml").write_text("trace:\n  every: x\n  evry: 1\nrules:\n  GG699: off\n")
    monkeypatch.setenv("GRADGUARD_TRACE__MODE", "sometimes")
    monkeypatch.setenv("GRADGUARD_LEVLE", "strict")
    with pytest.raises(ConfigError) as caught:
        load_settings("strictest", config="debug.yaml", trace__evry=5, sumary=True)
    assert not isinstance(caught.value, UnknownRuleError)
    lines = heads(str(caught.value))
    assert lines[0] == "11 problems in the settings"
    assert [line.split(": ")[0] for line in sorted(lines[1:])] == [
        "GRADGUARD_LEVLE", "GRADGUARD_TRACE__MODE", "debug.yaml:1:9", "debug.yaml:3:10", "gradguard.yaml:2:10", "gradguard.yaml:3:3",
        "gradguard.yaml:5:3", "level", "pyproject.toml:2:9", "sumary", "trace.evry",
    ]  # fmt: skip


def test_a_wrong_value_is_reported_even_where_a_stronger_source_hides_it(project: Path) -> None:
    (project / "gradguard.yaml").write_text("trace:\n  every: x\n")
    with pytest.raises(ConfigError, match=r"gradguard\.yaml:2:10"):
        load_settings(trace__every=5)


def test_only_unknown_rules_make_an_unknown_rule_error(project: Path) -> None:
    with pytest.raises(UnknownRuleError, match=r"rules\.lonly-rule: unknown rule 'lonly-rule'; did you mean lonely-rule\?"):
        load_settings(rules={"lonly-rule": "off"})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "GRADGUARD_LEVEL",
            "strikt",
            "GRADGUARD_LEVEL: `level` cannot be 'strikt': off | watch | standard | strict | forensic; did you mean `strict`?",
        ),
        ("GRADGUARD_TRACE__EVRY", "1", "GRADGUARD_TRACE__EVRY: unknown setting `trace.evry`; did you mean `every`?"),
        ("GRADGUARD_TRACES__EVERY", "1", "GRADGUARD_TRACES__EVERY: unknown setting; did you mean `GRADGUARD_TRACE`?"),
        ("GRADGUARD_RULES__GG699", "off", "GRADGUARD_RULES__GG699: unknown rule"),
        ("GRADGUARD_RULES__STALE_GRADIENTS", "loud", "GRADGUARD_RULES__STALE_GRADIENTS: 'loud' is no action"),
        ("GRADGUARD_TRACE", "always", "GRADGUARD_TRACE: is not JSON"),
    ],
)
def test_environment(name: str, value: str, message: str, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert str(caught.value).startswith(message)


def test_a_config_file_that_does_not_exist(project: Path) -> None:
    (project / "strict.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"strct\.yaml: does not exist; did you mean `strict\.yaml`\?"):
        load_settings(config="strct.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_settings(config=project)


def test_words_that_older_yaml_takes_for_booleans_are_words(project: Path) -> None:
    (project / "gradguard.yaml").write_text("level: off\nrules:\n  GG601: off\nsummary: on\n")
    settings = load_settings()
    assert (settings.level, settings.rules["GG601"].action, settings.summary) == ("off", "off", True)


def test_anchors_merge_keys_and_empty_sections(project: Path) -> None:
    (project / "gradguard.yaml").write_text("trace: &t\n  every: 7\nrules:\nactions:\n  # silent: log\n")
    assert load_settings().trace.every == 7
    (project / "gradguard.yaml").write_text("rules:\n  GG601: &base {action: log, window: 9}\n  GG901:\n    <<: *base\n    action: raise\n")
    rules = load_settings().rules
    assert (rules["GG901"].action, rules["GG901"].options) == ("raise", {"window": 9})


def test_an_empty_file_states_nothing(project: Path) -> None:
    (project / "gradguard.yaml").write_text("# nothing yet\n")
    assert load_settings().level == "standard"


def test_a_file_below_the_working_directory_is_shown_relative_others_in_full(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "c.yaml"
    elsewhere.write_text("levle: x\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(config=elsewhere)
    assert str(caught.value).startswith(f"{elsewhere}:1:1: ")
