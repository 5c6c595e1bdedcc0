"""A backend of `torch.compile` for sharded modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

# An operator on parameters gathers them: so this one is called with those that compiled code reads.
_library = torch.library.Library("tessera", "FRAGMENT")
_library.define("with_gathered(Tensor[] tensors, int call) -> ()")
_calls: dict[int, Callable] = {}
_numbers = itertools.count()


@torch.library.impl(_library, "with_gathered", "CompositeExplicitAutograd")
def _with_gathered(tensors: list[torch.Tensor], call: int) -> None:
    _calls[call]()


class _Gathering:
    """Code that Inductor has compiled, called with parameters that are gathered as long as it runs."""

    _boxed_call = True  # takes one list, and clears it

    def __init__(self, code: Callable):
        self._code = code

    def __call__(self, inputs: list):
        tensors, number, results = [value for value in inputs if isinstance(value, torch.Tensor)], next(_numbers), []
        _calls[number] = lambda: results.append(self._code(inputs))
        try:
            torch.ops.tessera.with_gathered(tensors, number)
        finally:
            del _calls[number]
        return results[0]


def inductor(graph: torch.fx.GraphModule, example_inputs: list, **options):
    """Inductor, as `torch.compile(sharded, backend=tessera.inductor)`. Its kernels read parameters by their address: all those
    of a region that is compiled as one are gathered while it runs. So compile blocks one by one, `block.compile(backend=
    tessera.inductor)`, if the whole model is too large for a rank."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_inner(*args, **kwargs):
        code = compile_fx_inner(*args, **kwargs)
        code.current_callable = _Gathering(code.current_callable)
        return code

    with config.patch(enable_autograd_cache=False):  # what it keeps is not compiled by the function above
        return compile_fx(graph, example_inputs, inner_compile=compile_inner, **options)
