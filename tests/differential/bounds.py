"""How far a program's values on many ranks may lie from those on one: a running error bound, see docs/design/differential_dist.md.

`Bounds` watches the program on ordinary tensors, operator by operator, forward and backward, and keeps for each element of each
storage how far the same element of the other run may be. Bounds start at zero: so without sums, values must be equal.
"""

from __future__ import annotations

import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

# Operators that only move, choose or compare elements: they round nothing.
EXACT = set("""cat stack index select_backward slice_backward diagonal_backward gather index_select scatter index_fill index_copy
index_put flip roll constant_pad_nd repeat tril triu amax amin max min aminmax sort topk kthvalue median cummax cummin argmax argmin
argsort embedding diag_embed unfold_backward expand_copy repeat_interleave take masked_select masked_scatter max_pool1d
max_pool2d_with_indices max_pool2d_with_indices_backward upsample_nearest1d hstack value_selecting_reduction_backward any all
block_diag rot90 contiguous narrow_copy view_copy permute_copy nonzero count_nonzero searchsorted bincount one_hot
scatter_reduce new_zeros new_empty empty_like zeros_like ones_like full_like zeros ones full arange scalar_tensor empty
empty_strided new_empty_strided new_full new_ones detach alias lift_fresh zero fill equal is_nonzero set_ resize
max_pool2d_with_indices reflection_pad1d native_dropout_backward""".split())
# Of these, those that put elements in order: results change by no more than the elements, and positions anyhow.
ORDERS = set("sort topk kthvalue median".split())
# Of these, those that move elements and do no more, and sums that are linear in each argument and have no negative factors.
MOVES = set("""cat stack index select_backward slice_backward diagonal_backward gather index_select flip roll repeat expand_copy
unfold_backward embedding diag_embed take contiguous clone tril triu repeat_interleave upsample_nearest1d""".split())
LINEAR = set("""sum mean mm bmm dot mv addmm baddbmm convolution cumsum embedding_dense_backward index_add scatter_add
convolution_backward avg_pool2d avg_pool2d_backward upsample_nearest1d_backward""".split())
# Operators on each element by itself that PyTorch has not tagged as such.
POINTWISE = set("""_to_copy copy fill zero conj_physical complex polar log_sigmoid_forward log_sigmoid_backward softplus_backward
elu_backward hardswish_backward mish_backward hardtanh_backward leaky_relu_backward _foreach_mul _foreach_add view_as_complex
mse_loss_backward smooth_l1_loss_backward huber_loss_backward""".split())
# Those whose results IEEE 754 prescribes, as one rounding of the exact value, on real numbers.
PRESCRIBED = EXACT | set("""add sub mul div neg abs sqrt reciprocal relu threshold threshold_backward clamp clamp_min clamp_max
maximum minimum where masked_fill _to_copy copy fill zero eq ne gt ge lt le floor ceil round trunc sign sgn logical_and logical_or
logical_not isfinite isnan nan_to_num rsub fmod remainder clone positive square complex view_as_complex hardtanh hardtanh_backward
leaky_relu leaky_relu_backward _foreach_mul _foreach_add _foreach_neg bitwise_and bitwise_not bitwise_or isinf""".split())
# Sums that add in the dtype of their elements; others add 16-bit numbers in float.
SEQUENTIAL = set("scatter_add index_add index_put embedding_dense_backward _index_put_impl cumsum cumprod prod".split())
RANDOM = ("rand", "bernoulli", "normal", "uniform", "dropout")
# Of functions that are sums of larger terms, how large these are; of the arguments in their order.
TERMS = {
    "gelu": lambda x, *_: x.abs(),
    "gelu_backward": lambda g, x, *_: g.abs() * (1 + x.abs() + x.abs() ** 3),
    "silu_backward": lambda g, x: g.abs() * (1 + x.abs()),
    "mish_backward": lambda g, x: g.abs() * (1 + x.abs()),
    "addcmul": lambda x, a, b, value=1: x.abs() + (value * a * b).abs(),
    "addcdiv": lambda x, a, b, value=1: x.abs() + (value * a / b).abs(),
    "lerp": lambda x, y, w: x.abs() + y.abs(),
}

# By how many units u the results of functions that kernels compose may be off: 2 of each function that they call, 1 of each product,
# sum or quotient, all relative to what is passed on (exp(x), then 1 + exp(x)), as no step makes a relative error larger. So
# mish(x) = x tanh(log1p(exp(x))) has 3 functions and a product; mish' = T + x S (1 - T^2) with T of 6, S = 1 / (1 + exp(-x)) of 4.
COMPOSED = {"mish": 7, "mish_backward": 22, "silu": 4, "silu_backward": 13, "sigmoid": 4, "elu": 5, "softplus": 6,
            "log_sigmoid_forward": 5, "gelu": 6}


def _cross_entropy_terms(x, weight, target, bias, *options):
    """Of the gradients of a linear layer and its cross entropy, which are sums of (softmax - one_hot) * x or weight."""
    chosen = torch.softmax(torch.nn.functional.linear(x, weight, bias), 1) + torch.nn.functional.one_hot(target.clamp(0), len(weight))
    chosen = chosen / (len(x) if "mean" in options else 1)
    return [torch.zeros(()), chosen @ weight.abs(), chosen.T @ x.abs(), chosen.sum(0)]


# The same of sums, for each result.
SUM_TERMS = {"_linear_cross_entropy_batch_chunked": _cross_entropy_terms}
# Of functions that turn or jump between x - e and x + e, how far they go there.
TURNING = {
    "sin": lambda e, x: e.clamp(max=2),
    "cos": lambda e, x: e.clamp(max=2),
    "fmod": lambda e, x, m: torch.where(((x - e) / m).trunc() == ((x + e) / m).trunc(), e, 2 * abs(m)),
    "remainder": lambda e, x, m: torch.where(((x - e) / m).floor() == ((x + e) / m).floor(), e, abs(m)),
    # Just below the negative numbers it is -pi.
    "angle": lambda e, x: torch.where((x.imag.abs() <= e) & (x.real <= e), 2 * torch.pi, 0.0) if x.is_complex() else e * 0,
}
# A term of a pending sum may be rounded by each operator of a program before ranks add it.
OPERATORS = 20
RANKS = 4
_STEP = 1e-6  # of derivatives, which are taken in double


class Unbounded(Exception):
    """The bound of an operator's results can't be computed."""


def _unit(dtype: torch.dtype) -> float:
    """The largest relative error of a rounding to a dtype."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def _is_number(value) -> bool:
    return isinstance(value, torch.Tensor) and (value.dtype.is_floating_point or value.dtype.is_complex)


def _size(value: torch.Tensor) -> torch.Tensor:
    """How large elements are; those that are infinite or no numbers, and truth values, count as zero."""
    if not _is_number(value) or value._is_zerotensor():
        return torch.zeros(value.shape, dtype=torch.double)
    return value.abs().double().nan_to_num(0, 0, 0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.cdouble if dtype.is_complex else torch.double if dtype.is_floating_point else dtype


def _doubled(value):
    """A copy in double precision that an operator may write to."""
    if value._is_zerotensor():
        value = torch.zeros(value.shape, dtype=value.dtype)
    value = value.resolve_conj().resolve_neg()
    return value.to(_wide(value.dtype), copy=True) if _is_number(value) else value.clone()


class Bounds(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        # Storages, which must not be freed and used again; bounds of real numbers, the parts of complex ones among them; and of
        # complex numbers that were written as such, infinite where a part was written alone.
        self._kept: dict[int, tuple] = {}
        self._asleep = False
        self.averages = False  # a pending mean of 3 terms may meet whole tensors, whose terms are equal, with a rounded mean

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the bound of each element."""
        known = None if tensor._is_zerotensor() else self._known(tensor)
        if known is None:
            return torch.zeros(tensor.shape, dtype=torch.double)
        parts = self._seen(known[1], tensor)
        return torch.minimum(torch.hypot(*parts), torch.maximum(*self._seen(known[2], tensor))) if len(parts) > 1 else parts[0]

    def _known(self, tensor: torch.Tensor) -> tuple | None:
        # `out=` may have made the storage longer.
        storage = tensor.untyped_storage()
        known = self._kept.get(storage._cdata)
        more = storage.nbytes() // (tensor.element_size() // (2 if tensor.is_complex() else 1)) - known[1].numel() if known else 0
        if more > 0:
            flats = (torch.cat([flat, torch.zeros(more, dtype=torch.double)]) for flat in known[1:])
            known = self._kept[storage._cdata] = (storage, *flats)
        return known

    def grow(self, tensor: torch.Tensor, bound: torch.Tensor) -> None:
        """Adds to the bounds of elements."""
        self._set(tensor, self.of(tensor) + bound)

    def _seen(self, flat: torch.Tensor, tensor: torch.Tensor):
        # The bounds that belong to a tensor: of a complex one, those of its real parts and of its imaginary ones.
        if not tensor.is_complex():
            return (flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()),)
        strides = [2 * stride for stride in tensor.stride()]
        return tuple(flat.as_strided(tensor.shape, strides, 2 * tensor.storage_offset() + part) for part in (0, 1))

    def _set(self, tensor: torch.Tensor, bound: torch.Tensor) -> None:
        if tensor._is_zerotensor():
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept:
            if not bound.any():
                return
            size = tensor.element_size() // (2 if tensor.is_complex() else 1)
            flat = torch.zeros(storage.nbytes() // size, dtype=torch.double)
            self._kept[storage._cdata] = storage, flat, flat.clone()
        repeated = [dim for dim, stride in enumerate(tensor.stride()) if stride == 0 and tensor.size(dim) > 1]
        for dim in repeated:  # one place in memory, which has the largest bound
            bound = bound.amax(dim, keepdim=True)
        for flat, value in zip(self._known(tensor)[1:], (bound, bound if tensor.is_complex() else torch.inf)):
            for part in self._seen(flat, tensor):
                for dim in repeated:
                    part = part.narrow(dim, 0, 1)
                part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        flat, spec = tree_flatten((args, kwargs))
        if self._asleep or func.is_view or any(word in name for word in RANDOM) or name in ("_local_scalar_dense", "item"):
            return func(*args, **kwargs)
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in flat):
            return func(*args, **kwargs)  # LibTorch asks for sizes and a dtype alone; on meta, kernels are functions of Python
        self._asleep = True
        try:
            errors = {at: self.of(value) for at, value in enumerate(flat) if isinstance(value, torch.Tensor)}
            before = [_doubled(value) if isinstance(value, torch.Tensor) else value for value in flat]
            result = func(*args, **kwargs)
            results = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
            if not results:  # foreach, whose writes LibTorch does not count here
                results = [value for value in tree_flatten(args[0])[0]]
                torch.autograd.graph.increment_version(results)
            base = name.removesuffix("_")
            call = lambda values: self._numbers(func, values, spec)
            try:
                erring = any(error.any() for error in errors.values())
                for out, bound in zip(results, self._bounds(func, base, call, before, errors, results)):
                    # An infinity may be the sum of infinite terms, or any number that is too large.
                    self._set(out, torch.where(out.isfinite(), bound, torch.inf) if erring and _is_number(out) else bound)
            except Exception as error:
                raise Unbounded(f"the bound of {func} can't be computed: {error}") from error
            return result
        finally:
            self._asleep = False

    @staticmethod
    def _numbers(func, values, spec) -> list[torch.Tensor]:
        """Returns the results of an operator on values that it may write to, in double."""
        args, kwargs = tree_unflatten([value.clone() if isinstance(value, torch.Tensor) else value for value in values], spec)
        kwargs = {name: _wide(value) if isinstance(value, torch.dtype) else value for name, value in kwargs.items()}
        args = [_wide(value) if isinstance(value, torch.dtype) else value for value in args]
        result = func(*args, **kwargs)
        results = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        return [value.clone() for value in (results or tree_flatten(args[0])[0])]

    def _bounds(self, func, base, call, before, errors, results):
        pointwise = base in POINTWISE or torch.Tag.pointwise in func.tags
        erring = [at for at, error in errors.items() if error.any()]
        if base in EXACT and not erring:
            return []
        terms = TERMS[base](*before) if base in TERMS else torch.zeros(())
        rounding = [self._rounding(base, pointwise, out, terms) for out in results]
        if pointwise and not erring:
            return rounding
        if any(not _is_number(before[at]) or not errors[at].isfinite().all() for at in erring):
            return [torch.full(out.shape, torch.inf, dtype=torch.double) for out in results]  # an index or a mask that may differ
        if base in MOVES:
            return self._linear(base, call, before, errors, results)
        most = max((errors[at].max() for at in erring), default=torch.zeros(()))
        if base in ORDERS:
            return [torch.full(out.shape, most.item() if _is_number(out) else torch.inf, dtype=torch.double) for out in results]
        exact = call(before)
        if [tuple(its.shape) for its in exact] != [tuple(out.shape) for out in results]:
            return [torch.full(out.shape, torch.inf, dtype=torch.double) for out in results]  # a kernel gives other outputs in double
        if base in LINEAR:
            return self._linear(base, call, before, errors, results)
        if pointwise:
            changes = self._changes(call, before, exact, errors, erring)
            if base in TURNING and erring == [0] and (base == "angle" or not before[0].is_complex()):
                changes = [torch.maximum(TURNING[base](errors[0], *before), changes[0])]
            return [change + 2 * _unit(out.dtype) * _size(out) + extra
                    for change, out, extra in zip(changes, results, rounding)]
        bounds = self._sums(base, call, before, errors, exact, results)
        if base.startswith(("std", "var")):  # the terms of a pending sum meet its rounded mean
            bounds[0] = bounds[0] + (2 * most if base.startswith("std") else (2 * most) ** 2)
        return bounds

    @staticmethod
    def _rounding(base: str, pointwise: bool, out: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
        # Kernels compute functions of contiguous elements in vectors and of others one by one, each to one unit in the last
        # place (2 u) of the largest of its terms; products of complex numbers with fused additions or without.
        magnitude = _size(out)
        if not pointwise or not _is_number(out) or (base in PRESCRIBED and not out.is_complex()):
            return torch.zeros_like(magnitude)
        return 2 * COMPOSED.get(base, 2) * _unit(out.dtype) * torch.maximum(magnitude, _size(terms))

    @staticmethod
    def _change(call, before, exact, at: int, step: torch.Tensor) -> list[torch.Tensor]:
        """How much results change when an argument does by `step`, up or down, or to zero."""
        changes = [torch.zeros(out.shape, dtype=torch.double) for out in exact]
        for direction in (1, 1j) if before[at].is_complex() else (1,):
            most = [torch.zeros(out.shape, dtype=torch.double) for out in exact]
            # Numbers may also become zero, which is counted apart.
            for value in (before[at] + direction * step, before[at] - direction * step, before[at] * (before[at].abs() > step)):
                moved = call(before[:at] + [value] + before[at + 1:])
                for into, change in zip(most, Bounds._differences(moved, exact)):
                    torch.maximum(into, change, out=into)
            for into, its in zip(changes, most):
                into += its
        return changes

    def _changes(self, call, before, exact, errors, erring) -> list[torch.Tensor]:
        """How much results of a function of each element change when all arguments do: by their errors, one after the other and
        at once, as that of 0 * 0."""
        alone = [sum(its) for its in zip(*(self._change(call, before, exact, at, errors[at]) for at in erring))]
        if len(erring) == 1:
            return alone
        half = len(erring) // 2  # of two lists
        signs = itertools.product((1, -1), repeat=len(erring)) if half <= 2 else (
            (first,) * half + (last,) * (len(erring) - half) for first in (1, -1) for last in (1, -1))
        for corner in signs:
            moved = list(before)
            for at, sign in zip(erring, corner):
                moved[at] = before[at] + sign * errors[at]
            for into, change in zip(alone, self._differences(call(moved), exact)):
                torch.maximum(into, change, out=into)
        return alone

    @staticmethod
    def _differences(moved, exact) -> list[torch.Tensor]:
        found = []
        for its, out in zip(moved, exact):
            same = (its == out) | (its.isnan() & out.isnan())
            apart = (its - out).abs() if _is_number(out) else torch.full(out.shape, torch.inf, dtype=torch.double)
            found.append(torch.where(same, 0.0, apart).nan_to_num(torch.inf))
        return found

    def _linear(self, base, call, before, errors, results):
        factors = (float, complex) + ((int,) if base in ("addmm", "baddbmm") else ())  # others have dims
        sizes = [_size(value) if _is_number(value) else abs(value) if isinstance(value, factors) else value for value in before]
        if base in MOVES:
            moved = call([errors[at] if _is_number(value) else value for at, value in enumerate(before)])
            averaged = 2 * RANKS if self.averages and len(errors) > 1 else 0
            return [its + gamma(averaged, out.dtype) * _size(out) if _is_number(its) else torch.zeros(its.shape)
                    for its, out in zip(moved, results)]
        wider = call([value + errors[at] if at in errors and _is_number(value) else value for at, value in enumerate(sizes)])
        count = torch.tensor(max(value.numel() for at, value in enumerate(before) if at in errors))
        return [more.abs() * (1 + self._gamma(base, count, out)) - less.abs()
                for more, less, out in zip(wider, call(sizes), results)]

    def _sums(self, base, call, before, errors, exact, results):
        # As if each input had errors of its own besides: a rounding for each addend, relative to the input. Of a sum, these are
        # the bounds of summation in any order; other kernels (norms, softmax) round as often as they add.
        bounds = [torch.zeros(out.shape, dtype=torch.double) for out in exact]
        addends = [torch.zeros(out.shape, dtype=torch.double) for out in exact]
        own = [torch.zeros(out.shape, dtype=torch.double) for out in exact]
        for at in [at for at in errors if _is_number(before[at])]:
            size = _size(before[at])
            step = errors[at] if base in EXACT else torch.maximum(errors[at], _STEP * size)
            for where in itertools.product(*(range(n) for n in step.shape)):
                if step[where] == 0:
                    continue
                alone = torch.zeros_like(step)
                alone[where] = step[where]
                changes = self._change(call, before, exact, at, alone)
                for bound, count, its, change in zip(bounds, addends, own, changes):
                    bound += change * (errors[at][where] / step[where])
                    count += change > 0
                    its += change * (size[where] / step[where])
        if base in EXACT:
            return bounds
        if base in SUM_TERMS:  # a gradient that nobody asks for is empty
            own = [its + more if its.shape == more.shape else its for its, more in zip(own, SUM_TERMS[base](*before))]
        return [bound + self._gamma(base, count, out) * (its + _size(out)) if _is_number(out) else
                torch.where(bound > 0, torch.inf, 0.0) for bound, count, its, out in zip(bounds, addends, own, results)]

    @staticmethod
    def _gamma(base: str, count: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        # Both runs are that near to the exact sum.
        if _unit(out.dtype) > 1e-3 and base not in SEQUENTIAL:
            return 2 * (gamma(2 * RANKS + OPERATORS, out.dtype) + gamma(count, torch.float))
        return 2 * gamma(count + OPERATORS, out.dtype)


def gamma(count, dtype: torch.dtype) -> torch.Tensor:
    """n u / (1 - n u): the relative error of n roundings, one after the other."""
    product = torch.as_tensor(count, dtype=torch.double) * _unit(dtype)
    return torch.where(product < 1, product / (1 - product), torch.inf)
