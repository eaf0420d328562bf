"""Is gradguard whole with nothing but the dependencies that it declares? Lists all rules and has one program of each family diagnosed.

Run as a script in an environment without the extras (`.ci/run` makes one); `--hide-extras` makes the ones that are there unimportable.
"""

from __future__ import annotations

import re
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from types import ModuleType
from typing import Any

PROGRAMS = {
    "GG101": """
weight = torch.ones(3, requires_grad=True)
y = torch.exp(weight)
y += 1
y.sum().backward()
""",
    "GG201": """
weight = torch.ones(3, requires_grad=True)
loss = (weight * weight).sum()
loss.backward()
loss.backward()
""",
    "GG302": """
weight = torch.ones(3, requires_grad=True)
loss = (weight * 2).sum().detach()
loss.backward()
""",
    "GG401": """
weight = torch.ones(3, requires_grad=True)
loss = weight * 2
loss.backward()
""",
    "GG501": """
weight = torch.zeros(3, requires_grad=True)
loss = torch.log(weight).sum() * 0
loss.backward()
""",
    "GG601": """
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(12):
    model(torch.randn(4, 3)).pow(2).mean().backward()
    optimizer.step()
""",
    "GG722": """
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(4, 3)).pow(2).mean()).backward()
    optimizer.step()
    scaler.update()
""",
    "GG803": """
weight = torch.ones(3, 1, requires_grad=True)
table = weight.expand(3, 1 << 46) * 2
""",
}  # fmt: skip


class _Hidden:
    """Finds nothing that belongs to another distribution than those declared, and those that they declare."""

    def __init__(self) -> None:
        wanted, waiting = set(), ["gradguard"]
        while waiting:
            name = waiting.pop()
            if name not in wanted:
                wanted.add(name)
                waiting += _declared(name)
        self.hidden = {module for module, owners in packages_distributions().items() if not wanted & {_plain(owner) for owner in owners}}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        return None if name.partition(".")[0] in self.hidden else PathFinder.find_spec(name, path, target)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared(name: str) -> list[str]:
    try:
        return [_plain(re.split(r"[^\w.-]", line)[0]) for line in requires(name) or () if "extra ==" not in line]
    except PackageNotFoundError:
        return []


def main() -> None:
    """Exits with an error that names what is missing."""
    if "--hide-extras" in sys.argv:
        sys.meta_path[sys.meta_path.index(PathFinder)] = _Hidden()  # type: ignore[call-overload]
    import linecache
    import warnings

    import torch

    from gradguard import gradguard
    from gradguard.core.errors import GradGuardError
    from gradguard.rules import registry

    rules = registry.all_rules()
    assert not registry.broken, registry.broken
    assert "numpy" not in sys.modules, "this environment has more than the declared dependencies"
    print(f"{len(rules)} rules of {len({rule.family for rule in rules})} families")
    assert {rule.family for rule in rules} == {code[:3] for code in PROGRAMS}
    warnings.simplefilter("ignore")
    for code, source in PROGRAMS.items():
        file = f"<{code}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        guard = gradguard(level="standard")
        guard.made_at = None
        torch.manual_seed(0)
        try:
            with guard:
                exec(compile(source, file, "exec"), {"torch": torch})
        except GradGuardError:
            pass
        found = [diagnosis.code for diagnosis in guard.diagnoses]
        print(code, found)
        assert code in found, f"{code} was not found by its program, but {found}"


if __name__ == "__main__":
    main()
