"""What a program of this family's tests is, and what stands at its top."""

from __future__ import annotations

from typing import NamedTuple

HEAD = """import copy
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
torch.manual_seed(0)
"""


class Case(NamedTuple):
    """One program: its rule (empty: must stay silent), its source with the culprit lines marked `# <<`, and names to be said."""

    slug: str
    code: str
    source: str
    names: tuple[str, ...] = ()
    watch: bool = True  # whether the source alone is enough to find the culprit


def marked(case: Case) -> tuple[str, set[int]]:
    """The program without its marks, and the lines that were marked."""
    lines = (HEAD + case.source).splitlines()
    return "\n".join(line.removesuffix("  # <<") for line in lines) + "\n", {n for n, line in enumerate(lines, 1) if line.endswith("# <<")}
