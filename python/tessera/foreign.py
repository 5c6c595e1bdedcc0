"""What other packages read of a module before they wrap it, answered by sharded ones."""

from __future__ import annotations

import sys
import types
import weakref

from torch import nn

from .world import size

_IGNORED, _PREPARED = "_ddp_params_and_buffers_to_ignore", "_is_accelerate_prepared"


def refuse_wrapping(*_):
    raise RuntimeError("[tessera] a sharded module can't be wrapped again, by DistributedDataParallel or FSDP: it reduces its "
                       "gradients itself. Train what fully_shard() returned as it is; or unwrap() it first")


class _Refusing:
    """Where DistributedDataParallel looks for the names that it is to leave out."""

    __iter__ = refuse_wrapping

    def __deepcopy__(self, memo):
        return []  # the copy of a sharded module is an ordinary one


class _Prepared:
    """Tells accelerate that a module is distributed, so that `prepare()` leaves it as it is. Since the answer also keeps
    accelerate from its mixed precision, this turns that on."""

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)

    def __bool__(self):
        state = sys.modules.get("accelerate.state")
        precision = state.AcceleratorState._shared_state.get("_mixed_precision") if state else None
        module = self._module()
        if precision in ("bf16", "fp16") and "_original_forward" not in module.__dict__:
            from accelerate.utils import convert_outputs_to_fp32
            from accelerate.utils.modeling import get_mixed_precision_context_manager
            forward = get_mixed_precision_context_manager(native_amp=True)(module.forward.__func__)
            module._original_forward = module.forward
            module.forward = types.MethodType(convert_outputs_to_fp32(forward), module)
        return True

    def __deepcopy__(self, memo):
        return False


def mark_sharded(module: nn.Module) -> None:
    """Lets wrappers of other packages refuse a sharded module and its submodules, or take it as it is."""
    for submodule in module.modules():
        submodule.__dict__.setdefault(_IGNORED, _Refusing())
    module.__dict__.setdefault(_PREPARED, _Prepared(module))


def mark_plain(module: nn.Module) -> None:
    """Undoes `mark_sharded()`."""
    for submodule in module.modules():
        if isinstance(submodule.__dict__.get(_IGNORED), _Refusing):
            del submodule.__dict__[_IGNORED]
    module.__dict__.pop(_PREPARED, None)


def refuse_rank_zero_alone() -> None:
    """Refuses a collective state dict that transformers.Trainer would make on rank 0 alone."""
    callers = sys._getframe(2), sys._getframe(2).f_back  # accelerate's optimizer may lie between
    names = [frame.f_globals.get("__name__") for frame in callers if frame]
    if size() > 1 and "transformers.trainer" in names and "tessera.transformers" not in names:
        raise RuntimeError("[tessera] transformers.Trainer saves on rank 0 alone what all ranks have parts of: use "
                           "tessera.transformers.Trainer, or put tessera.transformers.SavesTogether before the class of your "
                           "trainer")
