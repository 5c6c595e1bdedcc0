#!/usr/bin/env python3
"""Changes sources in one place at a time, and tells whether the tests of their package find the change.

    mutants.py BUILD [--seed N] [--count N] [--package NAME]... [--part K/N] [--only ID]... [--list]

Each mutant, a source with one change, is compiled by itself and linked with the other objects of BUILD, whose tests are built;
neither the sources nor BUILD change. Then the tests of the package run, those first that are named alike, until one fails, and again
when it is run again (killed), or is silent for much longer than the longest test takes (timed out). If none does (survived), the
mutant does what the original does, or a test is missing. A mutant that has no object file (uncompiled), or that of the original
(equal), is replaced by another. An ID is the package, the kind of change, and a number to which the seed gives a place.

Results are kept beside BUILD, in mutants/: a run that was stopped goes on, and survivors run again when the tests are built anew.
Tests named Slow or Nightly don't run. The exit status is 1 if a test fails, or a source does not compile, without any change.
"""
import argparse
import collections
import ctypes
import difflib
import functools
import json
import os
import pathlib
import random
import re
import resource
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time

from cpp_text import code as code_without_comments

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ["engine", "tensor", "checkpoint"]
# That of tests/CMakeLists.txt; and mutants stay out of the compiler's cache.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
               "MALLOC_TRIM_THRESHOLD_": str(1 << 32), "CCACHE_DISABLE": "1"}

TEXT = re.compile(r"\b(?:(?P<check>TORCH_CHECK\w*)|TORCH_INTERNAL_ASSERT\w*|TORCH_WARN\w*|fmt::format|static_assert)\("
                  r"|\bstd::string [\w:]*(?:descri|error|text|message|listed)\w*\([^;{}]*\)(?: const)? \{")
CLOSED_BY = {"(": ")", "[": "]", "{": "}"}
OPPOSITE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "true": "false", "false": "true"}
HEAD = re.compile(r"\s*(?:else\b|case [^;?]*?[^:]:(?!:)|default:|(if|for|while)(?: constexpr)? \()")
CALL = re.compile(r"(?!TORCH_INTERNAL|TORCH_WARN|static_assert)(?:[\w:\[\]*]+(?:\(\w*\))?(?:\.|->))*[\w:]+(?:<[\w:, ]*>)?\(")
ASSIGNMENT = re.compile(r"(?:[\w:.\[\]*()]|->)+ [-+*/|&]?= |(?:\+\+|--)[\w.]+$")
DECLARATION = re.compile(r"(?:const )?[\w:]+(?:<.*>)?(?: const)?[&*]{0,2} \w+|(?:const )?[\w:]+[&*]*$(?<=[&*>])")
OPPOSITES = {"comparison": r"(?<=\s)(?:[<>]=?|[=!]=)(?=\s)", "junction": r"(?<=\s)(?:&&|\|\|)(?=\s)", "boolean": r"\b(?:true|false)\b"}
KINDS = ["comparison", "drop", "swap", "bound", "negation", "boolean", "junction", "early"]
NOT_TO_SWAP = {"if", "for", "while", "switch", "return", "min", "max", "assert"}
SPACES = functools.partial(re.sub, r"[^\n]", " ")


def closing(code, opening):
    """Returns where the bracket at `opening` is closed, and the commas and semicolons between, outside other brackets."""
    expected, separators = [], []
    for i in range(opening, len(code)):
        if code[i] in CLOSED_BY:
            expected.append(CLOSED_BY[code[i]])
        elif code[i] == expected[-1]:
            expected.pop()
            if not expected:
                return i, separators
        elif code[i] in ",;" and len(expected) == 1:
            separators.append(i)
    return len(code) - 1, separators


def code_of(text):
    """Returns the text with blanks in place of comments, literals, directives, messages and internal assertions."""
    code = whole = code_without_comments(text)
    for found in TEXT.finditer(whole):
        end, separators = closing(whole, found.end() - 1)
        start = (separators + [end])[0] if found["check"] else found.end()
        code = code[:start] + SPACES(code[start:end]) + code[end:]
    return code


def statements(code):
    """Yields (start, end, whether an `if` without braces precedes) of each simple statement, its semicolon included."""
    for found in re.finditer(r"[^;{}]*;", code):
        start, end, depth, conditional = *found.span(), 0, False
        for i in range(start, end):  # a `for (...; ...; ...)` may end here
            depth += (code[i] == "(") - (code[i] == ")")
            if depth < 0:
                start, depth = i + 1, 0
        while head := HEAD.match(code, start, end):
            start = closing(code, head.end() - 1)[0] + 1 if head[1] else head.end()
            conditional = conditional or head[1] == "if"
        start = end - len(code[start:end].lstrip())
        if start < end:
            yield start, end, conditional


def changes(code, text):
    """Yields (kind, start, end, replacement) of each change of a source that has this code and this text."""
    for kind, pattern in OPPOSITES.items():
        yield from ((kind, *found.span(), OPPOSITE[found[0]]) for found in re.finditer(pattern, code))
    for found in re.finditer(r"\b(?:if|while) \(", code):
        end, separators = closing(code, found.end() - 1)
        start = separators[-1] + 1 if separators and code[separators[-1]] == ";" else found.end()
        yield "negation", start, end, f"!({text[start:end]})"
    for start, end, conditional in statements(code):
        call = CALL.match(code, start)
        if (call and closing(code, call.end() - 1)[0] == end - 2) or ASSIGNMENT.match(code[start:end - 1]):
            yield "drop", start, end, "{}"
        if code[start:end] in ("return;", "continue;") or (conditional and re.match(r"(return|continue|break)\b", code[start:end])):
            yield "early", start, end, "{}"
    for found in re.finditer(r"([\w>]+)\(", code):
        end, separators = closing(code, found.end() - 1)
        bounds = [found.end() - 1, *separators, end]
        parts = [(b - len(text[a + 1:b].lstrip()), a + 1 + len(text[a + 1:b].rstrip())) for a, b in zip(bounds, bounds[1:])]
        if found[1] in NOT_TO_SWAP or any(DECLARATION.match(code[a:b]) or code[a:b].endswith(("begin()", "end()")) for a, b in parts):
            continue
        for (a, b), (c, d) in zip(parts, parts[1:]):
            if text[a:b] != text[c:d]:
                yield "swap", a, d, f"{text[c:d]}{text[b:c]}{text[a:b]}"
    for found in re.finditer(r"(?<![\w.'<])(\d+(?:\.\d*)?)(?![\w.'])|\b(?:size|numel|dim|ndim)\(\)", code):
        for step in ("+ 1", "- 1"):
            yield "bound", *found.span(), f"({found[0]} {step})" if found[1] else f"{found[0]} {step}"


class Mutant(collections.namedtuple("Mutant", "id source start end replacement")):
    package = property(lambda self: self.id.split(".")[0])

    def text(self):
        """Returns the changed source, whose lines have the same numbers."""
        text = self.source.read_text()
        lost = text.count("\n", self.start, self.end) - self.replacement.count("\n")
        return text[:self.start] + self.replacement + "\n" * lost + text[self.end:]

    def diff(self):
        before, after = self.source.read_text(), self.text()
        place = f"{self.id}  {self.source.relative_to(ROOT)}:{before[:self.start].count(chr(10)) + 1}"
        return "\n  ".join([place, *list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1))[2:]])


@functools.cache
def places(package, kind, seed):
    sources = [p for p in sorted((ROOT / "core" / package).rglob("*.cpp")) if not {"tests", "command"} & set(p.parts)]
    texts = {source: source.read_text() for source in sources}
    found = [(source, *change[1:]) for source, text in texts.items() for change in changes(code_of(text), text) if change[0] == kind]
    random.Random(f"{seed} {package} {kind}").shuffle(found)
    return found


def drawn(options):
    """Yields, for each mutant of this part, the one to try first and those in its place. Packages and kinds take turns."""
    if options.only:
        for package, kind, number in (name.split(".") for name in options.only):
            yield [Mutant(f"{package}.{kind}.{number}", *places(package, kind, options.seed)[int(number)])]
        return
    packages, (part, parts) = options.package or PACKAGES, options.part
    pairs = [(package, kind) for kind in KINDS for package in packages]
    for i in range((part - 1) * options.count // parts, part * options.count // parts):
        package, kind = pairs[i % len(pairs)]
        found = places(package, kind, options.seed)
        numbers = range(i // len(pairs), len(found), -(-options.count // len(pairs)))
        yield [Mutant(f"{package}.{kind}.{number}", *found[number]) for number in numbers[:20]]


class Build:
    def __init__(self, folder):
        self.folder, self.kept = folder, folder.parent / "mutants" / folder.name
        self.commands = {}  # of each source: the words, the object that has it, and all sources of that object
        for entry in json.loads((folder / "compile_commands.json").read_text()):
            words, file = shlex.split(entry["command"]), pathlib.Path(entry["file"])
            members = [*map(pathlib.Path, re.findall(r'#include "(.*\.cpp)"', file.read_text()) if "Unity" in file.parts else [file])]
            self.commands |= {member: (words, words[words.index("-o") + 1], members) for member in members}

    def compile(self, source, text, target):
        """Returns the compiler's errors, or None. It reads a pipe, so that objects do not depend on a file's name."""
        words = self.commands[source][0]
        words = words[:words.index("-o")] + ["-frandom-seed=0", "-w", "-o", str(target), "-c", "-x", "c++", "-"]
        done = subprocess.run(words, cwd=self.folder, input=f'#line 1 "{source}"\n{text}', capture_output=True, text=True, env=ENVIRONMENT)
        return done.stderr if done.returncode else None

    def unchanged(self, source):
        """Returns the object of one source, though BUILD may compile several together; makes it if theirs is newer."""
        made = self.kept / "objects" / source.relative_to(ROOT).with_suffix(".o")
        if not made.exists() or made.stat().st_mtime < (self.folder / self.commands[source][1]).stat().st_mtime:
            made.parent.mkdir(parents=True, exist_ok=True)
            fresh = made.with_suffix(f".{os.getpid()}")
            if errors := self.compile(source, source.read_text(), fresh):
                sys.exit(f"{source} does not compile by itself:\n{errors}")
            fresh.replace(made)
        return made

    def link(self, program, source, changed, target):
        ninja = ["ninja", "-C", self.folder, "-t", "commands", "-s", f"tests/{program}"]
        command = subprocess.check_output(ninja, text=True).strip().split("\n")[-1]
        _, together, members = self.commands[source]
        objects = " ".join(str(changed if member == source else self.unchanged(member)) for member in members)
        command = command.replace(f" {together} ", f" {objects} ", 1).replace(f" -o tests/{program} ", f" -o {target} ", 1)
        subprocess.run(command, shell=True, check=True, cwd=self.folder)


def confine():
    """In a test program, before it starts: it ends with this script, can't take all memory, and writes no core."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_DATA, (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_program(program, tests, patience):
    """Runs tests of a program until one fails; returns ("passed", None, ""), or what happened, the test and what it wrote."""
    ctypes.CDLL(None).prctl(36, 1)  # orphans become children of this process
    command = [program, f"--gtest_filter={':'.join(tests)}", "--gtest_fail_fast"]
    with tempfile.TemporaryDirectory() as place, subprocess.Popen(  # not beside the program: error messages of tests have its path
            command, cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=confine, env={**ENVIRONMENT, "TMPDIR": place}) as process:
        output, part, end = b"", None, time.monotonic() + 20 * patience
        pipe = process.stdout.fileno()
        while select.select([pipe], [], [], patience)[0] and time.monotonic() < end and (part := os.read(pipe, 1 << 16)):
            output = (output + part)[-1 << 20:]
        late = process.poll() is None and part != b""
        process.kill()
        process.wait()
        # Memory that the orphans share goes with them.
        while left := pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            for child in map(int, left):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    lines = output.decode(errors="replace")
    if not late and process.returncode == 0 and "[  PASSED  ]" in lines:
        return "passed", None, ""
    failed = re.findall(r"^\[  FAILED  \] ([\w/.]+)", lines, re.MULTILINE) or re.findall(r"\[ RUN      \] ([\w/.]+)", lines)[-1:]
    test = failed[0] if failed else "(before any test)"
    return "timed out" if late else "killed", test, (lines.partition(f"[ RUN      ] {test}")[2] or lines)[:2000]


class Tests:
    """The tests of a package, with the time that each takes without a change."""

    def __init__(self, build, package, scratch):
        rooms = {p.parent for p in (ROOT / "core" / package / "tests").rglob("*_test.cpp")}
        programs = [build.folder / "tests" / f"{package if room.name == 'tests' else room.name}_tests" for room in sorted(rooms)]
        self.built, self.tests = max(program.stat().st_mtime for program in programs), []
        for program in programs:
            kept = build.kept / f"{program.name}.json"
            if not kept.exists() or kept.stat().st_mtime < program.stat().st_mtime:
                kept.write_text(json.dumps(self.measured(program, scratch)))
            self.tests += json.loads(kept.read_text())

    def measured(self, program, scratch):
        print(f"running {program.name} without a change", flush=True)
        command = [program, "--gtest_filter=-*Slow*:*Nightly*", f"--gtest_output=json:{scratch}/report.json"]
        done = subprocess.run(command, cwd=scratch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        if done.returncode != 0:
            sys.exit(f"{program} fails without a change:\n{done.stdout[-3000:].decode(errors='replace')}")
        tests = [test for suite in json.loads((scratch / "report.json").read_text())["testsuites"] for test in suite["testsuite"]]
        return [{"program": program.name, "name": f"{test['classname']}.{test['name']}", "file": pathlib.Path(test["file"]).stem,
                 "time": float(test["time"].rstrip("s"))} for test in tests if test["status"] == "RUN"]

    def ordered(self, source):
        """Returns [(program, tests)]: tests named like the source first, then quick ones, of each those of its folder first."""
        def words(name):
            return {word.lower().rstrip("s") for word in re.findall(r"[A-Z]?[a-z]+", name)} - {"test"}

        groups = collections.defaultdict(list)
        for test in self.tests:
            other = test["program"] != f"{source.parent.name}_tests"
            alike = words(source.stem) & words(f"{test['file']} {test['name']}")
            rank = (test["file"] != f"{source.stem}_test", test["time"] > 2, other, not alike)
            groups[rank, test["program"]].append(test)
        return [(program, tests) for (_, program), tests in sorted(groups.items(), key=lambda item: item[0])]


def outcome(mutant, build, tests, scratch):
    """Returns {"status": ...} of a mutant, with the test that found it."""
    changed, unsteady = scratch / "changed.o", []
    if build.compile(mutant.source, mutant.text(), changed):
        return {"status": "uncompiled"}
    if changed.read_bytes() == build.unchanged(mutant.source).read_bytes():
        return {"status": "equal"}
    for program, group in tests.ordered(mutant.source):
        target, names = scratch / program, [test["name"] for test in group]
        patience = 30 + 10 * max(test["time"] for test in group)
        if not target.exists():
            build.link(program, mutant.source, changed, target)
        while names:
            status, test, text = run_program(target, names, patience)
            if status == "passed":
                break
            # Under load, a test may fail without a change, too.
            if test not in names or (run_program(target, [test], patience)[0] != "passed"
                                     and run_program(build.folder / "tests" / program, [test], patience)[0] == "passed"):
                return {"status": status, "test": test, "text": text}
            unsteady.append(test)
            names = names[names.index(test) + 1:]
    return {"status": "survived"} | ({"failed, but not again": unsteady} if unsteady else {})


def summarize(done):
    statuses = ["killed", "timed out", "survived", "uncompiled", "equal"]
    print(f"\n{'':12}" + "".join(f"{title:>12}" for title in [*statuses, "seconds"]))
    for package in PACKAGES:
        records = [record for mutant, record in done if mutant.package == package]
        counts = collections.Counter(record["status"] for record in records)
        numbers = [*(counts[status] for status in statuses), sum(record["seconds"] for record in records)]
        print(f"{package:12}" + "".join(f"{number:12}" for number in numbers))
    print("".join(f"\nsurvived: {mutant.diff()}\n" for mutant, record in done if record["status"] == "survived"))


def parsed():
    parser = argparse.ArgumentParser(prog="./dev mutants", description=__doc__.split("\n", 1)[0])
    parser.add_argument("build", type=lambda name: pathlib.Path(name).resolve(), help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other mutants (default: 1)")
    parser.add_argument("--count", type=int, default=200, help="how many mutants (default: 200)")
    parser.add_argument("--package", action="append", choices=PACKAGES, help="one of the packages alone")
    parser.add_argument("--part", type=lambda text: [*map(int, text.split("/"))], default=[1, 1], metavar="K/N", help="the K-th of N parts")
    parser.add_argument("--only", action="append", metavar="ID", help="one mutant, though its result may be known")
    parser.add_argument("--list", action="store_true", help="print the mutants that are drawn first; build and run nothing")
    options = parser.parse_args()
    if len(options.part) != 2 or not 1 <= options.part[0] <= options.part[1]:
        parser.error("--part takes K/N, K from 1 to N")
    return options


def main():
    options = parsed()
    if options.list:
        return print("\n\n".join(tries[0].diff() for tries in drawn(options) if tries))
    build, tests, done = Build(options.build), {}, []
    kept = build.kept / f"results_{options.seed}.jsonl"
    build.kept.mkdir(parents=True, exist_ok=True)
    results = {record["id"]: record for record in map(json.loads, kept.read_text().splitlines() if kept.exists() else [])}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for tries in drawn(options):
        for mutant in tries:
            with tempfile.TemporaryDirectory(dir=build.kept) as scratch, kept.open("a") as file:
                tests[mutant.package] = own = tests.get(mutant.package) or Tests(build, mutant.package, pathlib.Path(scratch))
                began, record = time.monotonic(), results.get(mutant.id)
                known = record and not options.only and record["change"] == mutant.diff()
                if not known or (record["status"] == "survived" and record["built"] != own.built):
                    record = {"id": mutant.id, **outcome(mutant, build, own, pathlib.Path(scratch)),
                              "seconds": round(time.monotonic() - began), "built": own.built, "change": mutant.diff()}
                    file.write(json.dumps(record) + "\n")
            print(f"{mutant.diff().splitlines()[0]}: {record['status']} {record.get('test', '')} ({record['seconds']} s)", flush=True)
            done.append((mutant, record))
            if record["status"] not in ("uncompiled", "equal"):
                break
    summarize(done)


if __name__ == "__main__":
    main()
