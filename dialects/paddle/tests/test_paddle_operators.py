"""Operators on DistTensors of all placements: values and gradients are those of one process."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tessera
from tessera.paddle import (Partial, ProcessMesh, Replicate, Shard, dtensor_from_local, dtensor_to_local, reshard, shard_tensor,
                            unshard_dtensor)

R, P, S0, S1, S2 = Replicate(), Partial(), Shard(0), Shard(1), Shard(2)


def _attention(q, k, v):
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)


def _accumulated(x, cotangent, gradient):
    """The gradient of a weight of [in, out], added to what was there."""
    return gradient + x.flatten(0, 1).T @ cotangent.flatten(0, 1), cotangent.sum((0, 1))


_INTS = torch.randint(0, 6, (4, 6), generator=torch.Generator().manual_seed(3))
_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "fmax", "fmin", "pow", "eq", "ne", "lt", "le", "gt", "ge", "atan2",
           "remainder", "logical_and", "logical_or", "logical_xor", "hypot")
_UNARY = ("abs", "acos", "asin", "atan", "acosh", "asinh", "atanh", "ceil", "cos", "cosh", "exp", "expm1", "floor", "round",
          "rsqrt", "sigmoid", "log", "log1p", "log2", "log10", "relu", "sin", "sinh", "sqrt", "square", "tan", "tanh", "neg",
          "reciprocal", "sign", "erf", "erfinv", "isnan", "isfinite", "logical_not", "trunc", "lgamma", "digamma")

# The function, and the sizes or the values of its tensors.
_OPERATORS = {
    **{name: (getattr(torch, name), (4, 6)) for name in _UNARY},
    **{name: (getattr(torch, name), (4, 6), (4, 6)) for name in _BINARY},
    "add, broadcast": (torch.add, (4, 6), (6,)), "mul, broadcast": (torch.mul, (2, 1, 6), (4, 1)),
    "add_n": (lambda *xs: sum(xs), (4, 6), (4, 6), (4, 6)), "lerp": (torch.lerp, (4, 6), (4, 6), (4, 6)),
    "bitwise_and": (torch.bitwise_and, _INTS, _INTS.flip(0)), "bitwise_or": (torch.bitwise_or, _INTS, _INTS.flip(0)),
    "bitwise_xor": (torch.bitwise_xor, _INTS, _INTS.flip(0)), "bitwise_not": (torch.bitwise_not, _INTS),
    "matmul": (torch.matmul, (4, 6), (6, 8)), "matmul, x transposed": (lambda x, y: x.T @ y, (6, 4), (6, 8)),
    "matmul, y transposed": (lambda x, y: x @ y.T, (4, 6), (8, 6)), "bmm": (torch.matmul, (3, 4, 6), (3, 6, 2)),
    "matmul, batch": (torch.matmul, (3, 4, 6), (6, 2)), "matvec": (torch.matmul, (4, 6), (6,)),
    "linear": (F.linear, (3, 4, 6), (8, 6), (8,)), "einsum": (lambda x, y: torch.einsum("bij,bjk->kib", x, y), (2, 3, 4), (2, 4, 5)),
    "weight gradient": (_accumulated, (2, 4, 6), (2, 4, 3), (6, 3)),
    "concat": (lambda x, y: torch.cat([x, y], 0), (4, 6), (2, 6)), "concat, last": (lambda x, y: torch.cat([x, y], -1), (4, 6), (4, 2)),
    "stack": (lambda x, y: torch.stack([x, y], 1), (4, 6), (4, 6)), "unbind": (lambda x: torch.unbind(x, 0), (2, 8)),
    "split": (lambda x: torch.split(x, [1, 3], 0), (4, 6)), "slice": (lambda x: x[1:3, ::2], (4, 6)),
    "expand_as": (lambda x, y: x.expand_as(y) * 1, (2, 8), (2, 2, 8)), "broadcast_tensors": (torch.broadcast_tensors, (4, 1), (1, 6)),
    "tile": (lambda x: x.tile(2, 3), (4, 6)), "squeeze": (lambda x: x.squeeze(1), (4, 1, 6)),
    "unsqueeze": (lambda x: x.unsqueeze(1), (4, 6)), "flatten": (lambda x: x.flatten(1), (4, 2, 6)),
    "transpose": (lambda x: x.permute(2, 0, 1), (4, 2, 6)), "flip": (lambda x: x.flip(0), (4, 6)), "roll": (lambda x: x.roll(1, 0), (4, 6)),
    "pad": (lambda x: F.pad(x, (1, 2)), (4, 6)), "triu": (torch.triu, (4, 6)), "tril": (lambda x: x.tril(1), (2, 4, 6)),
    **{name: (lambda x, name=name: getattr(torch, name)(x, 0), (4, 6)) for name in (
        "sum", "mean", "prod", "logsumexp", "cumsum", "softmax", "log_softmax", "argmax", "argmin")},
    **{f"{name} of all": (getattr(torch, name), (4, 6)) for name in ("sum", "mean", "prod", "max", "min", "any", "all")},
    **{name: (lambda x, name=name: getattr(torch, name)(x, 1, keepdim=True), (4, 6)) for name in ("amax", "amin")},
    "any": (lambda x: (x > 0.5).any(1), (4, 6)), "all": (lambda x: (x > 0.5).all(0), (4, 6)),
    "max, min": (lambda x: (*x.max(0), *x.min(1)), (4, 6)), "p_norm": (lambda x: torch.linalg.vector_norm(x, 3, 0), (4, 6)),
    "squared_l2_norm": (lambda x: x.square().sum().view(1), (4, 6)), "cummax": (lambda x: tuple(x.cummax(0)), (4, 6)),
    "cummin": (lambda x: tuple(x.cummin(1)), (4, 6)), "topk": (lambda x: tuple(x.topk(2, 0)), (4, 6)),
    "argsort": (lambda x: x.argsort(1), (4, 6)), "sort": (lambda x: tuple(x.sort(0, descending=True)), (4, 6)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (4, 2, 6), (6,), (6,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), (4, 2, 6), (6,)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (4, 6, 5), (6,), (6,)),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (4, 6, 5), (6,), (6,)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (4, 4, 5, 6), (6, 4, 3, 3)), "depthwise_conv2d":
        (lambda x, w: F.conv2d(x, w, padding=1, groups=4), (2, 4, 5, 6), (4, 1, 3, 3)),
    "conv3d": (F.conv3d, (2, 2, 4, 4, 4), (4, 2, 3, 3, 3)), "conv2d_transpose": (F.conv_transpose2d, (2, 4, 5, 6), (4, 6, 3, 3)),
    "gelu": (F.gelu, (4, 6)), "silu": (F.silu, (4, 6)), "swiglu": (lambda x, y: F.silu(x) * y, (4, 6), (4, 6)),
    "clip": (lambda x: x.clip(0.2, 0.7), (4, 6)), "scale": (lambda x: x * 2 + 1, (4, 6)), "cast": (lambda x: x.float().double(), (4, 6)),
    "embedding": (lambda w: F.embedding(_INTS, w), (6, 8)), "embedding of tensors": (F.embedding, _INTS, (6, 8)),
    "gather": (lambda x: x.gather(0, _INTS % 4), (4, 6)), "gather_nd": (lambda x: x[torch.tensor([0, 3, 0])], (4, 6)),
    "index_select": (lambda x: x.index_select(1, torch.tensor([5, 0, 0])), (4, 6)),
    "take_along_axis": (lambda x: x.take_along_dim(_INTS, 1), (4, 6)),
    "put_along_axis": (lambda x, y: x.scatter(1, torch.tensor([[0], [3], [2], [5]]), y), (4, 6), (4, 1)),
    "index_put": (lambda x, y: x.index_put((torch.tensor([0, 3]),), y), (4, 6), (2, 6)),
    "scatter": (lambda x, y: x.index_copy(0, torch.tensor([2, 0]), y), (4, 6), (2, 6)),
    "scatter_nd_add": (lambda x, y: x.index_add(0, torch.tensor([2, 0, 2]), y), (4, 6), (3, 6)),
    "one_hot": (lambda x: F.one_hot(x, 6), _INTS), "nonzero": (torch.nonzero, _INTS % 2), "unique": (torch.unique, _INTS),
    "bincount": (lambda x, w: torch.bincount(x, w.detach()), _INTS[0], (6,)),
    "floor_divide": (lambda x, y: x.detach() // y.detach(), (4, 6), (4, 6)), "where": (lambda x, y: torch.where(x > 0.5, x, y), (4, 6), (4, 6)),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 5, 2, 2])), (4, 6)),
    "cross_entropy, ignored, none": (lambda x: F.cross_entropy(x, torch.tensor([0, -100, 2, 2]), reduction="none"), (4, 6)),
    "label_smooth": (lambda x: F.cross_entropy(x, torch.tensor([0, 5, 2, 2]), label_smoothing=0.1), (4, 6)),
    "mse_loss": (F.mse_loss, (4, 4), (4, 4)), "flash_attention": (_attention, (2, 4, 6, 2), (2, 4, 6, 2), (2, 4, 6, 2)),
    "interpolate": (lambda x: F.interpolate(x, 5, mode="linear"), (2, 3, 10)),
    "numel": (lambda x: torch.tensor([x.numel()]), (4, 6)), "full_like": (lambda x: torch.full_like(x, 2), (4, 6)),
}


def _inputs(arguments):
    generator = torch.Generator().manual_seed(7)
    return [argument.clone() if isinstance(argument, torch.Tensor) else
            torch.rand(argument, dtype=torch.float64, generator=generator) * 0.9 + 0.05 for argument in arguments]


def _run(function, tensors):
    outputs = function(*tensors)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    used = [output for output in outputs if output.requires_grad]
    if not used:
        return outputs, []
    cotangents = [torch.linspace(-1, 2, max(output.numel(), 1), dtype=output.dtype)[:output.numel()].view(output.shape)
                  for output in used]
    return outputs, list(torch.autograd.grad(used, leaves, [shard_tensor(each, tensors[0].process_mesh, []) if output.is_dist()
                                                            else each for output, each in zip(used, cotangents)],
                                             allow_unused=True))


def _kinds(tensor, ndim):
    kinds = [R, *(Shard(dim) for dim in range(tensor.dim()))] + ([P] if tensor.is_floating_point() else [])
    if ndim == 1:
        return [[kind] for kind in kinds]
    return [list(pair) for pair in itertools.product(kinds[:3] + kinds[-1:], repeat=2)]


def _whole(tensor):
    return unshard_dtensor(tensor).detach() if tensor is not None and tensor.is_dist() else tensor


def _compare(function, arguments, mesh):
    """Compares an operator on tensors of many placements with that of one process."""
    plain = _inputs(arguments)
    want, wanted = _run(function, [each.requires_grad_(each.is_floating_point()) for each in plain])
    choices = list(itertools.product(*(_kinds(each, mesh.ndim) for each in plain)))
    for placements in choices[::max(1, len(choices) // (24 if mesh.ndim == 1 else 8))]:
        got, grads = _run(function, [shard_tensor(each.detach(), mesh, places, stop_gradient=not each.requires_grad)
                                     for each, places in zip(plain, placements)])
        assert len(got) == len(want) and len(grads) == len(wanted)
        for have, expected in zip([*got, *grads], [*want, *wanted]):
            assert (have is None) == (expected is None), placements
            if have is not None:
                torch.testing.assert_close(_whole(have), expected.detach(), rtol=1e-12, atol=1e-12, equal_nan=True,
                                           msg=lambda text: f"{placements}: {text}")


def _operators(shape, names):
    mesh = ProcessMesh(torch.arange(tessera.size()).view(shape))
    wrong = {}
    for name in names:
        try:
            _compare(*_OPERATORS[name][:1], _OPERATORS[name][1:], mesh)
        except Exception as error:
            wrong[name] = str(error)[:300]
    return wrong


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2)])
@pytest.mark.parametrize("part", range(4))
def test_operators(ranks, shape, part):
    assert ranks(torch.Size(shape).numel(), _operators, shape, list(_OPERATORS)[part::4]) == [{}] * torch.Size(shape).numel()
