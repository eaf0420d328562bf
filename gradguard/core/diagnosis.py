"""The diagnosis: what gradguard shows a person and writes to a report.

These models are also the JSON schema of the report (one object a line). Everything in them is plain data: no tensor, no
frame and no graph is referenced, so a diagnosis can outlive the failing step by any length of time.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from gradguard.core.evidence import Evidence

Severity = Literal["error", "warning", "info"]
Confidence = Literal["certain", "likely", "possible"]
Safety = Literal["safe", "unsafe", "manual"]
Verdict = Literal["verified", "failed", "not tried"]
Role = Literal["culprit", "saved", "changed", "backward", "made", "freed", "cut", "carried", "declared", "context"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SourceSpan(_Model):
    """A stretch of source code, with the word that says what happened there.

    Lines are 1-based; columns are 0-based character offsets into the line, `end_column` exclusive, as in `ast`
    (but in characters, not UTF-8 bytes). `end_line` is the last line of the *expression* the span marks.
    """

    file: str = Field(description="absolute path; `<stdin>` and the like as Python has them")
    line: int = Field(description="1-based")
    end_line: int = Field(description="1-based, inclusive")
    column: int | None = Field(default=None, description="0-based, in characters")
    end_column: int | None = Field(default=None, description="0-based, exclusive")
    function: str | None = Field(default=None, description="qualified name of the enclosing function, `<module>` at top level")
    text: str | None = Field(default=None, description="the marked expression, as written")
    label: str | None = Field(default=None, description="what happened here, shown beside the carets")
    role: Role = "context"


class TensorFacts(_Model):
    """What is known of one tensor that takes part in the story."""

    name: str | None = Field(default=None, description="variable, attribute or dotted parameter name, as the user would write it")
    kind: Literal["tensor", "parameter", "buffer"] = "tensor"
    shape: list[int] | None = None
    dtype: str | None = None
    device: str | None = None
    module: str | None = Field(default=None, description="dotted path of the module it belongs to or was made by")
    version_saved: int | None = Field(default=None, description="version counter when autograd saved the tensor")
    version_found: int | None = Field(default=None, description="version counter when backward needed it")
    requires_grad: bool | None = None


class PatchedFile(_Model):
    """A file that a patch changes, as it was when the patch was made."""

    name: str = Field(
        description="as the patch's header has it, without a/ and b/: relative to the working directory where it is below that"
    )
    path: str = Field(description="absolute")
    sha256: str = Field(description="of its bytes; a tool must not patch a file that has another")


class Verification(_Model):
    """What came of running the program with a fix applied."""

    verdict: Verdict = Field(
        default="not tried",
        description="verified: the training step runs, every trainable parameter of the optimizers gets a finite gradient, and no "
        "diagnosis of warning or above is left that was not there before",
    )
    steps: int = Field(default=0, description="training steps that the patched program ran")
    why: str | None = Field(default=None, description="what was seen; of one that was not tried, the reason")
    behind: list[str] = Field(
        default_factory=list, description="further faults that showed once this one was gone, and how they were repaired"
    )
    patch: str | None = Field(default=None, description="unified diff that repairs those as well; null where there are none")
    safety: Safety | None = Field(default=None, description="of that diff: the least safe of its changes'")
    files: list[PatchedFile] = Field(default_factory=list, description="the files of that diff")


class Fix(_Model):
    """A suggested change. The first fix of a diagnosis is the one an expert would make."""

    title: str = Field(description="the change in one line, imperative")
    safety: Safety = Field(
        default="manual",
        description="safe: cannot change a correct program's results; unsafe: changes what is computed; manual: needs thought",
    )
    reason: str | None = Field(default=None, description="why it is safe, unsafe or manual")
    detail: str | None = None
    patch: str | None = Field(default=None, description="unified diff against the user's files, for `patch -p1` in the working directory")
    files: list[PatchedFile] = Field(default_factory=list, description="the files of the diff, in its order")
    verified: Verification = Field(default_factory=Verification, description="whether the program was run with the fix applied")


class Diagnosis(_Model):
    """One incident, explained."""

    code: str = Field(description="stable rule code, such as GG101")
    name: str = Field(description="stable rule name, such as inplace-modified-saved-tensor")
    severity: Severity = Field(
        default="error", description="error: it raised, or is raised; warning: a bug that raises nothing; info: a remark"
    )
    headline: str = Field(description="one sentence in plain words that stands alone")
    culprit: SourceSpan | None = Field(default=None, description="the line that is the bug; null where it could not be determined")
    related: list[SourceSpan] = Field(default_factory=list, description="other places of the story, in the order to show them")
    tensors: list[TensorFacts] = Field(default_factory=list, description="the tensors of the story")
    explanation: str = Field(default="", description="why this is wrong, in a few sentences")
    notes: list[str] = Field(default_factory=list, description="further facts: other writes, what was not seen, what waits behind")
    fixes: list[Fix] = Field(default_factory=list, description="the recommended one first")
    avoid: list[str] = Field(default_factory=list, description="popular cures that would be wrong here, and why")
    confidence: Confidence = Field(default="certain", description="of the culprit and the cause; certain: proved by what ran")
    step: int | None = Field(default=None, description="training step (1-based) in which the incident happened")
    thread: str | None = Field(default=None, description="name of the thread")
    rank: int | None = Field(default=None, description="of the process, in a distributed run")
    breadcrumbs: list[str] = Field(default_factory=list, description="what happened before, oldest first")
    torch_message: str | None = Field(default=None, description="PyTorch's own words")
    repeats: int = Field(default=0, description="how often the same cause was met again after it was first said")
    traced: bool = Field(default=False, exclude=True, description="whether the step was traced in full; not in the report")
    alternatives: list[Diagnosis] = Field(
        default_factory=list,
        exclude=True,
        description="the incident told once for each line that may be the bug, where it is not certain which one is; not in the report",
    )

    _evidence: Evidence | None = PrivateAttr(default=None)

    @property
    def evidence(self) -> Evidence | None:
        """What the HTML report draws, where one was asked for; not in the report for machines."""
        return self._evidence

    def with_evidence(self, evidence: Evidence | None) -> Diagnosis:
        """The same with what the HTML report draws."""
        changed = self.model_copy()
        changed._evidence = evidence
        return changed

    @property
    def place(self) -> SourceSpan | None:
        """Where to look: the culprit, else the first of the related places."""
        return self.culprit or next(iter(self.related), None)

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the cause: the same rule at the same place is the same bug."""
        place = self.place
        return (self.code, place.file if place else "", place.line if place else 0)

    def title(self, file: str = "", line: int = 0) -> str:
        """Cause and place on one line: the given place, else the culprit's where there is one."""
        if not line and self.culprit is not None:
            file, line = self.culprit.file, self.culprit.line
        return f"{self.code} {self.name}" + (f" at {file}:{line}" if line else "")
