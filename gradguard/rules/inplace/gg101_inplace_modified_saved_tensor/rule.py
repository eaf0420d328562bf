"""# GG101 inplace-modified-saved-tensor

## What it is
An in-place operation (`x += 1`, `x.relu_()`, `x[i] = v`, `out=`, `nn.ReLU(inplace=True)`, a numpy write) changed a value that
another operation had saved for its backward pass.

## Why it is wrong
Many derivatives are computed from values of the forward pass: sigmoid's from its own output, a product's from the other
factor. When those values are overwritten before `backward()`, the gradient can no longer be computed. PyTorch notices by a
counter that every in-place operation raises and refuses. It does not notice writes by numpy into shared memory
(`x.detach().numpy()`): there the gradient is silently wrong, and gradguard compares the contents instead.

## Example
    probs = torch.sigmoid(logits)   # saves its result
    probs[probs < 0.1] = 0.1        # writes over it
    loss = criterion(probs, labels)
    loss.backward()                 # RuntimeError here, three lines too late

## Use instead
    probs = torch.sigmoid(logits).clamp(min=0.1)

An operation that makes a new tensor instead of writing into the old one. `detach()`, views and slices share memory: take a
`clone()` (or `.copy()` in numpy) before writing into them.

## Fix safety
Replacing `x += y` by `x = x + y` is unsafe where other code relies on seeing the change through another name.

## When it speaks, what silences it
For the exception: always. For numpy writes: in traced steps, before backward, when the contents of memory that numpy can
write differ from what was saved. The boundary to GG109: a write by numpy into a saved value is GG101; a write through `.data`
is GG109, as is one whose writer cannot be told. Optimizer steps and updates of parameters are GG102, buffers of modules GG108.
"""

from __future__ import annotations

import ast

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import inside, reads
from gradguard.analysis.program.memory import peel
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import modules_in
from gradguard.fixes.edits import appended, before, edit_of, patched
from gradguard.rules.base import Rule
from gradguard.rules.inplace import spans, threads
from gradguard.rules.inplace.aliases import is_loop_target, is_view
from gradguard.rules.inplace.classify import kind_of
from gradguard.rules.inplace.flags import Flag, flag_argument, flag_of, holder_of
from gradguard.rules.inplace.gg101_inplace_modified_saved_tensor.detached_alias import detached
from gradguard.rules.inplace.gg101_inplace_modified_saved_tensor.rebinding import reaches_nobody, returned_instead
from gradguard.rules.inplace.last_write import last_writer
from gradguard.rules.inplace.numpy_write import numpy_written, told
from gradguard.rules.inplace.renormed import renormed
from gradguard.rules.inplace.repairs import drawn, drop_argument, out_of_place
from gradguard.rules.inplace.spans import Target, short
from gradguard.rules.inplace.stories import story_of
from gradguard.rules.inplace.unseen import screen
from gradguard.rules.inplace.write_history import DETACHED, MODIFIED, Story, Write

CODE, NAME = "GG101", "inplace-modified-saved-tensor"


def recognise(incident: Incident) -> Diagnosis | None:
    """The saved value, the op that saved it and the write that broke it."""
    if incident.moment == "before_backward":
        found = numpy_written(incident)
        return told(incident, CODE, NAME) if found is not None and found[1].writes else None
    if incident.says(DETACHED):
        return detached(incident, CODE, NAME)
    story = story_of(incident)
    if story is None or kind_of(story) != "value":
        return None
    return renormed(story, CODE, NAME) or threads.told(story, CODE, NAME) or spans.with_guesses(_told, story)


def _told(story: Story, write: Write) -> Diagnosis:
    incident = story.incident
    target = Target(story, write)
    place = write.place
    flag = _flag(story, write)
    culprit, labels = _culprit(story, write, target, flag)
    module = None
    if write.module is not None:
        word, path = spans.module_word(write.module, incident)
        module = path
        subject = f"{word}" + (f" at `{path}`" if path else "")
    else:
        text = short(place.text if place else write.func)
        subject = f"`{text}`" if text else ""
    saved_by = f"which `{story.op_word}` had saved for its backward pass"
    writer = last_writer(story.mismatch)
    by = f" by `{writer}`" if writer else ""
    headline = f"{subject} writes over {target.phrase}, {saved_by}"
    if not subject:
        headline = f"{target.phrase}, {saved_by}, was written over in place{by}"
    facts = spans.tensor_facts(story, target.name)
    related = spans.compact(
        [
            spans.saved_span(story),
            *target.spans(),
            spans.helper_span(write, target.chain),
            *labels,
            spans.backward_span(story),
        ]
    )
    saved = f"`{target.name}`" if target.name else "It"
    made = write.version if write.version is not None else story.mismatch.found
    explanation = (
        f"{_sentence(spans.why(story))}. {saved} was saved at version {story.mismatch.expected}; the write made it version {made}, "
        "and the value that backward needs is gone."
    )
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=headline,
        culprit=culprit,
        related=spans.without(related, culprit),
        tensors=[facts.model_copy(update={"module": module})],
        explanation=explanation,
        notes=spans.other_writes(story),
        fixes=_fixes(story, write, target, flag),
        avoid=[spans.NO_DATA],
    )


def _sentence(clause: str) -> str:
    return clause[:1].upper() + clause[1:]


def _flag(story: Story, write: Write) -> Flag | None:
    if write.module is None:
        return None
    files = [view.frame.f_code.co_filename for view in story.incident.user_frames]
    if write.place is not None:
        files.append(write.place.file)
    return flag_of(write.module, _roots_of(story, write.module), files)


def _roots_of(story: Story, module: nn.Module) -> list[nn.Module]:
    """The roots that hold the module: no other's files can have built it."""
    return [root for _, root in story.incident.names.modules if any(child is module for child in modules_in(root))]


def _culprit(story: Story, write: Write, target: Target, flag: Flag | None) -> tuple[SourceSpan | None, list[SourceSpan]]:
    """The culprit's span, and further spans on the way to it."""
    place = write.place
    if place is None:
        return (None, []) if flag is None else (flag.span.model_copy(update={"role": "culprit"}), [])
    label = f"writes over `{target.name}`" if target.name else "writes over the saved value"
    if target.written and target.written != target.name:
        label += f" through `{target.written}`"
    if write.version is not None:
        label += f": version {write.version - 1} becomes {write.version}"
    if write.module is None:
        return place.span(label, "culprit"), []
    word, path = spans.module_word(write.module, story.incident)
    if flag is not None and flag.sure and not _called_by_name(story, write, place):
        # the line that calls the container says nothing about which of its children is to blame
        culprit = flag.span.model_copy(update={"role": "culprit", "label": f"{word} works in place: {label}"})
        return culprit, [place.span(f"runs it as `{path}`" if path else "runs it here", "changed")]
    return place.span(f"{word} {label}", "culprit"), [] if flag is None else [flag.span]


def _called_by_name(story: Story, write: Write, place: ResolvedSite) -> bool:
    """Whether the line calls this very module (`self.dropout(h)`), not a container of it."""
    held = None if write.module is None else holder_of(write.module, [root for _, root in story.incident.names.modules])
    called = (place.callee or "").rpartition(".")[2]
    return held is not None and not held[1].isdigit() and called == held[1]


def _fixes(story: Story, write: Write, target: Target, flag: Flag | None) -> list[Fix]:
    place = write.place
    fixes: list[Fix] = []
    if write.module is not None:
        fixes.append(_without_flag(write, flag))
    elif place is not None:
        fresh = [] if reaches_nobody(place, target.written) else drawn(place)
        fixes += (
            [_joined(place, target)] if _reads_what_it_writes(story, place) else _moved(write, place) or fresh or _new_tensor(place, target)
        )
    if write.module is None:
        fixes += _copy_for_the_op(story, target)
    if any(link.call in ("detach", "data") for link in target.chain):
        link = next(link for link in target.chain if link.call in ("detach", "data"))
        text = link.text if link.text.endswith(")") or link.call == "data" else f"{link.base}.detach()"
        fixes.append(
            Fix(
                title=f"copy before writing: `{short(text, 50)}.clone()`",
                safety="safe",
                detail="`detach()` and `.data` cut the graph but share the memory",
            )
        )
    return fixes


def _copy_for_the_op(story: Story, target: Target) -> list[Fix]:
    """A copy as the saving op's input: nothing writes over that."""
    saved = story.saved_at
    if story.mismatch.slot in ("result", "output", "result0") or saved is None or saved.source is None or saved.call is None:
        return []
    names = {name for name in (target.name, target.written) if name}
    read = [item for item in saved.call.args if dotted(peel(item)[0]) in names]
    receiver = saved.call.func.value if isinstance(saved.call.func, ast.Attribute) else None
    if not read and receiver is not None and dotted(peel(receiver)[0]) in names:
        read = [receiver]
    if len(read) != 1:
        return []
    text = saved.source.flat(read[0])
    alone = all(_within(story, item.seq, saved) for item in story.incident.mismatches if item.storage == story.mismatch.storage)
    diff = patched(saved.source, appended(read[0], ".clone()")) if alone else None
    return [
        Fix(
            title=f"give `{story.op_word}` a copy of its own at line {saved.line}: `{short(text, 50)}.clone()`",
            safety="safe" if alone else "manual",
            patch=diff,
            detail="it then saves the copy, which nothing writes over" + ("" if alone else "; other lines that read it need the same"),
        )
    ]


def _within(story: Story, seq: int, saved: ResolvedSite) -> bool:
    """Whether a node that saved the value as well was made by the very same call."""
    place = story.incident.place_of_node(seq)
    return place is not None and (place.file, place.line, place.column) == (saved.file, saved.line, saved.column)


def _without_flag(write: Write, flag: Flag | None) -> Fix:
    kind = type(write.module).__name__
    if flag is None:
        return Fix(
            title=f"build this `nn.{kind}` without `inplace=True`",
            safety="safe",
            detail="what it computes stays the same, it only takes a new tensor to do so",
        )
    diff = None
    if isinstance(flag.node, ast.Call):
        argument = flag_argument(flag.node, type(write.module))
        edit = None if argument is None else drop_argument(flag.node, argument)
        diff = None if edit is None else patched(flag.source, [edit])
        return Fix(
            title=f"take `inplace=True` off the `nn.{kind}` at line {flag.span.line}",
            safety="safe",
            patch=diff,
            detail="what it computes stays the same, it only takes a new tensor to do so",
        )
    off = [] if not isinstance(flag.node, ast.Assign) else edit_of(flag.node.value, "False")
    return Fix(
        title=f"do not set `{short(flag.span.text)}` (line {flag.span.line}) on this `nn.{kind}`",
        safety="safe",
        patch=patched(flag.source, off) if off else None,
        detail="an in-place module may only follow an operation that does not need its own output in backward",
    )


def _reads_what_it_writes(story: Story, place: ResolvedSite) -> bool:
    """`x[:, h:] = x[:, h:] * s`: the value is saved by the very statement that overwrites it, and no copy made before helps."""
    saved, node = story.saved_at, place.statement
    if saved is None or not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Subscript):
        return False
    return saved.file == place.file and node.lineno <= saved.line <= (node.end_lineno or node.lineno)


def _joined(place: ResolvedSite, target: Target) -> Fix:
    name = target.written or target.name or "x"
    return _copied_for_write(place, target) or Fix(
        title=f"join the parts to a new tensor (`torch.cat`), or fill a copy from `{name}`: `out = {name}.clone()`, `out[...] = ...`",
        safety="manual",
        detail=f"what is read must stay as it is: read from `{name}`, write into the other",
    )


def _moved(write: Write, place: ResolvedSite) -> list[Fix]:
    """New data copied into a kept buffer by a helper: the call comes too early."""
    called, node = write.caller, place.node
    if called is None or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "copy_":
        return []
    if place.source is None or not node.args:
        return []
    return [
        Fix(
            title=f"call `{short(called.text, 50)}` (line {called.line}) after the backward that still needs the old values",
            safety="unsafe",
        ),
        Fix(
            title=f"put the new tensor in the old one's place: `{place.source.flat(node.func.value)} = {place.source.flat(node.args[0])}`",
            safety="unsafe",
        ),
    ]


def _new_tensor(place: ResolvedSite, target: Target) -> list[Fix]:
    made = out_of_place(place)
    if made is not None:
        text, diff = made
        if is_loop_target(place, target.written):
            return [Fix(title="build a new list of the changed tensors, in place of writing into each in a loop", safety="manual")]
        used = isinstance(place.node, ast.Call) and not isinstance(place.statement, ast.Expr)  # its value goes on where it stands
        if target.written is not None and not used and reaches_nobody(place, target.written):
            return [returned_instead(place, target.written, text)]
        local = target.written is not None and not target.chain and target.written.isidentifier() and not is_view(place, target.written)
        return [
            Fix(
                title=f"make a new tensor instead: `{short(text, 90)}`",
                safety="safe" if local else "unsafe",
                patch=diff,
                detail=None if local else "other names of the same memory no longer see the change",
            )
        ]
    return [_for_assignment(place, target)]


def _for_assignment(place: ResolvedSite, target: Target) -> Fix:
    """Advice for `x[i] = v` and its like, which have no mechanical counterpart."""
    name = target.name or target.written or "x"
    written = target.written or name
    node = place.node
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript) and place.source is not None:
        index, value = node.targets[0].slice, place.source.flat(node.value)
        if target.chain and (copy := _copied_before(target)) is not None:
            return copy
        if isinstance(index, (ast.Compare, ast.BoolOp)) or (isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.Invert)):
            mask = place.source.flat(index)
            new = f"{name} = torch.where({mask.replace(written, name)}, {value}, {name})"
            diff = None
            if name == written and "torch" in place.source.imports and isinstance(node.value, (ast.Constant, ast.Name, ast.UnaryOp)):
                whole = (node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or 0)
                diff = patched(place.source, [(whole, new)])
            return Fix(title=f"make a new tensor instead: `{short(new, 90)}`", safety="unsafe", patch=diff)
        if isinstance(node.value, (ast.Constant, ast.UnaryOp)) and isinstance(index, (ast.Name, ast.Attribute)):
            mask = place.source.flat(index)
            new = f"{name} = {name}.masked_fill({{}}, {value})"
            if (copy := _copied_for_write(place, target)) is not None:
                return copy.model_copy(update={"detail": f"where `{mask}` is a mask of its shape, `{new.format(mask)}` does the same"})
            return Fix(
                title=f"make a new tensor instead: `{new.format('mask')}`, with `{mask}` as a mask of its shape",
                safety="manual",
                detail=f"such as `{mask}.unsqueeze(-1)`, where `{mask}` picks rows",
            )
        constant = isinstance(node.value, (ast.Constant, ast.UnaryOp))
        if (copy := _copied_for_write(place, target)) is not None:
            return copy
        if place.enclosing_loops and not constant:
            return Fix(
                title=(
                    "collect the pieces in a Python list and join them after the loop "
                    f"(`torch.stack(pieces)`) instead of writing them into `{name}`"
                ),
                safety="manual",
                detail=f"within the loop use the piece itself, not a view of `{name}`",
            )
        return Fix(
            title=f"build the changed `{name}` as a new tensor (`torch.cat`, `torch.stack`, `torch.where`) instead of assigning into it",
            safety="manual",
        )
    return Fix(title=f"write into a copy: `{name}.clone()`, or use an operation that returns a new tensor", safety="manual")


def _copied_for_write(place: ResolvedSite, target: Target) -> Fix | None:
    """A copy of a local variable right before each write into it: what was saved stays as it is."""
    name, statement = target.written, place.statement
    if name is None or target.chain or place.source is None or statement is None or not name.isidentifier():
        return None
    if is_view(place, name) or reaches_nobody(place, name) or is_loop_target(place, name):
        return None
    looped = bool(place.enclosing_loops)
    insert, edits = [before(place.source, statement, f"{name} = {name}.clone()")], []
    if isinstance(statement, ast.Assign) and reads(statement.value, name):
        piece = _unused_name(place.source, "piece")  # computed from the old tensor, which stays as it is
        insert.insert(0, before(place.source, statement, f"{piece} = {place.source.segment(statement.value)}"))
        edits = edit_of(statement.value, piece)
    return Fix(
        title=f"write into a copy: `{name} = {name}.clone()` before line {place.line}"
        + (", once the new value is computed" if edits else ""),
        safety="unsafe",
        detail=(
            f"one copy an iteration; where that is too much memory, collect the pieces in a list and join them after the loop "
            f"(`torch.stack(pieces)`), and read the piece itself, not a view of `{name}`"
            if looped
            else f"other names of the same memory no longer see the change; `torch.cat` of the parts does without the copy of `{name}`"
        ),
        patch=patched(place.source, edits, insert),
    )


def _unused_name(source: Source, name: str) -> str:
    """The name, or the name with underscores, that the file does not use yet."""
    taken = {node.id for node in inside(source.tree, ast.Name)}
    while name in taken:
        name += "_"
    return name


def _copied_before(target: Target) -> Fix | None:
    """A copy of the value before the helper gets it: the names of two functions do not mix, and the helper may stay as it is."""
    link, place = target.chain[-1], target.write.caller
    if link.call != "argument" or place is None or place.source is None or place.statement is None or not link.base.isidentifier():
        return None
    line = f"{link.base} = {link.base}.clone()"
    called = (place.callee or "the helper").rpartition(".")[2]
    return Fix(
        title=f"let `{called}` write into a copy: `{line}` before the call at line {place.line}",
        safety="unsafe",
        detail="other names of the same memory no longer see the change",
        patch=patched(place.source, insert=[before(place.source, place.statement, line)]),
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="A value saved for backward was changed in place.",
    recognise=recognise,
    moments=frozenset({"error", "before_backward"}),
    priority=10,
    messages=(MODIFIED, DETACHED),
    traced_only=True,
    screen=screen,
)
