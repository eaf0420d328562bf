"""What would be freed by a change that is made for memory's sake, computed from an account."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from gradguard.core.account import FOR_BACKWARD, Account, Held, Saved
from gradguard.core.memory_report import Saving

_SHOWN = 5
_WORTH = 0.02  # of what is saved for backward: less is not worth a line
_NUMBERED = re.compile(r"^(.*\.)?(\d+)$")

# What autocast computes in float32 whatever comes in, by the names of graph nodes.
_FLOAT32 = frozenset(
    {
        "acos", "asin", "bce_with_logits", "binary_cross_entropy", "binary_cross_entropy_with_logits", "cdist", "cosh", "cosine_similarity",
        "cumprod", "cumsum", "erfinv", "exp", "expm1", "huber_loss", "kl_div", "l1_loss", "linalg_vector_norm", "log", "log10", "log1p",
        "log2", "log_softmax", "logsumexp", "mse_loss", "native_group_norm", "native_layer_norm", "nll_loss", "norm", "pow", "prod",
        "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "softmax", "sum", "tan",
    }
)  # fmt: skip
_IN_LOWER_PRECISION = frozenset({"linear", "matmul", "baddbmm", "convolution", "addmv", "mv", "mkldnn_convolution"})
# Activations whose derivative needs their input, and in place only their result.
_IN_PLACE = {"leaky_relu": "nn.LeakyReLU", "elu": "nn.ELU", "rrelu_with_noise": "nn.RReLU"}


def savings(account: Account, evaluation: int = 0) -> list[Saving]:
    """What could be freed, the largest first.

    Args:
        account: at the fullest moment.
        evaluation: bytes that graphs held in which no backward was run and whose modules were in eval mode.
    """
    found = [*_checkpointing(account), *_autocast(account), *_in_place(account)]
    if evaluation:
        found.append(
            Saving(
                title="Evaluate under `torch.no_grad()`",
                nbytes=evaluation,
                detail="modules in eval mode recorded a graph through which no backward ran",
            )
        )
    least = _WORTH * account.total(*FOR_BACKWARD)
    return sorted((each for each in found if each.nbytes > least), key=lambda each: -each.nbytes)


# -- checkpointing -------------------------------------------------------------------------------------------------------


def freed_by_checkpointing(account: Account, module: str) -> int:
    """The bytes that are not saved any more when a module is checkpointed: what it saves, but for its inputs and what others save too."""
    return sum(row.nbytes for row in _within(account, module))


def _within(account: Account, module: str) -> list[Held]:
    rows = [(row, row.saved) for row in account.of("saved") if row.saved is not None and _in(row.saved.module, module)]
    first = min((saved.seq for _, saved in rows), default=0)
    return [row for row, saved in rows if not _is_input(saved, first) and all(_in(each, module) for each in saved.modules)]


def _in(path: str | None, module: str) -> bool:
    return path is not None and (path == module or path.startswith(f"{module}."))


def _is_input(saved: Saved, first: int) -> bool:
    """Whether a value came into the module whose first saving node has this number; data have no node, as masks have none."""
    return saved.made < first if saved.made >= 0 else saved.seq == first


def _checkpointing(account: Account) -> Iterator[Saving]:
    """Modules whose checkpointing lowers the peak, siblings of a list together; no two that lie in one another."""
    total = account.total(*FOR_BACKWARD)
    offers: list[tuple[int, str, tuple[str, ...], int]] = []
    for title, members in _candidates(account):
        freed = [freed_by_checkpointing(account, each) for each in members]
        if len(members) > 1:
            gain, again = sum(freed) - max(freed), max(freed)
        else:
            again = freed[0]
            gain = total - max(total - again, _before(account, members[0]) + again)
        offers.append((gain, title, members, again))
    taken: list[str] = []
    for gain, title, members, again in sorted(offers, key=lambda offer: (-offer[0], len(offer[1]))):
        if any(_in(each, other) or _in(other, each) for each in members for other in taken):
            continue
        taken += members
        each = "each of " if len(members) > 1 else ""
        detail = f"runs its forward again in backward, which then holds {_mib(again)} for a while"
        yield Saving(title=f"Checkpoint {each}`{title}`", nbytes=gain, detail=detail)
        if len(taken) > 64 or gain <= 0:
            return


def _candidates(account: Account) -> Iterator[tuple[str, tuple[str, ...]]]:
    paths = {row.saved.module for row in account.of("saved") if row.saved is not None and row.saved.module}
    modules = {path.rsplit(".", cut)[0] for path in paths if path for cut in range(path.count(".") + 1)}
    lists: dict[str, list[str]] = {}
    for module in sorted(modules):
        yield module, (module,)
        numbered = _NUMBERED.match(module)
        if numbered is not None:
            lists.setdefault(numbered[1] or "", []).append(module)
    for prefix, members in lists.items():
        if len(members) > 1:
            yield f"{prefix}*", tuple(members)


def _before(account: Account, module: str) -> int:
    """The bytes that are saved when a module begins."""
    first = min(row.saved.seq for row in account.of("saved") if row.saved is not None and _in(row.saved.module, module))
    return sum(row.nbytes for row in account.of(*FOR_BACKWARD) if row.saved is not None and row.saved.seq < first)


# -- the rest ------------------------------------------------------------------------------------------------------------


def _autocast(account: Account) -> Iterator[Saving]:
    """Under autocast, what is saved by operations that run in bfloat16 takes half; copies of their weights come on top."""
    halves = [row for row in _float32(account.of("saved")) if row.saved is not None and row.saved.op not in _FLOAT32]
    copies = [row for row in _float32(account.of("parameters")) if row.saved is not None and row.saved.op in _IN_LOWER_PRECISION]
    gain = (sum(row.nbytes for row in halves) - sum(row.nbytes for row in copies)) // 2
    if gain > 0:
        yield Saving(
            title="Run the forward under `torch.autocast(..., dtype=torch.bfloat16)`",
            nbytes=gain,
            detail="changes results; about, since what follows a float32 operation may stay float32",
        )


def _float32(rows: Iterable[Held]) -> list[Held]:
    return [row for row in rows if row.dtype == torch.float32]


def _in_place(account: Account) -> Iterator[Saving]:
    """Activations whose input nothing else needs: in place they keep their result alone, which is the next operation's input."""
    found: dict[str, list[Held]] = {}
    for row in account.of("saved"):
        saved = row.saved
        if saved is not None and saved.op in _IN_PLACE and saved.nodes == 1 and saved.alone:
            found.setdefault(saved.op, []).append(row)
    for op, rows in found.items():
        yield Saving(
            title=f"`inplace=True` of {len(rows)} {_IN_PLACE[op]}",
            nbytes=sum(row.nbytes for row in rows),
            detail="as far as the graph tells, nothing else reads what they overwrite",
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
