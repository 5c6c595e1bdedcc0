#!/usr/bin/env python3
"""Makes random programs of operators on DistTensors from seeds, and compares each with the same program on ordinary tensors."""

from __future__ import annotations

import argparse
import collections
import functools
import re
import sys
import time
from dataclasses import dataclass, replace

import torch

import programs
from bounds import Unbounded
from drawing import Draw
from programs import Line, Outcome, Program, Value
from worlds import Died, World

# Errors of DistTensors that are documented (docs/guide/errors.md, docs/design/dist_tensor.md) where LibTorch has none.
REASONS = {
    "out= has other sizes": r"`out` must be empty or have the sizes of the result|an empty DistTensor can't become an ordinary tensor of sizes",
    "meshes are mixed": "must be on one mesh|must lie on one mesh",
    "a view of an expanded tensor is written": "more than one element of the written-to tensor refers to a single memory location",
    "an ordinary tensor requires a gradient": "an ordinary tensor that requires a gradient can't be used together",
}

# Errors of kernels about dtypes and values, which only ranks that have elements call.
KERNELS = r"not (implemented|supported) for|does not support \w+ (dtypes|inputs)|Expected both inputs to be"


@dataclass
class Verdict:
    """`kind`: equal, both refused, refused, or finding; `text`: which difference, at which `name` or line."""
    kind: str
    text: str = ""
    name: str = ""


def differs(plain: Value, value: Value, bounds, name: str, near: float = 0) -> str:
    """Says how a value differs from that of the plain program; "" if by no more than `bounds()` say, which takes a while. `near`:
    this many roundings of the tensor's largest element are no difference, either."""
    if (plain.dtype, plain.sizes) != (value.dtype, value.sizes):
        return f"is {value.dtype} of {value.sizes}, for {plain.dtype} of {plain.sizes}"
    if plain.grad != value.grad:
        return f"requires_grad is {value.grad}, for {plain.grad}"
    if value.data is None or value.data == plain.data:
        return ""
    a, b = plain.tensor(), value.tensor()
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return ""
    if near and (a.is_complex() or a.is_floating_point()):
        largest = torch.where(a.isfinite(), a.abs(), 0).max()
        if (a - b)[~same].abs().max() <= near * torch.finfo(a.dtype).eps * largest:
            return ""
    try:
        limit = bounds()[name]
    except (Unbounded, RuntimeError) as error:
        return f"differs, and has no bound: {error}"
    apart = torch.where(same | limit.isinf(), 0, (a - b).abs().double().nan_to_num(torch.inf)) if a.dtype != torch.bool else ~same
    if (apart <= limit).all():
        return ""
    at = int((apart - limit).nan_to_num(0).argmax()) if a.dtype != torch.bool else int((~same).int().argmax())
    return (f"is off at {at} of {a.numel()}: {b.flatten()[at].item()} for {a.flatten()[at].item()}, may differ by "
            f"{limit.flatten()[at].item():.3g}")


def judge(program: Program, plain: Outcome, ranks: list[Outcome]) -> Verdict:
    # What LibTorch refuses is not always known to ranks outside of the mesh.
    running = [rank for rank in range(programs.WORLD) if program.everyone or rank in program.members()]
    errors = {line: error for rank in reversed(running) for line, error in ranks[rank].errors.items()}
    for rank in running:
        has_parts = rank in program.members(0) & program.members(1)
        for line in sorted(errors.keys() - ranks[rank].errors.keys()):
            is_known = line in plain.errors and (not has_parts or re.search(KERNELS, errors[line]))
            if not is_known:
                return Verdict("finding", f"not on rank {rank} raises {errors[line]}", f"line {line}")
    for number, error in errors.items():
        if number not in plain.errors:
            reason = next((name for name, pattern in REASONS.items() if re.search(pattern, error)), None)
            return Verdict("refused", reason) if reason else Verdict("finding", f"raises {error}", f"line {number}")
    missing = plain.errors.keys() - errors.keys()
    if missing:
        return Verdict("finding", f"does not raise {plain.errors[min(missing)]}", f"line {min(missing)}")
    digests = [ranks[rank].digest for rank in running]
    if not errors and len(set(digests)) > 1:
        return Verdict("finding", f"plans differ on ranks {running}: {digests}", "plans")
    placed = program.placed()
    # LibTorch may give `out` other sizes before it refuses the call.
    lost = {name for number in plain.errors for name in re.findall(r"out=(v\d+)", str(program.lines[number]))}
    bounds = functools.cache(lambda: programs.error_bounds(program, frozenset(plain.errors)))
    for rank in running:
        its = ranks[rank]
        if its.values.keys() != plain.values.keys():
            name = min(its.values.keys() ^ plain.values.keys())
            return Verdict("finding", f"on rank {rank} {'there is one' if name in its.values else 'there is none'}", name)
        for name, value in its.values.items():
            if name in lost:
                continue
            text = differs(plain.values[name], value, bounds, name)
            if not text and plain.values[name].layout() != value.layout() and name not in placed:
                text = f"has strides {value.strides}, for {plain.values[name].strides} of {value.sizes}"
            if text:
                return Verdict("finding", f"on rank {rank} {text}", name)
    return Verdict("both refused" if plain.errors else "equal")


def check(world: World, program: Program) -> Verdict:
    plain = programs.run(program, programs.Plain)
    try:
        ranks = world.run(programs.run, program, programs.Placed, frozenset(plain.errors))
    except (Died, RuntimeError) as error:
        return Verdict("finding", str(error), "ranks")
    verdict = judge(program, plain, ranks)
    if verdict.kind == "finding":
        world.close()  # its ranks may be in different places
    return verdict


def without(program: Program, at: int) -> Program:
    """Takes a line away, and all that use its result."""
    gone, kept = {program.lines[at].out} - {""}, list(program.lines[:at])
    for line in program.lines[at + 1:]:
        if line.uses() & gone:
            gone |= {line.out} - {""}
        else:
            kept.append(line)
    return replace(program, lines=tuple(kept))


def simpler(program: Program):
    """Yields programs with a part taken away, large parts first."""
    count = len(program.lines)
    for at in range(count):
        yield without(program, at)
    for at, line in enumerate(program.lines):
        for pattern, text in ((r", retain_graph=True", ""), (r", columns=True", ""), (r", grad=True", ""),
                              (r'(Shard\(\d(, 2)?\)|Partial\("\w+"\))', "Replicate()"), (r"with torch.no_grad\(\): ", ""),
                              (r"v\d+ = place\((v\d+), .*\)$", r"\1")):
            for found in re.finditer(pattern, line.text):
                changed = line.text[:found.start()] + found.expand(text) + line.text[found.end():]
                yield replace(program, lines=program.lines[:at] + (replace(line, text=changed),) + program.lines[at + 1:])
    for at, line in enumerate(program.lines):
        lists = re.fullmatch(r"(backward)\(\[(.*)\], \[(.*)\](.*)\)", line.text)
        names, cotangents = (lists[2].split(", "), lists[3].split(", ")) if lists else ([], [])
        for gone in range(len(names) if len(names) > 1 else 0):
            text = "{}([{}], [{}]{})".format(lists[1], ", ".join(names[:gone] + names[gone + 1:]),
                                             ", ".join(cotangents[:gone] + cotangents[gone + 1:]), lists[4])
            yield replace(program, lines=program.lines[:at] + (Line(text),) + program.lines[at + 1:])
    for ranks in ([0, 1], [0, 1, 2]):
        if torch.tensor(ranks).numel() < torch.tensor(program.meshes[0]).numel():
            lines = tuple(replace(line, text=re.sub(r", [A-Z]\w+\([^)]*\)\]", "]", line.text)) for line in program.lines)
            yield Program((ranks, ranks), program.everyone, lines)


def shrink(world: World, program: Program, verdict: Verdict, seconds: float = 60) -> tuple[Program, Verdict]:
    kind = lambda its: (its.kind, re.sub(r"\d+", "", its.text)[:24] if "raise" in its.text else its.text[:9])
    end, found = time.monotonic() + seconds, True
    while found:
        found = False
        for candidate in simpler(program):
            if time.monotonic() > end:
                return program, verdict
            its = check(world, candidate)
            if kind(its) == kind(verdict):
                program, verdict, found = candidate, its, True
                break
    return program, verdict


def as_text(program: Program, verdict: Verdict, seed: int) -> str:
    """Returns a Python program that shows a finding, given tests/differential and the package in PYTHONPATH."""
    shown = re.match(r"v\d+(.grad)?$", verdict.name)
    lines = [f"{line}  # {verdict.text}" if verdict.name == f"line {at}" else str(line) for at, line in enumerate(program.lines)]
    lines += [f"print({verdict.name} if {verdict.name} is None else tessera.full_tensor({verdict.name}))"] if shown else []
    return "\n".join([f"# Seed {seed}: {verdict.name} {verdict.text}", "import tessera, programs", "def main():",
                      "    tessera.init()", f"    globals().update(programs.scope(programs.Placed({program.meshes})))",
                      *("    " + line for line in lines),
                      "if __name__ == '__main__':", f"    tessera.spawn(main, {programs.WORLD}, start_method='fork')"])


def sweep(options, seeds, world: World) -> collections.Counter:
    """Checks the program of each seed."""
    counts: collections.Counter = collections.Counter()
    told = start = time.monotonic()
    for done, seed in enumerate(seeds):
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"{done} of {len(seeds)} programs in {told - start:.0f} s, {counts['finding']} findings", file=sys.stderr, flush=True)
        program = Draw(seed).program()
        verdict = check(world, program)
        counts[verdict.kind + (f" since {verdict.text}" if verdict.kind == "refused" else "")] += 1
        if verdict.kind == "finding":
            if options.shrink:
                program, verdict = shrink(world, program, verdict)
            print(as_text(program, verdict, seed), flush=True)
    return counts


def seed_of(text: str) -> int:
    return int(time.strftime("%Y%m%d", time.gmtime())) * 100_000 if text == "date" else int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=seed_of, default=1, help="of the first program; \"date\": the day's")
    parser.add_argument("--count", type=int, default=300, help="of programs; their seeds follow one another")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="only the Ith of N parts of them")
    parser.add_argument("--shrink", action="store_true", help="take parts of a finding away while it stays")
    parser.add_argument("--print", type=int, metavar="SEED", dest="shown", help="print a program, and end")
    parser.add_argument("--transport", default="auto", choices=["auto", "arena", "gloo"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.shown is not None:
        print(as_text(Draw(options.shown).program(), Verdict(""), options.shown))
        return 0
    part, parts = map(int, options.part.split("/"))
    start = time.monotonic()
    with World(programs.WORLD, options.transport) as world:
        counts = sweep(options, range(options.seed + part - 1, options.seed + options.count, parts), world)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())), f"in {time.monotonic() - start:.0f} s")
    return 1 if counts["finding"] else 0


if __name__ == "__main__":
    sys.exit(main())
