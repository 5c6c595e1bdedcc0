"""Programs on DistTensors, and how they run, on ordinary tensors and on DistTensors."""

from __future__ import annotations

import ctypes
import re
import warnings
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import tessera
from bounds import OPERATORS, Bounds, Unbounded, gamma
from tessera import DeviceMesh, Partial, Replicate, Shard

WORLD = 4


@dataclass(frozen=True)
class Line:
    """A statement, and the name that it gives to its result ("": none)."""
    text: str
    out: str = ""

    def __str__(self) -> str:
        return f"{self.out} = {self.text}" if self.out else self.text

    def uses(self) -> set[str]:
        return set(re.findall(r"\bv\d+\b", self.text))


@dataclass(frozen=True)
class Program:
    """`meshes`: the ranks of `mesh`, and of `other`, to which tensors are moved. `everyone`: ranks outside of `mesh` run it,
    too."""
    meshes: tuple
    everyone: bool = True
    lines: tuple[Line, ...] = ()

    def members(self, mesh: int = 0) -> set[int]:
        return set(torch.tensor(self.meshes[mesh]).flatten().tolist())

    def placed(self) -> set[str]:
        """The names of tensors that were placed anew, or computed from such: their strides are those of the parts."""
        names = set()
        for line in self.lines:
            if line.text.startswith(("place(", "whole(")) or line.uses() & names:
                names |= {line.out, f"{line.out}.grad"}
        return names | {f"{line.out}.grad" for line in self.lines if names}


# --- what programs call --------------------------------------------------------------------------------------------------


def values(sizes, dtype, seed: int) -> torch.Tensor:
    """Returns values that depend on the seed: quarters from -2 to 2, whose sums are exact, or, of odd seeds, normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(2 if dtype == torch.bool else seed % 7 + 1, sizes, generator=generator).to(dtype)
    if seed % 2:
        return torch.randn(sizes, generator=generator, dtype=torch.cdouble if dtype.is_complex else torch.double).to(dtype)
    quarters = lambda: torch.randint(-8, 9, sizes, generator=generator) / 4
    return torch.complex(quarters(), quarters()).to(dtype) if dtype.is_complex else quarters().to(dtype)


def _terms(whole: torch.Tensor, count: int, op: str, seed: int) -> list[torch.Tensor]:
    """Returns `count` tensors whose reduction is `whole`."""
    others = [values(whole.shape, whole.dtype, 2 * seed + 2 * i) for i in range(count - 1)]
    if op == "max":
        return [whole - other.abs() for other in others] + [whole]
    if op == "min":
        return [whole + other.abs() for other in others] + [whole]
    return others + [whole * (count if op == "avg" else 1) - sum(others, torch.zeros_like(whole))]


class Plain:
    """Programs on ordinary tensors: placing them changes nothing."""

    def __init__(self, meshes):
        self.meshes = {"mesh": None, "other": None}
        self.leaves: list[torch.Tensor] = []

    def leaf(self, *args, **options):
        self.leaves.append(self.new(*args, **options))
        return self.leaves[-1]

    def new(self, sizes, dtype, seed, mesh=None, placements=(), grad=False, columns=False):
        """A new tensor. `mesh`: None for an ordinary one on the ranks, too; `columns`: its last two dims lie transposed."""
        tensor = values(sizes, dtype, seed)
        if columns:  # in memory of its own: a leaf is no view
            tensor = torch.empty_strided(sizes, tensor.mT.contiguous().mT.stride(), dtype=dtype).copy_(tensor)
        return tensor.requires_grad_(grad)

    def backward(self, roots, cotangents, **options):
        """LibTorch may keep one view of a cotangent as gradients of several leaves, and add to it later: each gets its own."""
        torch.autograd.backward(roots, [cotangent.clone() for cotangent in cotangents], **options)
        for leaf in self.leaves:
            if leaf.grad is not None:
                leaf.grad = leaf.grad.clone()

    def place(self, tensor, placements, mesh=None):
        return tensor.clone()

    def whole(self, tensor):
        return tensor.clone()

    def parts(self, tensor):
        return tensor.clone(memory_format=torch.contiguous_format)


class Bounded(Plain):
    """The same, where each program's `bounds` are told of roundings that DistTensors alone have."""

    def __init__(self, meshes):
        super().__init__(meshes)
        self.bounds = Bounds()
        self.shapes = [torch.tensor(ranks).shape for ranks in meshes]

    def new(self, sizes, dtype, seed, mesh=None, placements=(), grad=False, columns=False):
        tensor = super().new(sizes, dtype, seed, grad=grad, columns=columns)
        op = next((its.op for its in placements if isinstance(its, Partial)), None)
        self._note(op)
        if op in ("sum", "avg"):
            terms = _terms(tensor.detach(), WORLD, op, seed)
            self._add_terms(tensor, sum(term.abs().double() for term in terms))
        return tensor

    def place(self, tensor, placements, mesh=None):
        for its in placements:
            self._note(its.op if isinstance(its, Partial) else None)
        if any(isinstance(its, Partial) for its in placements):
            self._add_terms(tensor, WORLD * tensor.detach().abs().double())
        return super().place(tensor, placements, mesh)

    def _note(self, op):
        # Of 2 or 4 equal numbers, the mean is exact.
        self.bounds.averages |= op == "avg" and any(3 in shape for shape in self.shapes)

    def _add_terms(self, tensor, sizes):
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            self.bounds.grow(tensor.detach(), 2 * gamma(OPERATORS + WORLD, tensor.dtype) * sizes.nan_to_num(0, 0, 0))


class Placed(Plain):
    """The same on DistTensors."""

    def __init__(self, meshes):
        super().__init__(meshes)
        self.meshes = {name: DeviceMesh(ranks) for name, ranks in zip(("mesh", "other"), meshes)}

    def new(self, sizes, dtype, seed, mesh=None, placements=(), grad=False, columns=False):
        tensor = super().new(sizes, dtype, seed, columns=columns)
        if mesh is None:
            return tensor
        partial = {dim: its.op for dim, its in enumerate(placements) if isinstance(its, Partial)}
        if partial and mesh.is_member():
            place = count = 1
            place = 0
            for dim in partial:
                place, count = place * mesh.shape[dim] + mesh.coordinate[dim], count * mesh.shape[dim]
            term = _terms(tensor, count, next(iter(partial.values())), seed)[place]
            rest = [Replicate() if isinstance(its, Partial) else its for its in placements]
            part = tessera.to_local(tessera.distribute(term, mesh, rest))
            return tessera.from_local(part, mesh, placements, sizes).requires_grad_(grad)
        return tessera.distribute(tensor, mesh, placements).requires_grad_(grad)

    def place(self, tensor, placements, mesh=None):
        placed = tessera.redistribute(tensor, placements, mesh)
        return placed.clone() if placed is tensor else placed

    def whole(self, tensor):
        return tessera.full_tensor(tensor)

    def parts(self, tensor):
        """The same tensor made anew of its parts."""
        mesh, where = tessera.mesh_of(tensor), tessera.placements_of(tensor)
        return tessera.from_local(tessera.to_local(tensor), mesh, where, tensor.shape)


def scope(world: Plain) -> dict:
    """Returns the names that a program knows."""
    return dict(torch=torch, F=F, Shard=Shard, Replicate=Replicate, Partial=Partial, leaf=world.leaf, place=world.place,
                whole=world.whole, parts=world.parts, backward=world.backward, **world.meshes)


# --- running -------------------------------------------------------------------------------------------------------------


def is_intact(tensor: torch.Tensor) -> bool:
    """False for a view that autograd has lost, since its base was written to."""
    try:
        return tensor.is_leaf or True
    except RuntimeError:
        return False


def _is_known(tensor: torch.Tensor) -> bool:
    """False for a DistTensor on a rank outside of its mesh."""
    return not tessera.is_dist(tensor) or tessera.mesh_of(tensor).is_member()


@dataclass
class Value:
    """A tensor of a program after its end. `data`: its bytes, None on a rank that has no part of it."""
    dtype: torch.dtype
    sizes: tuple
    strides: tuple
    grad: bool
    data: bytes | None

    @staticmethod
    def of(tensor: torch.Tensor, seen: bool = True) -> "Value":
        whole = tensor.detach()
        data = None
        if tessera.is_dist(whole):
            known = _is_known(whole)
            if not known and tessera.to_local(tensor).numel():  # detach() makes it anew
                raise AssertionError("a rank outside of the mesh has a part")
            whole = tessera.full_tensor(whole) if known else None
        if seen and whole is not None:
            if whole._is_zerotensor():  # without memory
                whole = torch.zeros(whole.shape, dtype=whole.dtype)
            whole = whole.resolve_conj().resolve_neg().contiguous()
            data = ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size()) if whole.numel() else b""
        return Value(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad, data)

    def layout(self) -> list[int]:
        """The strides that matter."""
        return [stride for size, stride in zip(self.sizes, self.strides) if size > 1] if 0 not in self.sizes else []

    def tensor(self) -> torch.Tensor:
        if not self.data:
            return torch.empty(self.sizes, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(self.sizes)


@dataclass
class Outcome:
    """`errors`: by the number of the line that raised. `values`: of each name that is a tensor, and of its gradient. `digest`: of
    the operators' plans on a rank."""
    errors: dict[int, str] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    digest: int = 0


def ends(line: Line, refused: bool) -> bool:
    """A write that LibTorch refuses ends a program: ranks outside of the mesh, on which nothing is written, may not know of it,
    and count it."""
    return refused and re.search(r"\w_\(|\.data =|out=", line.text) is not None


def run(program: Program, kind: type, expected: frozenset = frozenset()) -> Outcome:
    """Runs a program; it goes on after an error in one of the lines `expected`, and, on ordinary tensors, in any."""
    outcome = Outcome()
    world, distributed = kind(program.meshes), kind is Placed
    if distributed and not (program.everyone or world.meshes["mesh"].is_member()):
        return outcome
    env = scope(world)
    tessera._C.operator_digest()  # begins anew
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, line in enumerate(program.lines):
            try:
                exec(str(line), env)
            except Exception as error:
                outcome.errors[number] = f"{type(error).__name__}: {error}"
                if distributed and number not in expected:
                    return outcome
            if ends(line, number in (expected if distributed else outcome.errors)):
                break
        outcome.digest = tessera._C.operator_digest()
        for name, tensor in _tensors(program, env).items():
            # The gradient of an intermediate value may be an ordinary tensor, which ranks outside of the mesh do not know.
            outcome.values[name] = Value.of(tensor, seen=_is_known(env[name.removesuffix(".grad")]))
    return outcome


def _tensors(program: Program, env: dict) -> dict[str, torch.Tensor]:
    """Returns the tensors that a program's names stand for at its end, and the gradients that it asked for."""
    named = {line.out: env[line.out] for line in program.lines if isinstance(env.get(line.out), torch.Tensor)}
    named = {name: tensor for name, tensor in named.items() if is_intact(tensor)}
    asked = {line.out for line in program.lines if line.text.startswith("leaf(")}
    asked |= {line.text.split(".")[0] for line in program.lines if line.text.endswith(".retain_grad()")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grads = {f"{name}.grad": named[name].grad for name in named if name in asked and named[name].grad is not None}
    return named | grads


def error_bounds(program: Program, expected: frozenset) -> dict[str, torch.Tensor]:
    """Returns how far each value of a program may be from that on ordinary tensors, which raises in the lines `expected`."""
    world = Bounded(program.meshes)
    env = scope(world)
    with warnings.catch_warnings(), world.bounds:
        warnings.simplefilter("ignore")
        for number, line in enumerate(program.lines):
            try:
                exec(str(line), env)
            except Exception as error:
                if number not in expected or isinstance(error, Unbounded):
                    raise
            if ends(line, number in expected):
                break
    return {name: world.bounds.of(tensor.detach()) for name, tensor in _tensors(program, env).items()}
