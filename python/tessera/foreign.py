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
        accelerate = sys.modules.get("accelerate")
        state = accelerate.state.AcceleratorState._shared_state if accelerate else {}
        precision, compiles = state.get("_mixed_precision"), state.get("dynamo_plugin")
        if precision == "fp8" or compiles and compiles.backend != "NO":
            raise ValueError("[tessera] accelerate can't turn on fp8 or torch.compile for a sharded module: call "
                             "torch.compile(sharded, backend=tessera.inductor) on what fully_shard() returned, before prepare()")
        module = self._module()
        if precision in ("bf16", "fp16") and "_original_forward" not in module.__dict__:
            autocast = accelerate.utils.modeling.get_mixed_precision_context_manager(native_amp=True)
            module._original_forward = bound = module.forward
            forward = accelerate.utils.convert_outputs_to_fp32(autocast(getattr(bound, "__func__", bound)))
            module.forward = types.MethodType(forward, module) if hasattr(bound, "__func__") else forward
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
