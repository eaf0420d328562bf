"""The callback named on LightningCLI's command line and in its YAML, under both import names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from gradguard.core.errors import GradGuardError
from tests.integrations.lit import PACKAGES, lightning, loader, regressor, weights

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")
pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s)(?!.*GG).*"),
    pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter"),  # the tests have arguments of their own
]

NAME = "gradguard.integrations.lightning.GradGuardCallback"
PROGRAM = Path(__file__).with_name("lightning_cli_program.py")
QUIET = {
    "logger": False,
    "accelerator": "cpu",
    "max_epochs": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def arguments(how: str, folder: Path, **init_args: Any) -> list[str]:
    """What asks for the callback, besides a quiet trainer: `how` is "yaml" or "command line"."""
    trainer: dict[str, Any] = {**QUIET, "default_root_dir": str(folder)}
    if how == "yaml":
        trainer["callbacks"] = [{"class_path": NAME, "init_args": init_args}]
    path = folder / "cli.yaml"
    path.write_text(yaml.safe_dump({"trainer": trainer}))
    given = ["--config", str(path)]
    if how == "command line":
        given.append(f"--trainer.callbacks+={NAME}")
        given += [f"--trainer.callbacks.{name}={value}" for name, value in init_args.items()]
    return given


def run(package: str, step: Any, given: list[str], fit: bool = True, **members: Any) -> Any:
    """The LightningCLI of a package, after its fit (or without one)."""
    pl = lightning(package)
    model = regressor(pl, step, train_dataloader=lambda self: loader(), **members)
    cli = import_module(f"{package}.cli").LightningCLI
    return cli(type(model), run=fit, save_config_callback=None, seed_everything_default=0, args=["fit", *given] if fit else given)


def made_by(cli: Any) -> Any:
    [made] = [each for each in cli.trainer.callbacks if type(each).__name__ == "GradGuardCallback"]
    return made


def inplace_step(self: Any, batch: Any, batch_idx: int) -> Any:
    x, y = batch
    hidden = torch.exp(self.encoder[0](x))
    hidden += 1  # the culprit
    return nn.functional.mse_loss(self.head(hidden), y)


def silent_step(self: Any, batch: Any, batch_idx: int) -> None:
    """Returns no loss: a bug that raises nothing by itself."""


@pytest.mark.parametrize("how", ["yaml", "command line"])
@pytest.mark.parametrize("package", PACKAGES)
def test_a_sound_fit_at_strict_is_the_same_to_the_bit(package: str, how: str, tmp_path: Path) -> None:
    bare = run(package, None, arguments("neither", tmp_path))
    guarded = run(package, None, arguments(how, tmp_path, level="strict"))
    made = made_by(guarded)
    assert made.guard.level == "strict"
    assert isinstance(made, lightning(package).Callback)
    assert made.guard.run.depth.steps >= len(loader()), "it was in the fit"
    assert made.diagnoses == []
    assert all(torch.equal(a, b) for a, b in zip(weights(bare.model), weights(guarded.model), strict=True))


@pytest.mark.parametrize("how", ["yaml", "command line"])
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("step", "code"), [(inplace_step, "GG101"), (silent_step, "GG741")])
def test_a_broken_model_is_diagnosed_once(package: str, how: str, step: Any, code: str, tmp_path: Path) -> None:
    with pytest.raises(GradGuardError) as caught:
        run(package, step, arguments(how, tmp_path, level="strict"))
    assert caught.value.diagnosis.code == code
    assert caught.value.diagnosis.culprit.file == __file__
    assert "".join(traceback.format_exception(caught.value)).count(f"[{code}]: ") == 1
    report = [json.loads(line) for line in (tmp_path / "gradguard.jsonl").read_text().splitlines()]
    assert [entry["code"] for entry in report] == [code]


@pytest.mark.parametrize(("package", "how"), list(zip(PACKAGES, ["yaml", "command line"], strict=True)))
def test_a_script_shows_its_user_the_diagnosis_once(package: str, how: str, tmp_path: Path) -> None:
    lightning(package)
    command = [sys.executable, str(PROGRAM), package, "fit", *arguments(how, tmp_path, level="strict")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    broken = subprocess.run(
        [*command, "--model.broken=true"], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", timeout=300
    )
    shown = broken.stdout + broken.stderr
    assert broken.returncode == 1, shown
    assert shown.count("error[GG101]") == 1, shown
    assert "hidden += 1  # the culprit" in shown


@pytest.mark.parametrize("how", ["yaml", "command line"])
def test_settings_can_be_given_by_name(how: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"log_every_n_steps": 3, "trace": {"every": 500}, "rules": {"GG6": "log"}}
    if how == "command line":
        given = {"log_every_n_steps": 3, "trace.every": 500, "rules.GG6": "log"}
    made = made_by(run("pytorch_lightning", None, arguments(how, tmp_path, level="strict", **given), fit=False))
    assert (made.guard.level, made.log_every_n_steps) == ("strict", 3)
    assert made.guard.settings.trace.every == 500
    assert made.guard.settings.rules["GG6"].action == "log"


def test_a_bare_off_is_a_level_in_yaml_too(tmp_path: Path) -> None:
    # read by rules under which `off` is False
    given = arguments("yaml", tmp_path, level="off")
    path = tmp_path / "cli.yaml"
    path.write_text(path.read_text().replace("'off'", "off"))
    assert "level: off\n" in path.read_text()
    assert made_by(run("pytorch_lightning", None, given, fit=False)).guard.level == "off"


def test_a_level_that_does_not_exist_is_told_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as caught:
        run("pytorch_lightning", None, arguments("command line", tmp_path, level="strcit"), fit=False)
    assert "did you mean `strict`?" in capsys.readouterr().err + str(caught.value)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_script_can_have_it_always_with_options_of_its_own(package: str, tmp_path: Path) -> None:
    lightning(package)
    integration = import_module("gradguard.integrations.lightning")

    class CLI(import_module(f"{package}.cli").LightningCLI):  # type: ignore[misc]
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_lightning_class_args(integration.GradGuardCallback, "gradguard")
            parser.set_defaults({"gradguard.level": "strict"})

    model = type(regressor(lightning(package)))
    given = [*arguments("neither", tmp_path), "--gradguard.log_every_n_steps=3"]
    made = made_by(CLI(model, run=False, save_config_callback=None, args=given))
    assert (made.guard.level, made.log_every_n_steps) == ("strict", 3)
