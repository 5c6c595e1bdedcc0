#!/usr/bin/env python3
"""Prints the sizes of files and functions beside their budgets. For information: it never fails.

    check_budgets.py [ROOT]
"""
import pathlib
import re
import sys

from check_packages import House, programs, sources

FUNCTION_LINES, SOURCE_LINES, HEADER_LINES, DIALECT_LINES = 40, 500, 200, 200
COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
NO_FUNCTION = re.compile(r"^\s*(?:namespace|class|struct|enum|union|extern|if|for|while|switch|catch|do|else|try)\b|=\s*$")
NAME = re.compile(r"([~\w:]+(?:operator\W+)?)\s*\(")


def blank(text):
    """Replaces comments and literals by spaces, so that braces in them do not count; keeps lines."""
    return COMMENT_OR_TEXT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def functions(text):
    """Yields (name, first line, number of lines) of each outermost function body."""
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]), blank(text), flags=re.MULTILINE)
    depth, start, head, body = 0, None, 0, 0
    for i, c in enumerate(text):
        if c == "{":
            signature = re.sub(r"^\s*template\s*<[^{]*?>\s*(?=[a-zA-Z])", "", text[head:i])
            if start is None and ")" in signature and not NO_FUNCTION.search(signature):
                match = NAME.search(signature)
                first = head + len(text[head:i]) - len(text[head:i].lstrip())
                start, body, name = first, depth, match[1] if match else "?"
            depth += 1
        elif c == "}":
            depth -= 1
            if start is not None and depth == body:
                first = text.count("\n", 0, start) + 1
                yield name, first, text.count("\n", 0, i) + 2 - first
                start = None
        if c in "{};":
            head = i + 1


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def file_budget(where):
    if "tests" in where.parts:
        return SOURCE_LINES
    if "include" in where.parts:
        return HEADER_LINES
    return DIALECT_LINES if where.parts[0] == "dialects" else SOURCE_LINES


def parts(root):
    """Yields (name, files) of the parts that the table has."""
    house = House(root)
    for name in house.order:
        yield name, house.packages[name].headers + house.packages[name].sources
    yield "programs", programs(root)
    yield "examples", sources(root / "examples")
    yield "tests", sorted({p for pattern in ("tests", "*/tests", "*/*/tests") for folder in root.glob(pattern) for p in sources(folder)})


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    over = []
    print(f"{'':12}{'files':>7}{'lines':>8}{'median':>8}{'largest':>9}{'functions':>11}{'p90':>6}{'p99':>6}{'longest':>9}")
    for part, files in parts(root):
        texts = {p.relative_to(root): p.read_text() for p in files}
        lines = {where: text.count("\n") for where, text in texts.items()}
        found = [(n, where, name, at) for where, text in texts.items() for name, at, n in functions(text)]
        lengths = [f[0] for f in found]
        over += [f"{where}: {n} lines, budget {file_budget(where)}" for where, n in lines.items() if n > file_budget(where)]
        over += [f"{where}:{at}: {name} has {n} lines, budget {FUNCTION_LINES}" for n, where, name, at in found
                 if n > FUNCTION_LINES]
        print(f"{part:12}{len(files):7}{sum(lines.values()):8}{percentile(lines.values(), .5):8}"
              f"{max(lines.values(), default=0):9}{len(found):11}{percentile(lengths, .9):6}{percentile(lengths, .99):6}"
              f"{max(lengths, default=0):9}")
    print("\n".join(["over budget:", *("  " + o for o in over)]) if over else "nothing is over budget")


if __name__ == "__main__":
    main()
