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

from check_budgets import blank

SUFFIXES = {".h", ".cpp", ".hpp", ".cc"}
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
ATTRIBUTE = re.compile(r"\[\[.*?\]\]|\balignas\s*\([^()]*\)|\b__attribute__\s*\(\(.*?\)\)|\b[A-Z]+_API\b|\bfinal\b")
ACCESS = re.compile(r"^\s*(?:(?:public|private|protected)\s*:\s*)+")
TEMPLATE = re.compile(r"^\s*template\s*<.*?>\s*(?=(?:requires\b.*\b)?(?:struct|class|union|enum)\b)", re.DOTALL)
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
    text = DIRECTIVE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), blank(text))
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


def defined_in(root, folder):
    """Returns the places of each type that the files of a folder define."""
    places = collections.defaultdict(list)
    for path in sorted((root / folder).rglob("*")):
        # no_x.cpp is compiled in place of x.cpp; a probe is a program of its own.
        if path.suffix in SUFFIXES and not path.name.startswith("no_") and not path.name.endswith("_probe.cpp"):
            for name, line in types(path.read_text()):
                places[name].append(f"{path.relative_to(root)}:{line}")
    return places


def programs(root):
    """Yields the folders that are linked together."""
    library = ["include", "src"]
    yield library
    yield [*library, "tools"]
    for folder in sorted(p.name for p in (root / "tests").glob("*") if p.is_dir() and p.name != "support"):
        # The programs of tests/process are not linked with the hidden symbols of the library.
        yield ["include", "tests/process"] if folder == "process" else [*library, "tests/support", f"tests/{folder}"]


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    places, problems = {}, {}
    for program in programs(root):
        merged = collections.defaultdict(list)
        for folder in program:
            if folder not in places:
                places[folder] = defined_in(root, folder)
            for name, found in places[folder].items():
                merged[name] += found
        problems |= {f"type {name} is defined in {' and in '.join(found)}": None
                     for name, found in merged.items() if len(found) > 1}
    print("\n".join(problems) if problems else "types: no program has two of one name")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
