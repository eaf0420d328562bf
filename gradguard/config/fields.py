"""What can be set: levels, sections and their fields, and where each value came from.

A level is a preset of two things: how deep the guard looks (`trace`) and what a diagnosis does (`actions`). The presets are
the files of `configs/`; everything else is laid over them by `gradguard.config.settings.load_settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from gradguard.config.rule_settings import Action, canonical_rules
from gradguard.reporting.terminal.render import Verbosity

Level = Literal["off", "watch", "standard", "strict", "forensic"]
TraceMode = Literal["never", "adaptive", "always"]
Contents = Literal["none", "numpy", "all"]
ColorMode = Literal["auto", "always", "never"]
TracebackMode = Literal["user", "full"]

LEVELS: tuple[Level, ...] = ("off", "watch", "standard", "strict", "forensic")
DEFAULT_LEVEL: Level = "standard"


class Origin(NamedTuple):
    """Where a setting's value came from."""

    kind: Literal["default", "preset", "pyproject", "project file", "config file", "environment", "argument"]
    place: str
    """A file, an environment variable, a level's name or an argument's name."""
    line: int | None = None
    """1-based, where the place is a file."""

    def __str__(self) -> str:
        where = f"{self.place}:{self.line}" if self.line is not None else self.place
        if self.kind in ("pyproject", "project file", "config file"):
            return where
        return f"{self.kind} {where}".rstrip()


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Trace(_Section):
    """Which steps are traced in full, and what a traced step looks at."""

    mode: TraceMode = Field(
        default="adaptive",
        description="never: only the steps after an incident; adaptive: the steps chosen by the numbers below; always: every step",
    )
    first_steps: int = Field(default=3, ge=0, description="adaptive: steps traced at the start of a run")
    after_change: int = Field(
        default=3,
        ge=0,
        description="adaptive: steps traced after the graph may have changed (train/eval switch, new optimizer, requires_grad toggled, "
        "a validation in between)",
    )
    every: int = Field(default=1000, ge=0, description="adaptive: one step in so many is traced; 0 for none")
    after_incident: int = Field(default=3, ge=0, description="steps traced after a step went wrong untraced, in every mode; 0 for none")
    contents: Contents = Field(
        default="numpy",
        description="whose contents are compared between forward and backward: none, what NumPy can write behind PyTorch's back, "
        "or all saved tensors",
    )
    saved_tensors: bool = Field(
        default=False, description="put hooks on what is saved for backward, which also see what the graph does not show (C++ Functions)"
    )
    locate_nonfinite: bool = Field(default=False, description="check every operation's result for NaN and infinity as it is made")
    node_hooks: bool = Field(
        default=False, description="put a hook on every node of the backward graph that computes, to see which makes a gradient non-finite"
    )


class Actions(_Section):
    """What a diagnosis does, unless `rules` says otherwise for its rule."""

    exceptions: Action = Field(
        default="raise",
        description="for an exception that a rule explains; raise: the exception raised is the diagnosis, "
        "otherwise the original passes unchanged",
    )
    silent: Action = Field(default="warn", description="for a bug that raises nothing")
    unused_ignores: Action = Field(default="off", description="for a `# gradguard: ignore` comment that silenced nothing")


class RuleSetting(BaseModel):
    """What a rule or a family does; a rule's own thresholds and windows stand beside `action`."""

    model_config = ConfigDict(extra="allow", frozen=True)

    action: Action | None = Field(default=None, description="what a diagnosis of the rule does; null: as `actions` says")

    @property
    def options(self) -> dict[str, Any]:
        """The rule's own options, as checked against the rule's `Options` model."""
        return dict(self.model_extra or {})


class Journal(_Section):
    """How many facts of recent steps are kept, at most."""

    writes: int = Field(default=4096, ge=16, description="in-place writes remembered")
    ops: int = Field(default=16384, ge=16, description="operations remembered")


class Ranks(_Section):
    """What is done where a process is one of several ranks."""

    patience: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="seconds that a collective may take before the ranks tell each other where they are and one says what is wrong",
    )


class Settings(_Section):
    """Everything that can be set.

    `Settings(level="strict")` is the whole strict preset: what is not given comes from the level's file. Values are
    immutable; `model_copy(update=...)` makes a changed copy.
    """

    level: Level = Field(default=DEFAULT_LEVEL, description="the preset that everything else is laid over")
    trace: Trace = Field(default_factory=Trace, description="which steps are traced in full, and what a traced step looks at")
    actions: Actions = Field(default_factory=Actions, description="what a diagnosis does")
    rules: dict[str, RuleSetting] = Field(
        default_factory=dict, description="by rule code, rule name or family prefix: an action, or a mapping of action and options"
    )
    journal: Journal = Field(default_factory=Journal, description="how many facts are kept, at most")
    ranks: Ranks = Field(default_factory=Ranks, description="what is done where a process is one of several ranks")
    report: Path | None = Field(
        default=None, description="one JSON object a diagnosis is appended to this file; relative to the working directory"
    )
    html: Path | None = Field(
        default=None, description="a page with every diagnosis, its graph and its gradients is written to this file; needs jinja2"
    )
    color: ColorMode = Field(default="auto", description="auto: colour on a terminal, unless NO_COLOR is set")
    traceback: TracebackMode = Field(
        default="user",
        description="frames shown of an error that was diagnosed; user: those of the program, full: those of PyTorch and gradguard too",
    )
    verbosity: Verbosity = Field(
        default="normal",
        description="how much is shown of a diagnosis on a terminal; quiet: one line, `file:line: code headline`; verbose: all of it",
    )
    summary: bool = Field(default=False, description="print a closing summary")
    memory: bool = Field(
        default=False, description="account for what is held for backward, and print it by line, module and operation in the end"
    )
    verify: bool = Field(
        default=False,
        description="run the program again with each fix of a diagnosis, on a copy of its files, and say which one repairs it",
    )

    _sources: dict[str, Origin] = PrivateAttr(default_factory=dict)

    @property
    def sources(self) -> Mapping[str, Origin]:
        """For each dotted key, such as `trace.every`, which source set it (filled by `load_settings`)."""
        return self._sources

    @model_validator(mode="before")
    @classmethod
    def _lay_over_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        level = data.get("level", DEFAULT_LEVEL)
        if level not in LEVELS:
            return data
        from gradguard.config.files import deep_merge, preset

        plain = {key: value.model_dump(exclude_unset=True) if isinstance(value, _Section) else value for key, value in data.items()}
        return deep_merge(preset(level), plain)

    @field_validator("rules", mode="before")
    @classmethod
    def _canonical_rules(cls, value: Any) -> Any:
        if not value or not isinstance(value, Mapping):
            return value
        found = canonical_rules(value)
        if found.problems:
            raise ValueError("; ".join(problem.message for problem in found.problems))
        return found.rules
