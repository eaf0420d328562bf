"""What rules of one family have said, so that those of another need not say it again."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradguard.instrumentation.tensor_refs import TensorRef


@dataclass
class Told:
    """Kept for a run.

    Attributes:
        lost_terms: places at which a part of the loss loses its path, by `Origin.key` (GG308).
        fresh_leaf: whether a backward call was told to begin at, or to reach only, a fresh leaf (GG301 to GG309).
        trained_elsewhere: leaves that the optimizer should have, by id (GG604).
    """

    lost_terms: set[tuple[object, ...]] = field(default_factory=set)
    fresh_leaf: bool = False
    trained_elsewhere: dict[int, TensorRef] = field(default_factory=dict)
