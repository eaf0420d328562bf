"""The Lightning callback in real fits, under both import names."""

from __future__ import annotations

import copy
import csv
import gc
import json
import pickle
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradguard.core.errors import GradGuardError, GradGuardWarning
from gradguard.probes.listeners import idle_listener
from tests.integrations.lit import PACKAGES, lightning, loader, regressor, trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:(?s)(?!.*GG).*")


def callback(*args: Any, **settings: Any) -> Any:
    """The callback class fits the packages imported by now, so it is looked up late."""
    from gradguard.integrations import lightning as integration

    return integration.GradGuardCallback(*args, **settings)


def inplace_step(self: Any, batch: Any, batch_idx: int) -> Any:
    x, y = batch
    hidden = torch.exp(self.encoder[0](x))
    hidden += 1  # the culprit
    return nn.functional.mse_loss(self.head(hidden), y)


def line_of(function: Any, text: str) -> int:
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


# -- a failing step -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("level", ["watch", "standard", "strict"])
def test_a_failing_step_is_diagnosed_once_at_the_users_line(package: str, level: str, tmp_path: Path) -> None:
    pl = lightning(package)
    guard = callback(level=level)
    fit = trainer(pl, tmp_path, guard)
    with pytest.raises(GradGuardError) as caught:
        fit.fit(regressor(pl, inplace_step), loader())
    assert isinstance(caught.value, RuntimeError)
    found = caught.value.diagnosis
    assert found.code == "GG101"
    assert found.culprit is not None
    assert (found.culprit.file, found.culprit.line) == (__file__, line_of(inplace_step, "the culprit"))
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("error[GG101]") == 1
    assert [d.code for d in guard.diagnoses] == ["GG101"]
    report = [json.loads(line) for line in (tmp_path / "gradguard.jsonl").read_text().splitlines()]
    assert [entry["code"] for entry in report] == ["GG101"]
    assert "training_step" not in vars(fit.strategy), "what setup replaced is taken back"


def test_a_step_that_fails_late_and_untraced_still_names_its_line(tmp_path: Path) -> None:
    pl = lightning()

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = torch.exp(self.encoder[0](x))
        if batch_idx == 6:
            hidden.mul_(torch.rand(()))  # the culprit
        return nn.functional.mse_loss(self.head(hidden), y)

    guard = callback(trace__mode="never")
    with pytest.raises(GradGuardError) as caught:
        trainer(pl, tmp_path, guard).fit(regressor(pl, step), loader())
    found = caught.value.diagnosis
    assert found.culprit is not None
    assert found.culprit.line == line_of(step, "the culprit")
    assert any("run again" in note for note in found.notes)


def test_manual_optimization(tmp_path: Path) -> None:
    pl = lightning()

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(inplace_step(self, batch, batch_idx))
        optimizer.step()

    with pytest.raises(GradGuardError) as caught:
        trainer(pl, tmp_path, callback()).fit(regressor(pl, step, automatic_optimization=False), loader())
    assert caught.value.diagnosis.culprit.line == line_of(inplace_step, "the culprit")


def test_manual_optimization_without_zero_grad(tmp_path: Path) -> None:
    pl = lightning()

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.manual_backward(nn.functional.mse_loss(self(x), y))
        self.optimizers().step()  # every step sums up all gradients so far

    with pytest.raises(GradGuardError) as caught:
        trainer(pl, tmp_path, callback(level="strict")).fit(regressor(pl, step, automatic_optimization=False), loader())
    assert caught.value.diagnosis.name == "stale-gradients"


def test_parameters_have_the_modules_own_paths(tmp_path: Path) -> None:
    pl = lightning()

    def init_hook(self: Any) -> None:
        self.extra = nn.Linear(8, 1)
        self.forgotten = nn.Parameter(torch.zeros(1))

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.encoder(x)) + self.extra(self.encoder(x)), y)

    def on_train_start(self: Any) -> None:
        self.head = nn.Linear(8, 1)

    guard = callback()
    model = regressor(pl, step, on_train_start=on_train_start, configure_model=init_hook)
    with pytest.warns(GradGuardWarning):
        trainer(pl, tmp_path, guard, max_epochs=2).fit(model, loader())
    [found] = [d for d in guard.diagnoses if d.name == "optimizer-orphaned-parameters"]
    assert "head.weight" in found.headline
    assert found.culprit is not None
    assert found.culprit.line == line_of(on_train_start, "self.head =")


# -- Lightning's own traps ----------------------------------------------------------------------------------------------


def test_a_step_that_returns_nothing(tmp_path: Path) -> None:
    pl = lightning()

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("loss", nn.functional.mse_loss(self(x), y))

    guard = callback()
    with pytest.warns(GradGuardWarning, match="GG741"):
        trainer(pl, tmp_path, guard).fit(regressor(pl, step), loader())
    [found] = guard.diagnoses
    assert found.name == "lightning-no-loss-returned"
    assert found.culprit is not None
    assert found.culprit.line == line_of(step, "def step")
    assert "Regressor" in found.headline


def test_a_short_fit_that_returns_nothing(tmp_path: Path) -> None:
    pl = lightning()
    guard = callback(level="strict")
    with pytest.raises(GradGuardError, match="GG741"):
        trainer(pl, tmp_path, guard, limit_train_batches=2).fit(regressor(pl, lambda self, batch, batch_idx: None), loader())


def test_a_fit_that_failed_is_not_judged_once_more_when_the_process_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pl = lightning()
    guard = callback(level="strict")
    with pytest.raises(GradGuardError, match="GG741"):
        trainer(pl, tmp_path, guard).fit(regressor(pl, lambda self, batch, batch_idx: None), loader())
    run = guard.guard.run
    del guard
    gc.collect()  # the optimizer dies, and with it the last look at it falls due
    run.end()
    assert "GG741" not in caplog.text


def test_a_step_that_returns_nothing_is_told_without_the_callback_as_well(tmp_path: Path) -> None:
    pl = lightning()
    from gradguard import gradguard

    fit = trainer(pl, tmp_path, max_epochs=2)
    with pytest.raises(GradGuardError) as caught, gradguard(level="strict"):
        fit.fit(regressor(pl, lambda self, batch, batch_idx: None), loader())
    assert caught.value.diagnosis.code == "GG741"


def returning(self: Any, batch: Any, batch_idx: int) -> Any:
    x, y = batch
    return nn.functional.mse_loss(self(x), y)  # and that is all


def applying(self: Any, batch: Any, batch_idx: int) -> Any:
    opt = self.optimizers()
    loss = returning(self, batch, batch_idx)
    opt.zero_grad()
    self.manual_backward(loss)
    opt.step()
    return loss


def searching(self: Any, batch: Any, batch_idx: int) -> Any:
    with torch.no_grad():
        for p in self.parameters():
            p.data += 0.01 * torch.randn_like(p)  # a random walk: no gradient is wanted
    return returning(self, batch, batch_idx)


def constant(self: Any, batch: Any, batch_idx: int) -> Any:
    return torch.zeros((), requires_grad=True)  # Lightning asks for one; what is "trained" is a memory of batches


def collecting(self: Any, batch: Any, batch_idx: int) -> Any:
    self.losses = [*getattr(self, "losses", []), returning(self, batch, batch_idx)]
    if len(self.losses) == 16:
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(torch.stack(self.losses).mean())
        opt.step()
        self.losses = []
    return self.losses[-1] if self.losses else None


def manual_optimization(self: Any) -> bool:
    return False


def fit_by_hand(tmp_path: Path, step: Any, how: str) -> list[Any]:
    from gradguard import gradguard

    pl = lightning()
    module = regressor(pl, step, automatic_optimization=property(manual_optimization))
    if how == "callback":
        guard = callback()
        trainer(pl, tmp_path, guard, max_epochs=2).fit(module, loader())
        return list(guard.diagnoses)
    plain = gradguard()
    with plain:
        trainer(pl, tmp_path, max_epochs=2).fit(module, loader())
    return plain.diagnoses


@pytest.mark.filterwarnings("ignore::gradguard.core.errors.GradGuardWarning")
@pytest.mark.parametrize("how", ["callback", "guard"])
def test_a_loss_that_is_only_returned_under_manual_optimization(how: str, tmp_path: Path) -> None:
    [found] = fit_by_hand(tmp_path, returning, how)
    assert found.code == "GG741"
    assert found.culprit is not None
    assert found.culprit.line == line_of(returning, "and that is all")
    assert "16 batches" in found.headline


@pytest.mark.parametrize("step", [applying, searching, constant, collecting])
@pytest.mark.parametrize("how", ["callback", "guard"])
def test_manual_optimization_of_any_kind_is_left_in_peace(how: str, step: Any, tmp_path: Path) -> None:
    assert not fit_by_hand(tmp_path, step, how)


class Rivals:
    """Two optimizers, one of which is toggled; `untoggle` says whether it is toggled back."""

    def __init__(self, untoggle: bool, again: bool = False) -> None:
        self.untoggle, self.again = untoggle, again

    def step(self) -> Any:
        rivals = self

        def training_step(self: Any, batch: Any, batch_idx: int) -> None:
            x, _ = batch
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            loss = self.head(self.encoder(x)).pow(2).mean()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            if rivals.untoggle:
                self.untoggle_optimizer(first)
            if rivals.again:
                self.toggle_optimizer(second)  # while the first one is
            loss = self.head(self.encoder(x)).sub(1).pow(2).mean()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
            if rivals.again and rivals.untoggle:
                self.untoggle_optimizer(second)

        return training_step

    def module(self, pl: Any) -> Any:
        def optimizers(self: Any) -> Any:
            return torch.optim.SGD(self.encoder.parameters(), 0.01), torch.optim.SGD(self.head.parameters(), 0.01)

        return regressor(pl, self.step(), automatic_optimization=property(manual_optimization), configure_optimizers=optimizers)


def test_a_toggle_that_is_never_taken_back(tmp_path: Path) -> None:
    pl = lightning()
    guard = callback()
    with pytest.warns(GradGuardWarning, match="GG606"):
        trainer(pl, tmp_path, guard, max_epochs=3).fit(Rivals(untoggle=False).module(pl), loader())
    [found] = guard.diagnoses
    assert found.culprit is not None and "toggle_optimizer(first)" in (found.culprit.text or "")
    assert "untoggle_optimizer(first)" in found.fixes[0].title
    assert ".step()` does nothing" in found.headline


def test_a_toggle_while_another_is_toggled(tmp_path: Path) -> None:
    pl = lightning()
    with pytest.raises(GradGuardError) as caught:
        trainer(pl, tmp_path, callback(), max_epochs=3).fit(Rivals(untoggle=False, again=True).module(pl), loader())
    found = caught.value.diagnosis
    assert found.code == "GG303" and "still toggled" in found.headline and "untoggle_optimizer" in found.fixes[0].title


@pytest.mark.parametrize("level", ["watch", "standard"])
def test_what_is_detached_is_not_to_blame_for_a_toggle(level: str, tmp_path: Path) -> None:
    pl = lightning()

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        made = self.encoder(batch[0])
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.head(made).pow(2).mean())
        first.step()
        loss = self.head(made.detach()).sub(1).pow(2).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()

    module = Rivals(untoggle=False).module(pl)
    type(module).training_step = training_step
    with pytest.raises(GradGuardError) as caught:
        trainer(pl, tmp_path, callback(level=level), max_epochs=3).fit(module, loader())
    found = caught.value.diagnosis
    assert found.code == "GG303" and "of `second`, which trains `self.head`, are frozen" in found.headline
    assert found.culprit is not None and found.culprit.text == "self.toggle_optimizer(first)"
    assert "self.untoggle_optimizer(first)" in found.fixes[0].title


@pytest.mark.parametrize("again", [False, True])
def test_toggles_that_are_taken_back(again: bool, tmp_path: Path) -> None:
    pl = lightning()
    guard = callback()
    trainer(pl, tmp_path, guard, max_epochs=3).fit(Rivals(untoggle=True, again=again).module(pl), loader())
    assert not guard.diagnoses


@pytest.mark.filterwarnings("ignore::gradguard.core.errors.GradGuardWarning")
def test_an_optimizer_is_called_what_the_user_calls_it(tmp_path: Path) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> None:
        opt = self.optimizers()
        loss = returning(self, batch, batch_idx)
        self.manual_backward(loss)
        opt.step()

    [found] = fit_by_hand(tmp_path, step, "guard")
    assert found.code == "GG601" and found.headline.startswith("`opt` steps") and "opt.zero_grad()" in (found.fixes[0].patch or "")


def test_bad_batches_may_be_skipped(tmp_path: Path) -> None:
    pl = lightning()

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return None if batch_idx % 4 != 3 else nn.functional.mse_loss(self(x), y)

    guard = callback(level="strict")
    trainer(pl, tmp_path, guard).fit(regressor(pl, step), loader())
    assert guard.diagnoses == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_dict_without_the_key_loss(package: str, tmp_path: Path) -> None:
    pl = lightning(package)

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return {"train_loss": nn.functional.mse_loss(self(x), y)}

    with pytest.raises(GradGuardError) as caught:
        trainer(pl, tmp_path, callback()).fit(regressor(pl, step), loader())
    found = caught.value.diagnosis
    assert (found.code, found.culprit.line) == ("GG742", line_of(step, "train_loss"))
    assert "`train_loss`" in found.headline


def test_a_detached_loss(tmp_path: Path) -> None:
    pl = lightning()

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y).detach()
        return {"loss": loss}

    with pytest.raises(GradGuardError) as caught:
        trainer(pl, tmp_path, callback()).fit(regressor(pl, step), loader())
    found = caught.value.diagnosis
    assert (found.name, found.culprit.line) == ("detached", line_of(step, ".detach()"))


# -- nothing but the fault is seen --------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("level", ["standard", "strict"])
def test_the_fit_ends_with_the_same_weights_bit_for_bit(package: str, level: str, tmp_path: Path) -> None:
    pl = lightning(package)
    ends = []
    for callbacks in ([], [callback(level=level)]):
        model = regressor(pl)
        fit = trainer(pl, tmp_path, *callbacks, max_epochs=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error", GradGuardWarning)
            fit.fit(model, loader(), loader())
        ends.append((weights(model), fit.callback_metrics["loss"], fit.callback_metrics["val"], torch.get_rng_state()))
    for bare, guarded in zip(*ends, strict=True):
        pairs = zip(bare, guarded, strict=True) if isinstance(bare, list) else [(bare, guarded)]
        assert all(torch.equal(a, b) for a, b in pairs)
    assert callbacks[0].diagnoses == []
    assert not (tmp_path / "gradguard.jsonl").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.5},
        {"inference_mode": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_trainer_options_are_sound(options: dict[str, Any], tmp_path: Path) -> None:
    pl = lightning()
    ends = []
    for callbacks in ([], [callback(level="strict")]):
        model = regressor(pl)
        trainer(pl, tmp_path, *callbacks, **options).fit(model, loader(), loader())
        ends.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert callbacks[0].diagnoses == []


def test_validation_is_left_alone(tmp_path: Path) -> None:
    pl = lightning()

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        kept = self.encoder(x)
        kept += 1
        with pytest.raises(RuntimeError) as caught:
            nn.functional.mse_loss(self.head(kept), y).backward()
        assert not isinstance(caught.value, GradGuardError)

    guard = callback(level="strict")
    trainer(pl, tmp_path, guard).fit(regressor(pl, validation_step=validation_step), loader(), loader())
    assert guard.diagnoses == []


def test_level_off_does_nothing(tmp_path: Path) -> None:
    pl = lightning()
    with pytest.raises(RuntimeError) as caught:
        trainer(pl, tmp_path, callback(level="off")).fit(regressor(pl, inplace_step), loader())
    assert not isinstance(caught.value, GradGuardError)


def test_hooks_that_do_nothing_are_passed_over_and_a_subclass_own_are_called(tmp_path: Path) -> None:
    pl = lightning()
    from gradguard.integrations.lightning import GradGuardCallback

    during: set[Any] = set()

    class Noting(GradGuardCallback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            during.add((self.on_before_backward, callable(self.on_after_backward)))

    callback = Noting()
    trainer(pl, tmp_path, callback).fit(regressor(pl), loader())
    assert during == {(None, True)}
    assert callable(callback.on_before_backward)


@pytest.mark.parametrize("package", PACKAGES)
def test_what_belongs_to_a_step(package: str, tmp_path: Path) -> None:
    pl = lightning(package)
    guarded: dict[str, set[bool]] = {}

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any) -> None:
            guarded.setdefault(name, set()).add(idle_listener() is not None)

        return hook

    inside = ("on_train_batch_start", "on_before_zero_grad", "on_after_backward", "on_train_batch_end")
    outside = ("on_validation_batch_start", "on_validation_batch_end", "on_train_epoch_end")
    module = regressor(pl, **{name: noting(name) for name in (*inside, *outside)})
    fit = trainer(pl, tmp_path, callback(), max_epochs=2, val_check_interval=3)
    fit.fit(module, loader(), loader())
    assert guarded == {name: {name in inside} for name in (*inside, *outside)}
    assert idle_listener() is None
    assert not {"advance", "on_batch_start"} & {*vars(fit.fit_loop.epoch_loop), *vars(fit._logger_connector)}


def test_a_trainer_whose_batches_cannot_be_seen_coming(tmp_path: Path) -> None:
    pl = lightning()
    from gradguard.integrations.lightning import GradGuardCallback

    class Blind(GradGuardCallback):
        def _wrap(self, owner: Any, name: str, *args: Any, **options: Any) -> bool:
            return name not in ("advance", "on_batch_start") and super()._wrap(owner, name, *args, **options)

    guard = Blind(trace__mode="never")
    with pytest.raises(GradGuardError) as caught:
        trainer(pl, tmp_path, guard).fit(regressor(pl, inplace_step), loader())
    assert caught.value.diagnosis.culprit.line == line_of(inplace_step, "the culprit")
    assert len(guard.diagnoses) == 1 and idle_listener() is None


def test_what_a_program_raises_to_steer_itself_is_raised_once(tmp_path: Path) -> None:
    pl = lightning()
    calls = []

    class Pruned(Exception):
        pass

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        raise Pruned

    with pytest.raises(Pruned):
        trainer(pl, tmp_path, callback(level="watch")).fit(regressor(pl, step), loader())
    assert calls == [0]


# -- logging, reports, checkpoints --------------------------------------------------------------------------------------


def test_counts_go_to_the_loggers_and_the_report_to_the_log_folder(tmp_path: Path) -> None:
    pl = lightning()
    from pytorch_lightning.loggers import CSVLogger

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return None

    logger = CSVLogger(tmp_path)
    guard = callback(log_every_n_steps=2)
    with pytest.warns(GradGuardWarning):
        trainer(pl, tmp_path, guard, logger=logger).fit(regressor(pl, step), loader())
    logger.save()
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    assert float(rows[-1]["gradguard/diagnoses"]) == 1
    assert float(rows[-1]["gradguard/traced_batches"]) > 0
    assert (Path(logger.log_dir) / "gradguard.jsonl").read_text().count("\n") == 1


def test_gradient_norms_go_to_the_loggers(tmp_path: Path) -> None:
    pl = lightning()
    from pytorch_lightning.loggers import CSVLogger

    ends = []
    for guards in ([], [callback(log_every_n_steps=4, gradient_norms=True)], [callback(log_every_n_steps=4)]):
        logger = CSVLogger(tmp_path, version=len(ends))
        pl.seed_everything(0)
        module = regressor(pl)
        trainer(pl, tmp_path, *guards, logger=logger).fit(module, loader())
        logger.save()
        ends.append((weights(module), Path(logger.log_dir) / "metrics.csv"))
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True))
    rows = list(csv.DictReader(ends[1][1].open()))
    told = [int(row["step"]) for row in rows if any(value and "grad_norm" in name for name, value in row.items())]
    assert told[:3] == [1, 4, 8]
    assert "gradguard/grad_norm/" in ends[1][1].read_text() and "grad_norm" not in ends[2][1].read_text()


def test_state_survives_a_checkpoint(tmp_path: Path) -> None:
    pl = lightning()

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return None

    first = callback()
    fit = trainer(pl, tmp_path, first)
    with pytest.warns(GradGuardWarning, match="GG741"):
        fit.fit(regressor(pl, step), loader())
    fit.save_checkpoint(tmp_path / "last.ckpt")
    second = callback()
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradGuardWarning)
        trainer(pl, tmp_path, second, max_epochs=2).fit(regressor(pl, step), loader(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert second.guard.run.depth.steps >= 2 * len(loader())
    assert second.diagnoses == []


def test_it_can_be_copied_and_pickled() -> None:
    lightning()
    made = callback(level="strict", log_every_n_steps=7)
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (again.guard.level, again.log_every_n_steps, type(again).__name__) == ("strict", 7, "GradGuardCallback")


def test_both_packages_take_it_even_alone(tmp_path: Path) -> None:
    first, second = (lightning(package) for package in PACKAGES)
    made = callback()
    for pl in (first, second):
        fit = pl.Trainer(callbacks=made, logger=False, enable_checkpointing=False, default_root_dir=str(tmp_path), accelerator="cpu")
        assert made in fit.callbacks


# -- ranks and compilation ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_module(tmp_path: Path) -> None:
    pl = lightning()
    ends = []
    for callbacks in ([], [callback()]):
        model = regressor(pl)
        model.encoder = torch.compile(model.encoder, backend="eager")
        trainer(pl, tmp_path, *callbacks).fit(model, loader())
        ends.append(weights(model))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert callbacks[0].diagnoses == []


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_scaler_needs_manual_backward(by_hand: bool, tmp_path: Path) -> None:
    pl = lightning()
    from pytorch_lightning.plugins.precision import MixedPrecision

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.optimizers().zero_grad()
        if by_hand:
            loss.backward()
        else:
            self.manual_backward(loss)
        self.optimizers().step()

    guard = callback()
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    fit = trainer(pl, tmp_path, guard, plugins=[plugin])
    module = regressor(pl, training_step, automatic_optimization=False)
    if not by_hand:
        fit.fit(module, loader())
        assert guard.diagnoses == []
        return
    with pytest.raises(AssertionError, match="GG743"):
        fit.fit(module, loader())
    (found,) = guard.diagnoses
    assert found.culprit is not None and found.culprit.text.strip() == "loss.backward()"
