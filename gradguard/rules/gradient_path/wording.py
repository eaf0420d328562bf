"""What is said about one origin: headline, label, explanation, fixes. No evidence is gathered here."""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.history.cut_origins import Origin, callee_name
from gradguard.analysis.places.sites import function_word, in_words, quoted, short
from gradguard.analysis.places.source import dotted
from gradguard.core.diagnosis import Fix
from gradguard.rules.gradient_path.recording import recording
from gradguard.rules.gradient_path.rounding import before_rounding
from gradguard.torch_compat.collectives import GATHERING

_MODES = {"no_grad": "with grad mode off", "inference": "in inference mode"}
_LEAVES = {"escape": "a Python number or an array", "rewrap": "a new tensor"}


def rule_of(origin: Origin) -> str:
    """The code of the rule whose cause this is."""
    if origin.kind == "no_grad":
        return "GG301"
    if origin.kind == "inference":
        return "GG305"
    if origin.kind in ("nondiff", "cast", "sample"):
        return "GG304"
    if origin.kind == "escape" and origin.switch is not None and origin.switch.how != "library":
        return "GG301"
    return "GG302"


def operation(origin: Origin) -> str:
    """The cutting operation as the user wrote it: `.detach()`, `torch.tensor(...)`, `x > threshold`."""
    place = origin.place
    node = None if place is None else place.node
    if isinstance(node, ast.Call):
        name = callee_name(place) or origin.func
        if isinstance(node.func, ast.Attribute) and (place is None or place.receiver is not None) and not _is_library(place):
            return f".{name}()" if not node.args and not node.keywords else f".{name}(...)"
        return f"{short(place.callee if place is not None else None, 40) or origin.func}(...)"
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    if isinstance(node, ast.Compare) and place is not None:
        return short(place.text, 40)
    return origin.func


def _is_library(place: object) -> bool:
    full = getattr(place, "callee_full_name", None)
    return bool(full) and str(full).startswith(("torch.", "numpy.", "math."))


def result_name(origin: Origin) -> str | None:
    """The variable that the cut value went to; None where it is one operand of what the variable gets, as in `total + x.detach()`."""
    place = origin.place
    if place is not None and place.source is not None and place.node is not None and origin.kind in ("detach", "data", "escape"):
        for above in place.source.ancestors(place.node):
            if isinstance(above, (ast.BinOp, ast.BoolOp, ast.IfExp, ast.Compare)):
                return None
            if isinstance(above, ast.stmt):
                break
    targets = place.targets if place is not None else []
    return targets[origin.output] if len(targets) > origin.output else targets[0] if targets and not origin.output else None


def label(origin: Origin) -> str:
    """Beside the carets."""
    name = result_name(origin)
    result = f"`{name}`" if name else "the result"
    inner = f"`{short(origin.inner, 32)}`" if origin.inner else "its input"
    if inner == result:  # `a = a.detach()`
        result = f"the new {result}"
    if origin.into_leaf:
        return "copies values: no gradient comes back from the parameters they are copied into"
    if origin.switch is not None and origin.switch.how == "caller":
        return f"runs {_MODES[origin.kind]}: that is how `{origin.switch.owner}` was called"
    if origin.kind in ("no_grad", "inference"):
        return f"{result} is computed here with grad mode off" if origin.place is not None else "computed with grad mode off"
    if origin.kind == "sample":
        return f"`sample()` draws under no_grad: {result} has no path to the distribution's parameters"
    if is_collective(origin):
        return "no gradient comes back through a collective call: what it fills are plain values"
    if origin.output and origin.kind == "nondiff":
        return f"no derivative leads through the indices: {result} has no path to {inner}"
    if origin.kind == "nondiff":
        return f"no derivative leads through this: {result} has no path to {inner}"
    if origin.kind == "cast":
        return f"the cast ends the path: {result} cannot require grad"
    if origin.kind == "data":
        return f"`.data` gives the bare values of {inner}: {result} has no path"
    if origin.kind == "escape":
        return f"{inner} leaves autograd here as {'a numpy array' if origin.func in ('numpy', '__array__') else 'a Python number'}"
    if origin.kind == "rewrap":
        return f"copies the values into a new tensor: {result} has no path"
    if origin.func in ("autograd.grad", "grad"):
        return f"without create_graph=True {result} has no graph of its own"
    return f"the path ends here: {result} has no path to {inner}"


def is_collective(origin: Origin) -> bool:
    """Whether values went from rank to rank here."""
    return origin.kind == "nondiff" and origin.func in GATHERING


def _regather(origin: Origin) -> Fix:
    """The own part put back in, or a gathering call with a backward."""
    like = origin.func if origin.func in ("all_to_all_single", "gather", "scatter") else "all_gather"
    other = f"`torch.distributed.nn.functional.{like}`, which has a backward"
    if like != "all_gather":
        return Fix(title=f"Call {other}", safety="unsafe")
    call = origin.place.call if origin.place is not None else None
    named = {word.arg: word.value for word in call.keywords} if call is not None else {}
    filled = named.get("tensor_list", call.args[0] if call is not None and call.args else None)
    read = named.get("tensor", call.args[1] if call is not None and len(call.args) > 1 else None)
    callee = dotted(call.func) if call is not None else None
    if origin.func != "all_gather" or callee is None or callee.rpartition(".")[2] != origin.func:
        return Fix(title=f"Gather with {other}", safety="unsafe")
    rank = f"{callee.rpartition('.')[0]}.get_rank()" if "." in callee else "rank"
    if isinstance(filled, ast.Name) and read is not None:
        own = f"`{filled.id}[{rank}] = {short(ast.unparse(read), 40)}`"
        return Fix(title=f"Put the own part back in, with its graph: {own} after it; or gather with {other}", safety="unsafe")
    return Fix(title=f"Put the own part back into the list, with its graph, or gather with {other}", safety="unsafe")


def switch_label(origin: Origin) -> str:
    switch = origin.switch
    assert switch is not None
    name = result_name(origin)
    what = f"`{name}`" if name else "what is computed"
    if switch.how == "left_on":
        return "switches grad mode off, and it was not switched on again"
    if switch.how == "checkpoint":
        return "runs its function without grad first: only what that returns gets a path"
    if switch.how == "yield":
        return f"the generator `{switch.owner}` yields inside this block, so its caller runs with grad mode off"
    if switch.how == "decorator":
        return f"everything that `{switch.owner}` computes has no graph"
    return f"everything inside has no graph: {what} loses its path here"


def computed(origin: Origin, root: str) -> str:
    """`` `features` is computed ``, or "it is computed", of a root that the reader was told of just before."""
    name = result_name(origin)
    return f"{f'`{name}`' if name and name != root else 'it'} is computed"


def why(origin: Origin, root: str) -> str:
    """The cause in one clause, for the headline."""
    name = result_name(origin)
    function = function_word(origin.place)
    switch = origin.switch
    if origin.into_leaf:
        return f"`{operation(origin)}`{function} copies its values into parameters and leaves the graph behind"
    if rule_of(origin) in ("GG301", "GG305") and switch is not None and switch.how != "library":
        text = short(switch.text, 48)
        if switch.how == "caller":
            return f"`{switch.owner}` is called {_MODES[origin.kind]}"
        if switch.how == "left_on":
            return (
                f"grad mode was switched off by `{text}`"
                + (f" in `{switch.owner}`" if switch.owner else "")
                + " and was not switched on again"
            )
        if switch.how == "checkpoint":
            return (
                f"{f'`{name}`' if name else 'it'} is computed{function} in the first run of a reentrant checkpoint, which is without grad"
            )
        if switch.how == "yield":
            return f"`{switch.owner}` yields inside its `{text}` block, so the loop that uses it runs without grad"
        if switch.how == "decorator":
            return f"`{switch.owner}` runs under `{text}`"
        return f"{f'`{name}`' if name and name != root else 'it'} is computed under `{text}`{function}"
    if rule_of(origin) in ("GG301", "GG305") and switch is not None and switch.owner is not None:
        return f"`{operation(origin)}`{function} runs under `{switch.text}`, as `{switch.owner}` is decorated"
    if rule_of(origin) in ("GG301", "GG305"):
        return f"{computed(origin, root)} with grad mode off{function}"
    done = f"`{operation(origin)}`"
    if origin.kind == "sample":
        return f"{f'`{name}`' if name else 'a value'} is drawn with {done}{function}, which gives no gradient to the distribution"
    if is_collective(origin):
        return f"{done}{function} gives plain values, without a path"
    if origin.discrete:
        indices = f" gives `{name}` as indices, which have" if origin.output and name else " has"
        return f"{done}{function}{indices} no derivative"
    if origin.func in ("autograd.grad", "grad") and origin.kind == "detach":
        return f"the gradient{f' `{name}`' if name else ''} was taken without `create_graph=True`{function}"
    inner = short(origin.inner, 32) if origin.inner else ""
    if origin.kind == "escape":
        return (
            f"{done} turns {f'`{inner}`' if inner else 'the value'} into "
            f"{'a numpy array' if origin.func in ('numpy', '__array__') else 'a plain number'}{function}"
        )
    if origin.kind == "rewrap":
        return f"{done}{function} copies values and leaves the graph behind"
    taken = name if name and name != root and "[" not in name else inner
    return f"{done} takes {f'`{taken}`' if taken else 'the value'} out of the graph{function}"


def block_of(call: str) -> str:
    """What a `with` block takes that does what a call has done: `torch.no_grad()` for `torch.set_grad_enabled(False)`."""
    return "torch.no_grad()" if "set_grad" in call.partition("(")[0] else call.removesuffix(".__enter__()")


def condition(origin: Origin) -> str | None:
    """What decides in `with torch.set_grad_enabled(phase == "train")`; None for blocks that are always off."""
    switch = origin.switch
    if switch is None or switch.how != "with":
        return None
    try:
        call = ast.parse(switch.text, mode="eval").body
    except SyntaxError:
        return None
    given = [*call.args, *(keyword.value for keyword in call.keywords)] if isinstance(call, ast.Call) else []
    name = "" if not isinstance(call, ast.Call) else ast.unparse(call.func).rpartition(".")[2]
    if name != "set_grad_enabled" or len(given) != 1 or isinstance(given[0], ast.Constant):
        return None
    return short(ast.get_source_segment(switch.text, given[0]) or ast.unparse(given[0]), 48)


def explanation(origin: Origin, root: str) -> str:
    """Why this is wrong, in a few sentences."""
    rule = rule_of(origin)
    if rule == "GG301" and origin.switch is not None and origin.switch.how == "yield":
        return (
            "A `with` block inside a generator stays open while the generator is suspended at a `yield`, and grad mode belongs "
            "to the thread: "
            "so the caller's own forward pass ran with grad mode off, and nothing it computed has a graph."
        )
    if rule == "GG301" and origin.switch is not None and origin.switch.how == "checkpoint":
        return (
            "A reentrant checkpoint runs its function under no_grad, and once more in backward. Only what the function returns "
            "gets a path then; what it leaves elsewhere in the first run (in an attribute, in a list) has none."
        )
    if rule == "GG301" and origin.switch is not None and origin.switch.how == "left_on":
        return (
            "Grad mode is a state of the thread: a call (unlike a `with` block) holds until another one undoes it. Everything "
            "computed since has no graph."
        )
    if rule == "GG301" and (asked := condition(origin)) is not None:
        return (
            f"`{asked}` was not true here, so PyTorch recorded nothing in this block. {in_words(root, True)} was computed from such a "
            "result, and backward() has no graph to follow."
        )
    if rule == "GG301":
        return (
            f"Inside `no_grad` PyTorch records nothing, also for inputs that require grad. {in_words(root, True)} was computed from such a "
            "result, so backward() has no graph to follow. Freezing a module's parameters does not need no_grad: gradients must still "
            "flow through it to what comes before."
        )
    if rule == "GG305":
        told = "In inference mode PyTorch records nothing, and the tensors made there can never take part in autograd afterwards."
        on = origin.switch is not None and origin.switch.how == "caller" and bool(origin.switch.also)
        return told + (" `torch.enable_grad()` does not end it." if on else "")
    if origin.kind == "sample":
        return (
            "`sample()` draws its value under no_grad: the parameters of the distribution get no gradient through it. "
            "`rsample()` draws reparametrized samples with a path."
        )
    if is_collective(origin):
        return (
            "A collective call of `torch.distributed` copies values between ranks and records nothing: also a rank's own part of what it "
            "fills is a copy without a graph, so no parameter behind it gets a gradient."
        )
    if rule == "GG304":
        return (
            "Comparisons, argmax, casts to integers and the like jump between values: they have no derivative (it would be zero "
            "almost everywhere), "
            "so autograd stops there and what is computed from the result does not require grad."
        )
    if origin.func in ("autograd.grad", "grad"):
        return "autograd.grad gives gradients as plain values unless it is told to record their own graph with `create_graph=True`."
    if origin.kind == "escape":
        return (
            "A Python number or a numpy array holds values only. A tensor made from it later starts anew, without the graph "
            "behind the value."
        )
    if origin.kind == "rewrap":
        return (
            "Building a new tensor (`torch.tensor`, `Variable(...)`, `nn.Parameter(...)`) copies values; the graph of what "
            "they were computed from stays behind."
        )
    if operation(origin) == ".state_dict()":
        return "`state_dict()` detaches what it gives: what is computed from it has no path back to the module's parameters."
    return "A detached tensor shares the values but not the graph: whatever is computed from it has no path back to the parameters."


def _leaves_torch(origin: Origin) -> bool:
    """Whether the value goes on to numpy or Python in the same expression (`a.detach().cpu().numpy()`): there is the real cut."""
    place = origin.place
    if place is None or place.source is None or place.node is None:
        return False
    for above in place.source.ancestors(place.node):
        if isinstance(above, ast.stmt):
            return False
        if isinstance(above, ast.Attribute) and above.attr in ("numpy", "tolist", "item"):
            return True
    return False


def fix(origin: Origin, root: str) -> Fix:
    """The change an expert would make, in words; the patch is added elsewhere."""
    rule = rule_of(origin)
    name = result_name(origin)
    what = f"`{name}`" if name else "this"
    inner = short(origin.inner, 40)
    if rule in ("GG301", "GG305") and origin.switch is not None and origin.switch.how == "library" and origin.switch.owner is not None:
        return Fix(
            title=f"Take only values from `{operation(origin)}`, and compute what is to be trained by calling the module itself on them",
            safety="manual",
            detail=f"`{origin.switch.owner}` is made for use without training. One more forward pass on what it gives has a graph.",
        )
    if origin.into_leaf:
        return Fix(
            title="Call the module with the computed values in place of its parameters: `torch.func.functional_call(module, values, x)`",
            safety="manual",
        )
    if origin.switch is not None and origin.switch.how == "caller":
        runner = f"{(origin.switch.also[0].text or '').partition('(')[0]}(...)" if origin.switch.also else None
        return recording(origin.kind == "inference", in_words(root), runner)
    if rule in ("GG301", "GG305") and origin.switch is not None:
        text = short(origin.switch.text, 40)
        if origin.switch.how == "left_on":
            title = f"Use `with {block_of(text)}:` around the part that needs it, or switch grad mode on again after it"
            return Fix(title=title, safety="manual")
        if origin.switch.how == "checkpoint":
            detail = "Or return the value from the checkpointed function, with the rest of what it computes."
            return Fix(title="Pass `use_reentrant=False` to the checkpoint", safety="safe", detail=detail)
        if origin.switch.how == "yield":
            return Fix(
                title=f"Leave the `{text}` block before the `yield`", safety="manual", detail="Collect inside the block, yield after it."
            )
        if origin.switch.how == "decorator":
            return Fix(title=f"Remove `@{text}` from `{origin.switch.owner}`, or call an undecorated version for training", safety="manual")
        asked = condition(origin)
        if asked is not None:
            return Fix(title=f"Let `{asked}` be true wherever backward() is called on the result", safety="manual")
        return Fix(
            title=f"Compute {what} outside `{text}`",
            safety="manual",
            detail="To freeze a module, use `module.requires_grad_(False)`: gradients still flow through it to its inputs.",
        )
    if rule in ("GG301", "GG305"):
        return Fix(title=f"Compute {what} with grad mode on", safety="manual")
    if origin.kind == "sample":
        return Fix(title="Draw with `rsample()`, or use the score function: `-(dist.log_prob(action) * reward)`", safety="unsafe")
    if is_collective(origin):
        return _regather(origin)
    rounded = before_rounding(origin) if rule == "GG304" else None
    if rounded is not None:
        before, rounding = rounded
        return Fix(
            title=f"Compute the loss from `{short(before, 40)}`, in front of the rounding; keep {quoted(operation(origin))} for what needs "
            "whole numbers",
            safety="manual",
            detail=f"The derivative of `{rounding}` is zero: dropping only {quoted(operation(origin))} would train nothing either.",
        )
    if rule == "GG304":
        return Fix(
            title=f"Compute the loss from {f'`{inner}`' if inner else 'the scores'} themselves; keep {quoted(operation(origin))} "
            f"for metrics",
            safety="manual",
            detail="Cross entropy for classes, probabilities (sigmoid, softmax) for masks, a straight-through estimator where a "
            "hard value is needed.",
        )
    if origin.func in ("autograd.grad", "grad"):
        return Fix(
            title="Pass `create_graph=True`",
            safety="unsafe",
            detail="The gradients then have a graph, so that a loss on them can be differentiated.",
        )
    if origin.kind == "rewrap":
        place = origin.place
        node = place.node if place is not None else None
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], (ast.List, ast.ListComp, ast.GeneratorExp, ast.Name)):
            return Fix(
                title=f"Use `torch.stack(...)` in place of `{operation(origin)}`",
                safety="unsafe",
                detail="`torch.stack` keeps the graph of every element; nested lists need one a level.",
            )
        return Fix(
            title=f"Call backward on {f'`{inner}`' if inner else 'the computed value'} itself, without `{operation(origin)}`",
            safety="unsafe",
        )
    called = (origin.place.callee_full_name if origin.place is not None else None) or ""
    if origin.kind == "escape" and called.startswith("math.") and inner and callable(getattr(torch, called[5:], None)):
        return Fix(title=f"Use `torch.{called[5:]}({inner})` in place of `{called}(...)`: it keeps the graph", safety="unsafe")
    if origin.kind == "escape" and origin.func in ("__int__", "__index__"):
        return Fix(
            title=f"Choose by {f'`{inner}`' if inner else 'the value'} in a way that has a derivative, or train it by a loss of its own",
            safety="manual",
            detail="An index jumps between positions. Interpolation (`F.grid_sample`) or a sum with weights changes smoothly.",
        )
    if origin.kind == "escape" or _leaves_torch(origin):
        return Fix(
            title=f"Stay in torch: use {f'`{inner}`' if inner else 'the tensor'} without `{operation(origin)}`, and keep numbers "
            f"for logging",
            safety="manual",
        )
    if operation(origin) == ".state_dict()":
        return Fix(
            title=f"Take the parameters themselves: `dict({inner or 'module'}.named_parameters())`, or `state_dict(keep_vars=True)`",
            safety="unsafe",
            detail="`state_dict()` gives detached tensors, for saving. Buffers come with `named_buffers()`.",
        )
    return Fix(
        title=f"Drop `{operation(origin)}`{f' from {what}' if name else ''}",
        safety="unsafe",
        detail="Keep it for what is only logged or used as a fixed target.",
    )
