#!/usr/bin/env python3
"""Checks the sizes of files, functions and classes against their budgets, and prints them.

    check_budgets.py [ROOT]

Lines of a file and of a function, data members of a class (not of a struct of plain data, such as options), lines of over
100 columns (not of texts for a terminal), and lines of the documents that everybody reads. CAPS lists the exceptions with
the size that each may have; it can only fall. The exit status is 1 if a budget or a cap is passed.
"""
import pathlib
import re
import sys

from check_packages import House, programs, sources
from cpp_text import RAW_TEXT, classes, functions

SOURCE_LINES, HEADER_LINES, DIALECT_LINES, DIALECT_HEADER_LINES = 500, 250, 250, 350
FUNCTION_LINES, TEST_FUNCTION_LINES, EXAMPLE_FUNCTION_LINES, TABLE_LINES = 40, 60, 90, 220
MEMBERS, COLUMNS = 15, 100
DOCUMENT_LINES = {"CHANGELOG.md": 120, "README.md": 150, "CONTRIBUTING.md": 130}
PAGE_LINES = 35
# Functions that are one table: a row for each operator, option or binding.
TABLE = re.compile(r"^(?:cases|quiet_cases|layouts|families|make_spatial_rules|bind_\w+|describe|MemoryArguments::add_to)$")

CAPS = {
    "benchmarks/link_report.cpp: link_report": 44,
    "core/comm/arena/hosted_process_group.cpp: start": 47,
    "core/comm/arena/stepwise_work.cpp: class StepwiseWork": 16,
    "core/comm/watch/watch.cpp": 639,
    "core/comm/watch/watch.cpp: Watch::leave": 54,
    "core/comm/watch/watch.h: class Watch": 19,
    "core/engine/model/check_plan.cpp: check_plan": 47,
    "core/engine/model/fully_shard.cpp: ShardedState::create": 54,
    "core/engine/optim/full_optimizer_state.cpp: full_inner_state": 41,
    "core/engine/tests/optim/outer_test.cpp": 623,
    "core/engine/unit/layout.h: struct UnitLayout": 16,
    "core/tensor/dist_dispatch.cpp": 550,
    "core/tensor/dist_dispatch.cpp: call_planned": 43,
    "dialects/fairscale/tests/sharded_ddp_test.cpp": 773,
    "include/tessera/engine/fully_shard.h": 344,
    "interop/pickle_machine.cpp: step": 41,
    "interop/pickle_machine.cpp: wide lines": 3,
    "launcher/job.h: class Job": 16,
    "tests/differential/layers.h: wide lines": 10,
    "tests/differential/plain_training.h: class PlainTraining": 26,
    "tests/differential/sharded_training.cpp: wide lines": 3,
    "tests/differential/shrink.cpp: changes_of": 96,
    "tests/differential/source.cpp: Source::statement": 82,
    "tests/mistakes/mistakes_test.cpp": 534,
    "tests/process/world_start_test.cpp": 544,
}


def is_test(where):
    return "tests" in where.parts


def file_budget(where):
    if is_test(where):
        return SOURCE_LINES
    if where.parts[0] == "dialects":
        return DIALECT_HEADER_LINES if "include" in where.parts else DIALECT_LINES
    return HEADER_LINES if where.parts[0] == "include" else SOURCE_LINES


def function_budget(where, name):
    if TABLE.match(name):
        return TABLE_LINES
    if is_test(where):
        return TEST_FUNCTION_LINES
    return EXAMPLE_FUNCTION_LINES if where.parts[0] == "examples" else FUNCTION_LINES


def measures(where, text, found):
    """Yields (subject, size, budget, unit, line) of all that a file's budgets concern."""
    yield str(where), text.count("\n"), file_budget(where), "lines", 0
    for name, line, size in found:
        yield f"{where}: {name}", size, function_budget(where, name), "lines", line
    for c in classes(text):
        if not c.is_plain:
            yield f"{where}: {c.kind} {c.name}", c.members, MEMBERS, "members", c.line
    without = re.sub(RAW_TEXT, lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    wide = [line for line in without.split("\n") if len(line.rstrip()) > COLUMNS]
    yield f"{where}: wide lines", len(wide), 0, f"lines of over {COLUMNS} columns", 0


def documents(root):
    """Yields (subject, size, budget, unit, line) of the documents."""
    for name, budget in DOCUMENT_LINES.items():
        if (root / name).exists():
            yield name, (root / name).read_text().count("\n"), budget, "lines", 0
    pages = [p for pattern in ("core/*/README.md", "*/README.md") for p in root.glob(pattern)]
    for page in sorted(pages):
        yield str(page.relative_to(root)), page.read_text().count("\n"), PAGE_LINES, "lines", 0


def over_budget(measured):
    """Yields a line for each measure above its cap, or above its budget if it has none."""
    for subject, size, budget, unit, line in measured:
        cap = CAPS.get(subject, budget)
        if size > cap:
            place = subject.replace(":", f":{line}:", 1) if line else subject
            yield f"{place}: {size} {unit}, {'cap' if subject in CAPS else 'budget'} {cap}"


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def parts(root):
    """Yields (name, files) of the parts that the table has."""
    house = House(root)
    for name in house.order:
        yield name, house.packages[name].headers + house.packages[name].sources
    yield "programs", programs(root)
    yield "examples", sources(root / "examples")
    folders = [folder for pattern in ("tests", "*/tests", "*/*/tests") for folder in root.glob(pattern)]
    yield "tests", sorted({p for folder in folders if "build" not in folder.relative_to(root).parts for p in sources(folder)})


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    measured = list(documents(root))
    print(f"{'':12}{'files':>7}{'lines':>8}{'median':>8}{'largest':>9}{'functions':>11}{'p90':>6}{'p99':>6}{'longest':>9}")
    for part, files in parts(root):
        texts = {p.relative_to(root): p.read_text() for p in files}
        found = {where: list(functions(text)) for where, text in texts.items()}
        for where, text in texts.items():
            measured += measures(where, text, found[where])
        lines = [text.count("\n") for text in texts.values()]
        lengths = [size for of_file in found.values() for _, _, size in of_file]
        print(f"{part:12}{len(files):7}{sum(lines):8}{percentile(lines, .5):8}{max(lines, default=0):9}{len(lengths):11}"
              f"{percentile(lengths, .9):6}{percentile(lengths, .99):6}{max(lengths, default=0):9}")
    problems = list(dict.fromkeys(over_budget(measured)))
    print("\n".join(problems) if problems else f"budgets: nothing is over its budget, but for {len(CAPS)} exceptions within their caps")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
