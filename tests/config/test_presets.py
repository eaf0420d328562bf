"""The files of `configs/`: what the levels mean, and that they are where an installation looks for them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from gradguard.config.files import YamlFile, preset, preset_text
from gradguard.config.settings import LEVELS, Settings, load_settings
from gradguard.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
FILES = [level for level in LEVELS if level != "off"]


def test_there_is_one_file_a_level() -> None:
    assert sorted(path.stem for path in (ROOT / "configs").glob("*.yaml")) == sorted(FILES)


@pytest.mark.parametrize("level", FILES)
def test_a_preset_states_every_setting_and_passes_its_own_check(level: str, project: Path) -> None:
    settings = load_settings(config=ROOT / "configs" / f"{level}.yaml")
    assert settings.level == level
    stated = preset(level)
    assert set(stated) == set(Settings.model_fields)
    for section in ("trace", "actions", "journal"):
        assert set(stated[section]) == set(settings.model_dump()[section])
    assert settings.model_dump() == load_settings(level).model_dump()


@pytest.mark.parametrize("level", FILES)
def test_every_line_of_a_preset_is_explained(level: str) -> None:
    lines = preset_text(level).splitlines()
    assert lines[0].startswith(f'# gradguard, level "{level}"')
    for number, line in enumerate(lines):
        if line.startswith("  ") and not line.lstrip().startswith("#"):
            explained = any(before.lstrip().startswith("#") for before in lines[max(0, number - 4) : number])
            assert explained, line


def test_the_defaults_in_code_are_the_standard_preset() -> None:
    bare = {name: entry.get_default(call_default_factory=True) for name, entry in Settings.model_fields.items()}
    written = preset("standard")
    for name, value in bare.items():
        assert (value.model_dump() if hasattr(value, "model_dump") else value) == written[name], name


def test_what_the_levels_mean(project: Path) -> None:
    trace = {level: load_settings(level).trace for level in LEVELS}
    assert [trace[level].mode for level in LEVELS] == ["never", "never", "adaptive", "always", "always"]
    assert [trace[level].contents for level in LEVELS] == ["none", "none", "numpy", "numpy", "all"]
    assert [trace[level].locate_nonfinite for level in LEVELS] == [False, False, False, False, True]
    assert [trace[level].node_hooks for level in LEVELS] == [False, False, False, False, True]
    assert [trace[level].after_incident for level in LEVELS] == [0, 3, 3, 3, 3]
    assert (trace["standard"].first_steps, trace["standard"].after_change, trace["standard"].every) == (3, 3, 1000)
    assert [load_settings(level).actions.unused_ignores for level in LEVELS] == ["off", "off", "off", "warn", "warn"]


def test_reading_a_preset_hands_out_a_copy() -> None:
    preset("strict")["level"] = "watch"
    preset("strict")["trace"]["mode"] = "never"
    assert preset("strict")["level"] == "strict" and preset("strict")["trace"]["mode"] == "always"


def test_a_level_without_a_file() -> None:
    with pytest.raises(ConfigError):
        preset_text("nonsense")
    assert YamlFile(Path("x.yaml"), "level: off").data == {"level": "off"}


def test_importing_the_settings_does_not_import_pydantic_settings(project: Path) -> None:
    program = "import sys, gradguard.config.settings; print([name for name in ('pydantic_settings', 'yaml') if name in sys.modules])"
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    assert "pydantic_settings" not in done.stdout


@pytest.mark.slow
def test_the_presets_load_from_a_wheel(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("gradguard", "configs", "integrations", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path / "dist")]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    program = (
        "import gradguard.config.settings as s; "
        "print([s.load_settings(level).trace.mode for level in s.LEVELS], s.__file__); "
        "import gradguard.config.files as f; print(f._installed_presets())"
    )
    env = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"['never', 'never', 'adaptive', 'always', 'always'] {site}")
    assert str(site / "gradguard" / "configs") in done.stdout
    assert sorted(path.stem for path in (site / "gradguard" / "configs").glob("*.yaml")) == sorted(FILES)
    assert yaml.safe_load((site / "gradguard" / "configs" / "strict.yaml").read_text())["trace"]["mode"] == "always"
