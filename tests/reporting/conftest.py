"""Real source files, spans found in them by what they mark, and snapshots of whole messages."""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from gradguard.core.diagnosis import Diagnosis, Fix, Role, SourceSpan, TensorFacts

SNAPSHOTS = Path(__file__).parent / "snapshots"

PROGRAM = '''\
import torch
from torch import nn


class Gate(nn.Module):
    """Lets a learnt share of each channel through."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Linear(channels, channels)

    def forward(self, x):
        share = torch.sigmoid(self.weight(x))
        return clip_share(share) * x


def clip_share(share):
    low = 0.05
    return share.clamp_(min=low)


def train(model, batches, optimizer):
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(
            model(x),
            y,
        )
        loss.backward()
        optimizer.step()
'''

PATCH = """\
--- a/train.py
+++ b/train.py
@@ -16,5 +16,5 @@

 def clip_share(share):
     low = 0.05
-    return share.clamp_(min=low)
+    return share.clamp(min=low)

"""


class Source:
    """A file on disk, and spans of it named by their text."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def span(
        self, marked: str, label: str | None = None, role: Role = "context", function: str | None = None, *, columns: bool = True
    ) -> SourceSpan:
        """The span of the only occurrence of `marked`, which may run over several lines."""
        assert self.text.count(marked) == 1, marked
        start = self.text.index(marked)
        end = start + len(marked)
        return SourceSpan(
            file=str(self.path),
            line=self.text.count("\n", 0, start) + 1,
            end_line=self.text.count("\n", 0, end) + 1,
            column=start - (self.text.rfind("\n", 0, start) + 1) if columns else None,
            end_column=end - (self.text.rfind("\n", 0, end) + 1) if columns else None,
            function=function,
            text=marked if columns else None,
            label=label,
            role=role,
        )


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Source]:
    """Writes a source file below the working directory of the test."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "train.py") -> Source:
        return Source(tmp_path / name, textwrap.dedent(text))

    return write


@pytest.fixture
def story(write: Callable[..., Source]) -> Diagnosis:
    """A whole diagnosis with everything in it."""
    source = write(PROGRAM)
    loss = "nn.functional.mse_loss(\n            model(x),\n            y,\n        )"
    return Diagnosis(
        code="GG101",
        name="inplace-modified-saved-tensor",
        headline="`share` was changed in place by `clamp_` after sigmoid had saved it for backward",
        culprit=source.span("share.clamp_(min=low)", "changed here, version 0 -> 1", "changed", "clip_share"),
        related=[
            source.span("torch.sigmoid(self.weight(x))", "saved here: sigmoid keeps its output", "saved", "Gate.forward"),
            source.span(loss, "the loss was made from it", "made", "train"),
            source.span("loss.backward()", "backward needed it here", "backward", "train"),
        ],
        tensors=[TensorFacts(name="share", shape=[32, 8], dtype="float32", device="cpu", version_saved=0, version_found=1)],
        explanation=(
            "The derivative of sigmoid is computed from its output, so PyTorch kept `share` itself, not a copy. "
            "`clamp_` wrote into that memory before backward could read it."
        ),
        notes=["`Gate.forward` hands `share` to `clip_share`, which is where it is written."],
        fixes=[
            Fix(title="clamp out of place: `share.clamp(min=low)`", safety="safe", patch=PATCH),
            Fix(title="scale the sigmoid instead: `low + (1 - low) * share`", safety="unsafe", detail="Smooth, with other values."),
        ],
        avoid=["`retain_graph=True` does not help: no graph was freed, a value in it was overwritten."],
        step=3,
        breadcrumbs=[
            "step 1: zero_grad, forward, backward, step",
            "step 2: zero_grad, forward, backward, step",
            "step 3: zero_grad, forward",
        ],
        torch_message=(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            "[torch.FloatTensor [32, 8]], which is output 0 of SigmoidBackward0, is at version 1; expected version 0 instead."
        ),
    )


@pytest.fixture
def snapshot() -> Callable[[str, str], None]:
    """Compares a text with `snapshots/NAME.txt`; with UPDATE_SNAPSHOTS set it writes the file, to be read before it is committed."""

    def check(name: str, text: str) -> None:
        path = SNAPSHOTS / f"{name}.txt"
        if os.environ.get("UPDATE_SNAPSHOTS"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        expected = path.read_text(encoding="utf-8")
        changes = "\n".join(difflib.unified_diff(expected.splitlines(), text.splitlines(), "expected", "shown", lineterm=""))
        assert not changes, changes

    return check
