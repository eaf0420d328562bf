"""The callback for transformers' Trainer, on a tiny model made from its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradguard.core.errors import GradGuardError
from gradguard.runtime.session import current_session

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:(?s)(?!.*GG).*")


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=20, dim=8, n_layers=1, n_heads=2, hidden_dim=16, max_position_embeddings=8, num_labels=2
    )
    return transformers.DistilBertForSequenceClassification(config)


def rows(key: str = "labels", n: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (n, 6), generator=generator)
    return [{"input_ids": row, key: int(row.sum() % 2)} for row in ids]


def trainer(folder: Path, trained: Any, data: list[dict[str, Any]], *callbacks: Any, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", logging_strategy="no", seed=1, **options,
    )  # fmt: skip
    return transformers.Trainer(model=trained, args=arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def callback(**settings: Any) -> Any:
    from gradguard.integrations.transformers import GradGuardCallback

    return GradGuardCallback(**settings)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "eval_strategy": "epoch"}], ids=["plain", "accumulated"])
def test_training_ends_with_the_same_weights(options: dict[str, Any], tmp_path: Path) -> None:
    ends = []
    for callbacks in ([], [callback(level="strict")]):
        trained = model()
        trainer(tmp_path, trained, rows(), *callbacks, **options).train()
        ends.append([p.detach().clone() for p in trained.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert callbacks[0].diagnoses == []
    assert callbacks[0].guard.run.depth.steps >= 3


def test_numbers_go_where_the_trainers_own_go(tmp_path: Path) -> None:
    ends = []
    for guard in (callback(), callback(log_every_n_steps=2)):
        trained = model()
        training = trainer(tmp_path, trained, rows(), guard)
        training.train()
        told = [row for row in training.state.log_history if any(name.startswith("gradguard/") for name in row)]
        ends.append(([p.detach().clone() for p in trained.parameters()], told))
    assert all(torch.equal(a, b) for a, b in zip(ends[0][0], ends[1][0], strict=True))
    assert ends[0][1] == []  # nothing unless it is asked for
    assert [row["step"] for row in ends[1][1]] == [1, 2, 4, 6]
    for row in ends[1][1]:
        assert row["gradguard/diagnoses"] == 0 and row["gradguard/grad_norm/pre_classifier"] > 0


def test_a_failing_step_is_diagnosed(tmp_path: Path) -> None:
    trained = model()
    trained.pre_classifier.register_forward_hook(lambda module, args, output: torch.sigmoid(output).add_(1))
    with pytest.raises(GradGuardError) as caught:
        trainer(tmp_path, trained, rows(), callback()).train()
    assert caught.value.diagnosis.code == "GG101"
    assert caught.value.diagnosis.culprit is not None
    assert caught.value.diagnosis.culprit.file == __file__


def test_labels_under_another_name(tmp_path: Path) -> None:
    with pytest.raises(GradGuardError) as caught:
        trainer(tmp_path, model(), rows("target"), callback(), remove_unused_columns=True).train()
    found = caught.value.diagnosis
    assert found.name == "transformers-no-loss"
    assert current_session().guards == [], "an error leaves no guard open"


def test_level_off(tmp_path: Path) -> None:
    made = callback(level="off")
    trainer(tmp_path, model(), rows(), made).train()
    assert made.diagnoses == []


class Samples:
    """A dataset of the user's whose labels go by another name."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": torch.randint(0, 20, (6,)), "sentiment": i % 2}


class Spread(Samples):
    """Two columns that the model does not know: which is the label is not for a guard to say."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": torch.randint(0, 20, (6,)), "row": i, "sentiment": i % 2}


@pytest.mark.parametrize(("data", "named"), [(Samples(), True), (Spread(), False)])
def test_labels_by_another_name(data: Any, named: bool, tmp_path: Path) -> None:
    from gradguard import gradguard

    with pytest.raises(GradGuardError) as caught, gradguard():
        trainer(tmp_path, model(), data).train()
    found = caught.value.diagnosis
    assert found.code == "GG751"
    if named:
        assert "`sentiment` of the dataset's samples is no argument of the model" in found.headline
        assert found.culprit is not None and found.culprit.text == '"sentiment"'
        assert "`sentiment` is what is to be predicted" in found.fixes[0].title
    else:
        assert found.culprit is None and "sentiment" not in str(caught.value).partition("PyTorch said")[0]
        assert "a column `labels`" in found.fixes[0].title
