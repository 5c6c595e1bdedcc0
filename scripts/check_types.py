#!/usr/bin/env python3
"""Checks that no program has two types of the same name.

    check_types.py [ROOT]

Two files that define types of the same qualified name cause undefined behaviour, which neither compiler nor linker
reports: the linker keeps one of the functions that both have, such as those of a std::vector of the type. Checks all
files that are linked together: the library with its tools, and with each folder of tests. Types in anonymous namespaces
and in functions may share names. Prints one line per clash; the exit status is 1 if there is any.
"""
import collections
import pathlib
import re
import sys

from check_packages import library, programs, sources
from cpp_text import ACCESS, ATTRIBUTE, TEMPLATE, code

NAMESPACE = re.compile(r"^\s*(?:inline\s+)?namespace\b\s*([\w:]*)\s*$")
LANGUAGE = re.compile(r"^\s*extern\s*$")  # and the name of the language, blanked
TYPE = re.compile(r"^\s*(?:struct|class|union|enum(?:\s+(?:class|struct))?)\b\s*([^={}()]*)$", re.DOTALL)


def scope_of(head):
    """Returns the name of the scope that a brace after `head` opens, and whether it is a type. The name is "" if it adds
    nothing to the names of types inside, None if types inside can't clash with those of other files."""
    namespace = NAMESPACE.match(head)
    if namespace:
        return namespace[1] or None, False
    if LANGUAGE.match(head):
        return "", False
    found = TYPE.match(ATTRIBUTE.sub(" ", TEMPLATE.sub("", ACCESS.sub("", head))))
    name = re.split(r"(?<!:):(?!:)", found[1])[0] if found else ""
    return ("".join(name.split()) or None), True


def types(text):
    """Yields (qualified name, line) of each type that the text defines."""
    text = code(text)
    scopes, head = [], 0
    for brace in re.finditer(r"[{};]", text):
        if brace[0] == "{":
            scope, is_type = scope_of(text[head:brace.start()])
            scopes.append(scope)
            if is_type and None not in scopes:
                yield "::".join(filter(None, scopes)), text.count("\n", 0, brace.start()) + 1
        elif brace[0] == "}" and scopes:
            scopes.pop()
        head = brace.end()


def defined_in(path):
    """Returns (name, line) of each type that a file defines, if others are linked with it."""
    # no_x.cpp is compiled in place of x.cpp; a probe is a program of its own.
    return [] if path.name.startswith("no_") or path.name.endswith("_probe.cpp") else list(types(path.read_text()))


def linked_together(root):
    """Yields the lists of files that are linked together."""
    yield library(root) + programs(root)
    tests = {p.parent for pattern in ("*", "*/*", "*/*/*", "*/*/*/*") for p in root.glob(f"{pattern}/*_test.cpp")}
    tests |= {p for p in root.glob("tests/*") if p.is_dir() and p.name != "support"}
    for folder in sorted(tests):
        if folder == root / "tests/process":  # not linked with the library's hidden symbols
            yield [p for p in library(root) if p.relative_to(root).parts[0] == "include"] + sources(folder)
        else:
            yield library(root) + sources(root / "tests/support") + [p for p in sources(folder) if p.parent == folder or "tests" == folder.parent.name]


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    defined, problems = {}, {}
    for files in linked_together(root):
        merged = collections.defaultdict(list)
        for path in files:
            if path not in defined:
                defined[path] = defined_in(path)
            for name, line in defined[path]:
                merged[name].append(f"{path.relative_to(root)}:{line}")
        problems |= {f"type {name} is defined in {' and in '.join(found)}": None
                     for name, found in merged.items() if len(found) > 1}
    print("\n".join(problems) if problems else "types: no program has two of one name")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
