"""Every private torch name that gradguard uses, in one place, each with its check and its fallback.

A new torch release that drops a name degrades the rules that need it; it never breaks training. `missing()` lists what
this torch lacks.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any, Literal, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gradguard.core.foreign_exceptions import internal_error
from gradguard.torch_compat.saved_tensors import SHOWN, Packed, Unpacked, may_unpack, packed_of, unpack

_absent: list[str] = []


def _lookup(path: str, fallback: Any) -> Any:
    found: Any = torch
    *modules, _ = path.split(".")
    if modules and modules[0] == "utils":  # its parts are not all imported with torch
        try:
            importlib.import_module(f"torch.{'.'.join(modules)}")
        except ImportError:
            pass
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            _absent.append(f"torch.{path}")
            return fallback
    return found


def missing() -> tuple[str, ...]:
    """The private names this torch does not have."""
    return tuple(_absent)


# The sequence number that the next autograd node of this thread gets; a node's own is one below what is read right after.
sequence_number: Callable[[], int] = _lookup("_C._autograd._get_sequence_nr", lambda: 0)
_cdata: Any = _lookup("_C.TensorBase._cdata", None)
_graph_task: Callable[[], int] = _lookup("_C._current_graph_task_id", lambda: -1)
_len_stack: Callable[[], int] | None = _lookup("_C._len_torch_function_stack", None)
_push: Callable[[Any], None] | None = _lookup("_C._push_on_torch_function_stack", None)
_pop: Callable[[], Any] | None = _lookup("_C._pop_torch_function_stack", None)
_stack_at: Callable[[int], Any] | None = _lookup("_C._get_function_stack_at", None)
_no_torch_function: Callable[[], AbstractContextManager[Any]] = _lookup("_C.DisableTorchFunction", nullcontext)
# How many modes stand on this thread's two stacks.
function_modes: Callable[[], int] = _len_stack or (lambda: 0)
dispatch_modes: Callable[[], int] = _lookup("_C._len_torch_dispatch_stack", lambda: 0)
# Whether `__torch_function__` of classes and modes is heard in this thread.
functions_on: Callable[[], bool] = _lookup("_C._is_torch_function_enabled", lambda: True)
_dispatch_mode_at: Callable[[int], Any] = _lookup("_C._get_dispatch_stack_at", lambda place: None)
_no_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _lookup("utils._python_dispatch._disable_current_modes", nullcontext)
# The module of `torch.vmap`, which calls its `vmap_impl`.
functorch: Any = _lookup("_functorch.apis", None)

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
ACCUMULATE_SEQ = 2**63  # AccumulateGrad nodes carry the maximum number, far above any count


def in_backward() -> bool:
    """Whether the engine runs a backward pass in this thread right now: hooks, custom Functions, checkpointing's second run."""
    return _graph_task() != -1


# Whether torch.jit.trace is recording this thread: what is asked of a tensor then goes into the traced program.
jit_tracing: Callable[[], bool] = _lookup("_C._is_tracing", lambda: False)


# Whether Dynamo is tracing, or a backend traces for it: probes then must do nothing at all. Torch's own function, which Dynamo knows.
is_compiling: Callable[[], bool] = torch.compiler.is_compiling


def like(function: Callable[..., Any], source: str) -> FunctionType:
    """The function defined by a line of source, as if it stood beside another: Dynamo goes by the file."""
    code = next(const for const in compile(source, function.__code__.co_filename, "exec").co_consts if isinstance(const, CodeType))
    return FunctionType(code, function.__globals__)


def unremarkable_is_compiling() -> Callable[[], bool]:
    """`is_compiling` for functions that Dynamo reads; Dynamo has to be imported.

    Whoever asks torch's own is taken for one that does something else in a compiled program, so that Dynamo compiles frames that it
    leaves alone otherwise, those without any operator.
    """
    copy = FunctionType(is_compiling.__code__, is_compiling.__globals__)
    try:
        torch.compiler.substitute_in_graph(copy)(like(torch.optim.Optimizer.register_step_pre_hook, "def is_compiling(): return True"))
    except internal_error():  # until 2.5 there is no way to tell Dynamo
        return is_compiling
    return copy


def unpack_in_graphs() -> None:
    """Dynamo, which has been imported, takes gradguard's unpack hook for one that hands the tensor on: it reads the hook where a backward
    pass is compiled through a graph that was made before."""
    source = "def unpack(packed): return packed.tensor if packed.hook is None else packed.hook[0](packed.hook[1])"
    try:
        torch.compiler.substitute_in_graph(unpack)(like(torch.optim.Optimizer.register_step_pre_hook, source))
    except internal_error():  # until 2.5 there is no way to tell Dynamo
        pass


# The part of Dynamo that is C's, which is there before Dynamo is imported.
eval_frame: Any = _lookup("_C._dynamo.eval_frame", None)


def never_compile(code: Any) -> None:
    """Dynamo leaves frames of this code alone, and looks at those called from them as always."""
    try:
        strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)
    except AttributeError:  # other names in older releases, which also leave alone what lies in torch's files
        pass


def register_builtin(function: Any, operator: str) -> None:
    """Has TorchScript take a function for one of its operators."""
    try:
        torch.jit._builtins._register_builtin(function, operator)
    except AttributeError:
        pass


def compiles_backward() -> bool:
    """Whether backward passes are compiled as a whole: Dynamo then compiles the hooks of nodes as well."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return any(getattr(module, f"compiled_autograd_enabled{how}", False) for how in ("", "_force_eager"))


def can_trace_ops() -> bool:
    """Whether a function mode can be slipped under the user's own ones."""
    return None not in (_len_stack, _push, _pop, _stack_at)


def mode_is_active(mode: Any) -> bool:
    """Whether this very function mode stands on this thread's stack."""
    if _len_stack is None or _stack_at is None:
        return False
    size = _len_stack()  # asked some ten times a traced step, mostly of a stack of one
    return size > 0 and (_stack_at(0) is mode or any(_stack_at(i) is mode for i in range(1, size)))


class _Hidden(threading.local):
    depth = 0  # of `quiet` blocks under modes of the program's


_hidden = _Hidden()


def _show_modes() -> None:
    _hidden.depth -= 1


def under_dispatch_modes() -> bool:
    """Whether a dispatch mode is on in this thread, one that `quiet` keeps from looking included."""
    return bool(_hidden.depth or dispatch_modes())


def quiet() -> AbstractContextManager[Any]:
    """What gradguard does with tensors inside is seen by no mode and no tensor subclass of the user's, nor by the op probe."""
    if not _foreign_modes():
        return _no_torch_function()
    both = ExitStack()
    both.enter_context(_no_torch_function())
    both.enter_context(_no_dispatch_modes())
    _hidden.depth += 1
    both.callback(_show_modes)
    return both


class OtherRanksNeeded(Exception):
    """What a rule asked for is held by several ranks."""


class _ThisRank(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives, and operations on tensors that answer for themselves, as DTensors do."""

    on = False  # one that an exception from outside has left on the stack refuses nothing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on and (func.namespace in _COLLECTIVES or any(kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types)):
            raise OtherRanksNeeded(str(func))
        if type(args[0] if args else None) in _NUMBERS and [str(each.type) for each in func._schema.arguments].count("Tensor") == 1:
            args = (torch.tensor(args[0], dtype=_NUMBERS[type(args[0])]), *args[1:])  # `x * 0.5` saves 0.5, which modes see as a number
        return func(*args, **(kwargs or {}))


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_NO_DISPATCH = torch.Tensor.__torch_dispatch__  # what Parameters, which are among the types, have
_COLLECTIVES = frozenset({"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"})


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def this_rank_only() -> Iterator[None]:
    """Nothing inside communicates, since a diagnosis may be made on one rank alone; inside `quiet()`.

    What would raises OtherRanksNeeded. `own_part` gives what can be read.
    """
    if not several_ranks():
        yield
        return
    mode = _ThisRank()  # type: ignore[no-untyped-call]
    try:
        with mode:
            mode.on = True
            yield
    finally:
        mode.on = False


def _foreign_modes() -> bool:
    """Whether a dispatch mode other than `this_rank_only` is on."""
    size = dispatch_modes()
    return size > 1 or (size == 1 and type(_dispatch_mode_at(0)) is not _ThisRank)


def others_watch() -> bool:
    """Whether any function or dispatch mode is on in this thread, which would see what gradguard does with tensors."""
    return bool(_foreign_modes() or function_modes())


def call_alone(mode: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `torch.overrides.handle_torch_function` does for arguments without a `__torch_function__` where this mode, taken off the
    stack meanwhile, is the only one there; without its look at every argument's class and its context manager."""
    assert _pop is not None and _push is not None
    _pop()
    try:
        return mode.__torch_function__(function, (), args, kwargs)
    finally:
        _push(mode)


def stands_alone(mode: Any) -> bool:
    """Whether this function mode is the only one on this thread's stack."""
    return _len_stack is not None and _stack_at is not None and _len_stack() == 1 and _stack_at(0) is mode


def users_modes() -> int:
    """How many function modes stand on this thread's stack, those not counted that `insert_mode` put there."""
    assert _len_stack is not None
    return _len_stack() - sum(_inserted(i) for i in range(_len_stack()))


def users_mode(index: int) -> Any:
    """The function mode at this place of the stack, as `users_modes` counts."""
    assert _len_stack is not None and _stack_at is not None
    seen = [i for i in range(_len_stack()) if not _inserted(i)]
    return _stack_at(seen[index] if 0 <= index < len(seen) else max(index, _len_stack()))


def _inserted(index: int) -> bool:
    assert _stack_at is not None
    return getattr(type(_stack_at(index)), "HIDDEN", False) is True


def insert_mode(mode: Any) -> None:
    """Puts a function mode at the bottom of this thread's stack.

    There, a user's own `with SomeMode():` that ends after ours was inserted pops its own mode, not ours. `torch.set_default_device`
    does the same for the same reason, and insists on standing lowest of those that `users_modes` counts when it is taken away.
    """
    if _len_stack is None or _push is None or _stack_at is None:
        return
    if not _len_stack():
        _push(mode)
        return
    stack = [_stack_at(i) for i in range(_len_stack())]
    _restack([mode, *stack])


def remove_mode(mode: Any) -> None:
    """Takes a function mode off this thread's stack, wherever it stands; nothing happens if it is not there."""
    if _len_stack is None or _pop is None or _stack_at is None or not mode_is_active(mode):
        return
    if _len_stack() == 1:
        _pop()
        return
    stack = [_stack_at(i) for i in range(_len_stack())]
    _restack([other for other in stack if other is not mode])


def _restack(wanted: list[Any]) -> None:
    """Makes these the function modes of this thread, bottom first. None gets lost, even if an exception from outside comes in between."""
    try:
        _restacked(wanted)
    except BaseException:
        _restacked(wanted)
        raise


def _restacked(wanted: list[Any]) -> None:
    assert _len_stack is not None and _push is not None and _pop is not None and _stack_at is not None
    same = 0
    while same < min(len(wanted), _len_stack()) and _stack_at(same) is wanted[same]:
        same += 1
    while _len_stack() > same:
        _pop()
    for mode in wanted[same:]:
        _push(mode)


def node_sequence(node: Any) -> int:
    """A graph node's sequence number (-1 where it has none); AccumulateGrad nodes report `ACCUMULATE_SEQ` or more."""
    try:
        return int(node._sequence_nr())
    except internal_error():
        return -1


def is_a(value: Any, kind: type) -> bool:
    """isinstance() by the class that an object has, not by the one it claims (`Mock(spec=...)`), and without asking the object."""
    return kind in type(value).__mro__


def grad_fn_of(tensor: Any) -> Any:
    """A tensor's graph node; None where there is none or none can be had: a view whose base was written under no_grad raises when it is
    asked, and what only looks like a tensor has whatever it has."""
    if not is_a(tensor, torch.Tensor):
        return None
    try:
        return tensor.grad_fn
    except internal_error():
        return None


def only_leaf(node: Any, most: int) -> Any:
    """The leaf that a node's value is a plain function of (`scale.exp()`), through at most so many nodes with one input each."""
    for _ in range(most):
        following = [source for source, _ in node.next_functions if source is not None]
        if len(following) != 1:
            return None
        node = following[0]
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            return leaf
    return None


def leaves_behind(tensors: list[Any], most: int) -> tuple[list[Any], list[Any]]:
    """The leaves that tensors were computed from, and the graph nodes on the way, of which there are so many at most."""
    nodes = [node for tensor in tensors if (node := grad_fn_of(tensor)) is not None]
    found = [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    seen = set(nodes)
    for node in nodes:  # grows while it is read
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        for source, _ in node.next_functions:
            if source is not None and source not in seen and len(seen) < most:
                seen.add(source)
                nodes.append(source)
    return found, nodes


def is_a_loss(tensor: Any, most: int) -> bool:
    """Whether a tensor is a single number that one of torch's loss functions went into, among so many graph nodes at most."""
    node = grad_fn_of(tensor)
    if tensor.dim() or node is None:
        return False
    nodes = [node]
    seen = set(nodes)
    for node in nodes:  # grows while it is read
        if "Loss" in node.name() or "CrossEntropy" in node.name():
            return True
        for source, _ in node.next_functions:
            if source is not None and source not in seen and len(seen) < most:
                seen.add(source)
                nodes.append(source)
    return False


def output_metadata(node: Any) -> tuple[int, ...] | None:
    """The shape of a node's first output as the node itself tells it; None in releases whose nodes do not (2.4)."""
    try:
        return tuple(int(length) for length in node._input_metadata[0].shape)
    except internal_error():
        return None


def output_dtype(node: Any, output: int = 0) -> torch.dtype | None:
    """The dtype of a node's output as the node itself tells it; None in releases whose nodes do not (2.4)."""
    try:
        dtype = node._input_metadata[output].dtype
    except internal_error():
        return None
    return dtype if isinstance(dtype, torch.dtype) else None


def storage_key(tensor: torch.Tensor) -> int | None:
    """Identifies the memory a tensor lives in, as long as that memory lives; None for tensors without a storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except internal_error():  # sparse, meta-like, functorch-wrapped tensors and subclasses without storage
        return None


def storage_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """Keeps the `storage_key` of a tensor from being another storage's, and none of its memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def memory_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """The storages behind a tensor, as pairs of `storage_key` and bytes: one of an ordinary tensor, several of a sparse one."""
    if tensor.layout == torch.strided:
        try:
            storage = own_part(tensor).untyped_storage()
            return [(int(storage._cdata), storage.nbytes())] if storage.device.type != "meta" else []
        except internal_error():  # functorch-wrapped tensors, subclasses without storage
            return []
    parts = _SPARSE_PARTS.get(tensor.layout, ())
    return [found for name in parts for found in memory_of(getattr(torch.Tensor, name)(tensor))]


_COMPRESSED = {False: ("crow_indices", "col_indices", "values"), True: ("ccol_indices", "row_indices", "values")}
_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED[False],
    torch.sparse_bsr: _COMPRESSED[False],
    torch.sparse_csc: _COMPRESSED[True],
    torch.sparse_bsc: _COMPRESSED[True],
}


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; any other tensor itself.

    Values are read from this part only: operations on a DTensor may communicate, and no other rank takes part in them.

    Raises:
        ValueError: a tensor with a `__torch_dispatch__` of its own, which would see the operations that read it.
    """
    if type(tensor) in _PLAIN:
        return tensor
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if sharded is not None and issubclass(type(tensor), sharded):
        return own_part(cast(Any, tensor)._local_tensor)
    if has_own_dispatch(tensor):
        raise ValueError("the values of this tensor are not to be had without its own code")
    return tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind a tensor's elements. FSDP frees that of gathered parameters, which are still saved in the
    graph, by `storage.resize_(0)`: reading them then is a segmentation fault. Fake tensors have a device and the storage of a meta
    tensor: a constant that `torch.export` made and a module kept."""
    try:
        storage = tensor.untyped_storage()
        return storage.device.type != "meta" and (bool(storage.nbytes()) or not tensor.numel())
    except internal_error():  # tensors without a storage find their values otherwise
        return True


def numpy_reachable(tensor: torch.Tensor) -> bool:
    """Whether numpy can write this tensor's memory: such storages are not resizable."""
    try:
        return not tensor.untyped_storage().resizable()
    except internal_error():
        return False


def implementation(tensor: torch.Tensor) -> int:
    """Which of C++'s tensors stands behind a Python object: another one after `torch.utils.swap_tensors`; 0 where that can't be seen."""
    return 0 if _cdata is None else int(_cdata.__get__(tensor))


def version_of(tensor: torch.Tensor) -> int | None:
    """The version counter; inference tensors have none."""
    try:
        return int(tensor._version)
    except internal_error():
        return None


_raw_names: dict[type, tuple[str, ...]] = {}


def _raw_saved_names(node: Any) -> tuple[str, ...]:
    kind = type(node)
    if "_forward_cls" in kind.__dict__:  # of a custom Function, which may capture anything: all of them have what their base has
        kind = kind.__mro__[1]
    names = _raw_names.get(kind)
    if names is None:
        if len(_raw_names) > 5_000:
            _raw_names.clear()
        names = _raw_names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return names


def saved_slots(node: Any) -> Iterator[tuple[str, Any]]:
    """The saved variables of a node, unchecked: pairs of (name such as `self`, `torch._C._autograd.SavedTensor`).

    Yields nothing for nodes whose saved values are gone (a freed graph). Values that are hidden (those of C++ Functions, and of an
    operation that wrote a view in place) are known where the saved-tensor probe saw them saved; they have no name.
    """
    names = _raw_saved_names(node)
    if not names:
        for i, packed in enumerate(packed_of(node)):
            yield f"saved[{i}]", packed
    for name in names:
        try:
            value = getattr(node, name)
        except internal_error():
            continue
        if value is None:
            continue
        short = name.removeprefix("_raw_saved_")
        unpacked = ("saved_tensors" if hasattr(type(node), "_forward_cls") else f"_saved_{short}") if may_unpack(node) else None
        if isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                yield f"{short}[{i}]", item if unpacked is None else Unpacked(node, unpacked, i)
        else:
            yield short, value if unpacked is None else Unpacked(node, unpacked)


def saved_data(slot: Any) -> torch.Tensor | None:
    """The tensor in a saved variable, without the version check that unpacking makes; None where torch hides it or its memory is freed."""
    try:
        data = slot.data
    except internal_error():
        return None
    if type(data) is Packed:
        data = data.tensor
    return data if isinstance(data, torch.Tensor) and has_memory(data) else None


def held_here(node: Any) -> Iterator[Packed]:
    """What gradguard's own hook holds of a node."""
    for _, slot in saved_slots(node):
        try:
            packed = slot if type(slot) is Packed else slot.data
        except internal_error():
            continue
        if type(packed) is Packed:
            yield packed


def waits_for_its_result(node: Any) -> bool:
    """Whether a node saves its own result and has not yet: `torch._foreach_exp_` makes all its nodes before the first saves anything."""
    if not SHOWN or not hasattr(type(node), "_raw_saved_result"):
        return False
    try:
        slot = node._raw_saved_result
        return not isinstance(slot, (tuple, list)) and slot.data is None and slot.unpack_hook is None
    except internal_error():
        return False


def kept_by_hook(slot: Any) -> list[torch.Tensor]:
    """The tensors that a hook of the program's keeps in place of a saved one, where they can be read without running it: those of torch's
    own `save_on_cpu`, and the inputs from which non-reentrant checkpointing will compute again."""
    hook = unpacking_hook(slot)
    if hook is None:
        return []
    try:
        kept = slot.data
        if type(kept) is Packed:
            kept = None if kept.hook is None else kept.hook[1]
        found = list(kept) if type(kept) in (tuple, list) else [kept]
        frame = _closed_over(hook, "frame")
        found += [saved_data(each) for each in getattr(frame, "saved_args", ()) if type(each) is torch._C._autograd.SavedTensor]
        saver = getattr(frame, "input_saver", None)  # until 2.12
        found += [saved_data(each) for _, each in saved_slots(saver)] if saver is not None else []
    except internal_error():
        return []
    return [each for each in found if is_a(each, torch.Tensor) and has_memory(each)]


def unpacking_hook(slot: Any) -> Any:
    """The program's hook that makes the value of a saved variable; None where there is none, or only gradguard's."""
    hook = getattr(slot, "unpack_hook", None)
    if hook is not unpack:
        return hook
    packed = slot.data
    return packed.hook[0] if type(packed) is Packed and packed.hook is not None else None


def _short_name(raw_name: str) -> str:
    return raw_name.removeprefix("_raw_saved_")


def held_by_hook(node: Any, name: str) -> bool:
    """Whether a hook holds the saved value `name` of a node: unpacking it runs foreign code (checkpointing computes again)."""
    try:
        slot = getattr(node, f"_raw_saved_{name}")
    except internal_error():
        return False
    slots = slot if isinstance(slot, (tuple, list)) else (slot,)
    return any(unpacking_hook(one) is not None for one in slots)


def check_saved(node: Any) -> str | None:
    """PyTorch's own verdict on a node's saved values: its error text if reading them raises, else None.

    Reads the public-looking `_saved_*` properties, which unpack and so compare versions exactly as backward does. What a
    hook holds is left alone.
    """
    names = ["saved_tensors"] if hasattr(type(node), "_forward_cls") and not held_by_hook(node, "tensors") else []
    names += [f"_saved_{name}" for name in map(_short_name, _raw_saved_names(node)) if not held_by_hook(node, name)]
    for name in names:
        try:
            getattr(node, name, None)
        except internal_error(RuntimeError) as error:
            return str(error)
        except internal_error():
            continue
    return None if names else next((verdict for packed in packed_of(node) if (verdict := packed.verdict()) is not None), None)


def saved_state(node: Any) -> Literal["held", "freed", "nothing"]:
    """Whether a node's saved values are still there, without unpacking any that a hook holds (checkpointing would recompute).

    "nothing": the node saves no tensor, so nothing shows whether a backward went through it.
    """
    verdict: Literal["held", "freed", "nothing"] = "nothing"
    for name in _raw_saved_names(node):
        try:
            value = getattr(node, name)
        except internal_error(RuntimeError):  # lists of saved values and custom Functions answer with the error itself
            return "freed"
        except internal_error():
            continue
        single = not isinstance(value, (tuple, list))
        for slot in (value,) if single else value:
            if slot is None:
                continue
            if getattr(slot, "unpack_hook", None) is not None or _slot_data(slot) is not None:
                verdict = "held"
            elif single:  # empty: an optional that was never saved, or a value that was let go; only reading tells, and no hook is there
                try:
                    if isinstance(getattr(node, name.replace("_raw_saved_", "_saved_")), torch.Tensor):
                        verdict = "held"
                except internal_error(RuntimeError):
                    return "freed"
                except internal_error():
                    continue
    return verdict


def _slot_data(slot: Any) -> Any:
    try:
        return slot.data
    except internal_error():
        return None


def parametrization_cache() -> list[torch.Tensor]:
    """The tensors that an open `torch.nn.utils.parametrize.cached()` keeps."""
    module = sys.modules.get("torch.nn.utils.parametrize")
    kept = getattr(module, "_cache", None)
    return [value for value in list(kept.values()) if isinstance(value, torch.Tensor)] if isinstance(kept, dict) else []


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Whether a `__torch_dispatch__` answers for this tensor: such a tensor may have no memory of its own, though it says it has."""
    try:
        return bool(torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python))
    except internal_error():
        return type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter


def checkpointed_function(frame: Any) -> Any:
    """The function of a non-reentrant checkpoint, by torch's record of its forward (`_CheckpointFrame`); None where that is another's."""
    return _closed_over(getattr(frame, "recompute_fn", None), "fn")


def _closed_over(function: Any, name: str) -> Any:
    """A variable of an outer function that a function of torch's uses; None where there is none."""
    if type(function) is not FunctionType or not str(function.__module__).startswith("torch."):
        return None
    try:
        return cast(Any, function).__closure__[function.__code__.co_freevars.index(name)].cell_contents
    except (IndexError, TypeError, ValueError):
        return None


def ddp_finds_tensors(value: Any) -> bool:
    """Whether DistributedDataParallel's search for unused parameters finds a tensor in what forward returned; True where that cannot be
    asked. Which kinds of containers it looks into grew over the years."""
    try:
        from torch.nn.parallel import distributed

        search: Any = distributed._find_tensors
        return any(True for _ in search(value))
    except internal_error():
        return True
