"""How random programs on DistTensors are drawn."""

from __future__ import annotations

import math
import random
import re
import warnings
from dataclasses import replace

import torch

import ops
from programs import WORLD, Line, Plain, Program, is_intact, scope

MESHES = [[0], [3], [0, 1], [0, 1], [1, 0], [2, 1], [0, 3], [0, 1, 2], [2, 0, 3], [0, 1, 2, 3], [3, 1, 0, 2], [[0, 1], [2, 3]],
          [[0, 1], [2, 3]], [[2, 0], [1, 3]], [[0, 1, 2]], [[1], [3]]]
DTYPES = {"torch.float32": 8, "torch.float64": 4, "torch.bfloat16": 3, "torch.complex64": 5}


class Draw:
    """Draws one program. It runs on ordinary tensors as it grows, so that sizes and dtypes are known."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        ranks = self.rng.choice(MESHES)
        self.meshes = (ranks, self.rng.choice(MESHES))
        self.shapes = {name: list(torch.tensor(its).shape) for name, its in zip(("mesh", "other"), self.meshes)}
        self.mesh = "mesh"  # the one in use
        self.dtype = self.rng.choices(list(DTYPES), DTYPES.values())[0]
        self.env = scope(Plain(self.meshes))
        self.everyone = self.rng.random() < 0.5
        self.covered = self.everyone and all(math.prod(its) == WORLD for its in self.shapes.values())
        ranks = {rank for its in self.meshes for rank in torch.tensor(its).flatten().tolist()}
        self.moves = self.everyone and len(ranks) == WORLD  # a move is collective over both meshes
        self.lines: list[Line] = []
        self.pending: list[Line] = []  # leaves of the statement that is being drawn
        self.home: dict[str, str] = {}  # the mesh of each tensor; "": an ordinary one
        self.shared: set[int] = set()  # storages whose other names may be copies on the ranks
        self.written: list[str] = []  # by the statement that is being drawn
        self.count = 0

    def program(self) -> Program:
        for _ in range(self.rng.randint(3, 20)):
            self.statement()
        self.backward()
        if self.rng.random() < 0.2:
            self.statement()
            self.backward()
        return Program(self.meshes, self.everyone, tuple(self.lines))

    # Names, and what they stand for.

    def t(self, name: str) -> torch.Tensor:
        return self.env[name]

    def names(self, accept=lambda t: True) -> list[str]:
        return [name for name, home in self.home.items() if home in ("", self.mesh) and is_intact(self.t(name))
                and self.t(name).numel() <= 300 and not (home == "" and self.t(name).requires_grad) and accept(self.t(name))]

    def pick(self, accept, make, fresh: float = 0.25) -> str:
        found = self.names(accept)
        if not found or self.rng.random() < fresh:
            return make()
        return self.rng.choice(found[-6:] if self.rng.random() < 0.7 else found)

    def new_name(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def sizes(self, least: int = 0) -> list[int]:
        return [self.rng.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8] + [0] * (self.rng.random() < 0.08))
                for _ in range(max(least, self.rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4])))]

    def placement(self, sizes, dtype: torch.dtype, ranks: int, ops_allowed) -> str:
        kind = self.rng.random()
        if sizes and kind < 0.6:
            dim = self.rng.randrange(len(sizes))
            return f"Shard({dim})"
        return f'Partial("{ops_allowed}")' if kind > 0.87 and dtype.is_floating_point | dtype.is_complex else "Replicate()"

    def placements(self, sizes, dtype: torch.dtype) -> str:
        op = self.rng.choice(["sum", "sum", "avg"] + ["max", "min"] * (not dtype.is_complex))
        shape = self.shapes[self.mesh]
        found = [self.placement(sizes, dtype, ranks, op) for ranks in shape]
        for dim, size in enumerate(sizes):
            if found.count(f"Shard({dim})") == 1 and self.rng.random() < 0.05:
                at = found.index(f"Shard({dim})")
                if size and size % (2 * shape[at]) == 0:
                    found[at] = f"Shard({dim}, 2)"
        return "[" + ", ".join(found) + "]"

    def leaf(self, sizes, dtype: str, high: int = 0, requires_grad: bool | None = None) -> str:
        name, kind = self.new_name(), eval(dtype)
        floating = kind.is_floating_point or kind.is_complex
        grad = floating and (self.rng.random() < 0.7 if requires_grad is None else requires_grad)
        seed = self.rng.randrange(1000) * 14 + (high - 1 if high else self.rng.choice([0, 0, 0, 1]))
        text = f"leaf({list(sizes)}, {dtype}, {seed}"
        if self.rng.random() < 0.08 and not grad:
            self.home[name] = ""
        else:
            self.home[name] = self.mesh
            where = self.placements(sizes, kind)
            if "Partial" in where:
                text = text.replace(f" {seed}", f" {seed - seed % 2}")
            text += f", {self.mesh}, {where}" + ", grad=True" * grad
        # A part of one column does not tell how its whole lies in memory.
        text += ", columns=True" * (len(sizes) > 1 and self.rng.random() < 0.1 and "Partial" not in text) + ")"
        line = Line(text, name)
        exec(str(line), self.env)
        self.pending.append(line)
        return name

    # The fields of templates; see ops.py.

    def tensor(self, key: str, arguments: str, subject: str | None) -> str:
        dtype = self.dtype
        if subject is not None and key in "xrc":
            dtype = str(self.t(subject).dtype)
        if key == "r" or key in "mM" and self.now_real:
            dtype = {"torch.complex64": "torch.float32"}.get(dtype, dtype)
        if key == "c":
            dtype = "torch.complex64"
        if not (eval(dtype).is_floating_point or eval(dtype).is_complex):
            dtype = self.dtype
        if key == "q":
            sizes = list(self.t(subject).shape) if subject else self.sizes()
            return self.pick(lambda t: t.dtype == torch.bool and list(t.shape) == sizes, lambda: self.leaf(sizes, "torch.bool"))
        if key == "k":
            sizes, high = [3], 4
            if arguments:
                sizes, high = arguments.split("<")
                sizes, high = [int(s) for s in sizes.split(",")], int(high)
            return self.leaf(sizes, "torch.int64", high)
        kinds = {"r": torch.Tensor.is_floating_point, "c": torch.Tensor.is_complex}
        kind = eval(dtype)
        number = lambda t: t.dtype.is_floating_point or t.dtype.is_complex
        if arguments:
            sizes = [self.t(subject).shape[-1] if s == "n" else int(s) for s in arguments.split(",")]
            dense = self.now_batch_norm  # whose backward in LibTorch reads memory, whatever the strides of its weight are
            return self.pick(lambda t: list(t.shape) == sizes and t.dtype == kind and (t.is_contiguous() or not dense),
                             lambda: self.leaf(sizes, dtype), 0.4)
        least = {"m": 1, "M": 2}.get(key, 0)
        accept = kinds.get(key, number)
        real = key in "mM" and self.now_real
        return self.pick(lambda t: accept(t) and t.ndim >= least and not (real and t.is_complex()),
                         lambda: self.leaf(self.sizes(least), dtype))

    def writable(self) -> str:
        def accept(t):
            places = torch.arange(t.untyped_storage().nbytes() + 1).as_strided(t.shape, t.stride())
            overlaps = 0 not in t.stride() and places.unique().numel() < t.numel()  # LibTorch does not notice
            return ((t.dtype.is_floating_point or t.dtype.is_complex) and t.untyped_storage()._cdata not in self.shared and not overlaps
                    and (not (t.requires_grad and t.is_leaf) or self.rng.random() < 0.1))
        return self.pick(accept, lambda: self.leaf(self.sizes(), self.dtype, requires_grad=False), 0.15)

    def related(self, key: str, subject: torch.Tensor) -> str:
        rng, sizes = self.rng, list(subject.shape)
        dims = len(sizes)
        dim = self.dim
        if key == "y":
            def fits(t):
                return t.dtype == subject.dtype and t.ndim <= dims and all(
                    a in (1, b) for a, b in zip(reversed(t.shape), reversed(sizes)))
            smaller = [size if rng.random() < 0.8 else 1 for size in sizes][rng.choice([0, 0, min(1, dims)]):]
            return self.pick(fits, lambda: self.leaf(smaller, str(subject.dtype)))
        if key == "l":
            return self.pick(lambda t: list(t.shape) == sizes and t.dtype == subject.dtype,
                             lambda: self.leaf(sizes, str(subject.dtype)))
        if key == "shape":
            rest = [s for s in sizes for s in ([2, s // 2] if s % 2 == 0 and s and rng.random() < 0.5 else [s])]
            if len(rest) > 1 and rng.random() < 0.5:
                at = rng.randrange(len(rest) - 1)
                rest[at:at + 2] = [rest[at] * rest[at + 1]]
            return str(rest)
        size = sizes[dim] if dims else 1
        index = lambda count, high: self.leaf([count], "torch.int64", max(1, min(high, 7)), False)
        return str({"d": lambda: dim, "D": lambda: rng.randrange(max(1, dims)), "n": lambda: size,
                    "i": lambda: rng.randrange(max(1, size)), "i0": lambda: rng.randrange(max(1, sizes[0] if dims else 1)),
                    "half": lambda: size // 2, "last": lambda: sizes[-1] if dims else 1,
                    "perm": lambda: rng.sample(range(dims), dims),
                    "expand": lambda: [2, *(3 if s == 1 else -1 for s in sizes)],
                    "I": lambda: index(rng.randint(1, 4), size), "I0": lambda: index(rng.randint(1, 4), sizes[0] if dims else 1),
                    "In": lambda: index(rng.randint(1, 4), sizes[-1] if dims else 1),
                    "iota": lambda: index(size, size),
                    "ksame": lambda: self.leaf(sizes, "torch.int64", max(1, min(size, 7)), False)}[key]())

    def fill(self, template: str) -> str:
        subject = None
        self.dim = 0
        self.written = []
        self.now_batch_norm = "batch_norm" in template
        self.now_real = not any(name in template for name in
                                ("sum", "mean", "norm(", "prod", "cum", "@", "einsum", "F.linear", "[", ".t()", "flip", "roll",
                                 "cat", "stack", "index", "scatter", "gather", "view", "fft", "permute", "split", "chunk")) \
            and "{M}" not in template

        def fill_in(found: re.Match) -> str:
            nonlocal subject
            key, arguments = found.group(1), found.group(2) or ""
            if key in "a":
                return str(self.rng.choice([0.5, -1.0, 2.0, 0.25, 3.0]))
            if key == "f":
                return self.rng.choice(["torch.float32", "torch.float64", "torch.bfloat16", "torch.complex64", "torch.int64"])
            if key == "reduce":
                return self.rng.choice(["", ', reduction="sum"', ', reduction="none"'])
            if key in ("x", "r", "c", "m", "M", "k", "q", "w"):
                name = self.writable() if key == "w" else self.tensor(key, arguments, subject)
                self.written += [name] * (key == "w")
                if subject is None:
                    subject = name
                    self.dim = self.rng.randrange(max(1, self.t(name).ndim))
                return name
            return self.related(key, self.t(subject))

        return re.sub(r"\{(\w+)(?::([^}]*))?\}", fill_in, template)

    # Statements.

    def drop(self) -> bool:
        """Forgets the leaves of a statement that is not kept, and returns false."""
        for leaf in self.pending:
            self.home.pop(leaf.out, None)
        self.pending = []
        return False

    def is_undefined(self, text: str) -> bool:
        """True for a statement of which LibTorch's own result depends on chance."""
        out = re.search(r"out=(v\d+)", text)
        if out and "sum" in text and text.count(out[1]) > 1:
            return True  # `out` is made smaller before the call is refused
        if out and any(torch._C._is_alias_of(self.t(out[1]), self.t(name)) for name in Line(text).uses() - {out[1]}):
            return True  # what was written is read
        # The gradients of sgn() have no memory, and a group norm's backward reads it.
        program = " ".join(line.text for line in self.lines) + text
        return "sgn" in program and "group_norm" in program

    def writes_unknown(self, line: Line) -> bool:
        """True if ranks outside of the mesh, which do not know the values of DistTensors, would write these to an ordinary one."""
        ordinary = any(self.home[name] == "" for name in self.written)
        mixed = ordinary and any(self.home[name] == self.mesh for name in line.uses())
        return mixed and self.everyone and math.prod(self.shapes[self.mesh]) < WORLD

    def add(self, line: Line, home: str | None = None) -> bool:
        """Keeps a line that runs, and returns true; keeps now and then one that raises."""
        failed = False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(str(line), self.env)
        except Exception as error:
            # Memory may be shared by a tensor's elements, and not by those of its parts, which are placed anew.
            if self.rng.random() < 0.9 or "memory location" in str(error):
                return self.drop()
            line, failed = replace(line, out=""), True
        self.lines += [*self.pending, line]
        self.pending = []
        if line.out and isinstance(self.env[line.out], torch.Tensor):
            inputs = {self.home[name] for name in line.uses() if name in self.home}
            self.home[line.out] = home if home is not None else self.mesh if self.mesh in inputs else ""
        return not failed

    def statement(self) -> None:
        kind = self.rng.random()
        if kind < 0.1:
            return self.communicate()
        if kind < 0.14:
            return self.backward()
        families = ops.FAMILIES
        family = self.rng.choices(list(families), [weight for _, weight in families.values()])[0]
        template = self.rng.choice(families[family][0])
        if self.everyone and not self.covered and ops.needs_numbers(template):
            return None  # ranks without a part can't have a number, nor sizes that depend on one
        text = self.fill(template)
        if self.is_undefined(text):
            return self.drop()
        if family == "random":
            text = f"(torch.manual_seed({self.rng.randrange(99)}), {text})[1]"
        if family == "write":
            quiet = self.rng.random() < 0.3
            line = Line("with torch.no_grad(): " * quiet + text)
            self.drop() if self.writes_unknown(line) else self.add(line)
        else:
            name = self.new_name()
            home = "" if "one_hot" in text else None  # LibTorch writes into an ordinary tensor of zeros
            home = self.home[text.split(".")[0]] if ".expand_as(" in text else home
            if self.add(Line(text, name), home) and self.rng.random() < 0.1 and self.t(name).requires_grad:
                self.add(Line(f"{name}.retain_grad()"))

    def communicate(self) -> None:
        candidates = self.names(lambda t: True)
        candidates = [name for name in candidates if self.home[name] == self.mesh]
        if not candidates:
            return
        source, name, kind = self.rng.choice(candidates[-6:]), self.new_name(), self.rng.random()
        tensor = self.t(source)
        if kind < 0.6:
            where = self.placements(tensor.shape, tensor.dtype)
            added = self.add(Line(f"place({source}, {where})", name))
        elif kind < 0.75 and self.moves:
            self.mesh = "other" if self.mesh == "mesh" else "mesh"
            where = self.placements(tensor.shape, tensor.dtype)
            added = self.add(Line(f"place({source}, {where}, {self.mesh})", name), self.mesh)
        elif kind < 0.85:
            added = self.add(Line(f"parts({source})", name))
        elif self.covered or not self.everyone:
            added = self.add(Line(f"whole({source})", name), "")
        else:
            return
        if added:
            self.shared |= {its.untyped_storage()._cdata for its in (tensor, self.t(name))}

    def backward(self) -> None:
        found = self.names(lambda t: t.requires_grad and not t.is_leaf)
        if not found:
            return
        roots = self.rng.sample(found, min(len(found), self.rng.choice([1, 1, 2, 3])))
        roots = sorted(set(roots + found[-1:]))
        cotangents = []
        for root in roots:
            tensor = self.t(root)
            cotangents.append(self.leaf(tensor.shape, str(tensor.dtype), requires_grad=False))
        keep = ", retain_graph=True" * (self.rng.random() < 0.7)
        self.add(Line(f"backward([{', '.join(roots)}], [{', '.join(cotangents)}]{keep})"))
