#!/usr/bin/env python3
"""Writes a C++ file that has each ```cpp block of the documents, and both sides of each ```diff block, so that all compile.

    snippets.py OUTPUT DOCUMENT...

A block with a main() stands in a namespace, one that defines forward() in a class, and any other in a function; all of
guide.md in a namespace in_guide. Undeclared names that they use are in surroundings.h. Programs come first, after no
other headers than those that each of them includes: they compile with what they show. Errors name the document's line.
"""
import pathlib
import re
import sys

BLOCK = re.compile(r"^```(cpp|diff)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)


PROGRAM_HEADERS = ["#include <tessera/tessera.h>", "#include <torch/torch.h>"]
HEADERS_BEFORE = PROGRAM_HEADERS[1:]  # of a program that a diff changes


def sides(match):
    """The code of a block: that of a diff before and after it."""
    if match[1] == "cpp":
        return [match[2]]
    lines = match[2].splitlines(keepends=True)
    return ["".join(line[1:] or "\n" if line[0] in f" {sign}\n" else "\n" for line in lines) for sign in "-+"]


def is_program(code):
    return "int main()" in code


def frame(number, code):
    """The text before a block and after it."""
    if is_program(code):
        return f"namespace snippet_{number} {{", "}"
    if re.search(r"^torch::Tensor forward\(", code, re.MULTILINE):
        return f"struct Snippet{number} : Layers {{", "};"
    return f"void snippet_{number}() {{", "}"


def translated(document):
    """Yields the code of each block, and its translation."""
    text = document.read_text()
    blocks = [(code, match) for match in BLOCK.finditer(text) for code in sides(match)]
    for number, (code, match) in enumerate(blocks):
        before, after = frame(number, code)
        line = text.count("\n", 0, match.start(2)) + 1
        # Only the program's main() may end without a return.
        body = INCLUDE.sub("", code).replace("int main()", "void start()")
        # Pages of packages have one name.
        name = re.sub(r"\W", "_", document.parent.name if document.stem == "README" else document.stem)
        yield code, f'namespace in_{name} {{\n{before}\n#line {line} "{document}"\n{body}{after}\n}}\n'


def main(output, documents):
    headers, programs, others = {}, [], []
    for document in documents:
        for code, text in translated(document):
            if is_program(code):
                programs.append(text)
                if INCLUDE.findall(code) not in (PROGRAM_HEADERS, HEADERS_BEFORE):
                    sys.exit(f"{document}: a program includes {INCLUDE.findall(code)}; expected {PROGRAM_HEADERS}")
            else:
                others.append(text)
                headers |= dict.fromkeys(INCLUDE.findall(code))
    lines = [*PROGRAM_HEADERS, '#include "docs/surroundings.h"', "namespace snippets {", *programs, "}", *headers,
             "namespace snippets {", *others, "}", "int main() {}", ""]
    pathlib.Path(output).write_text("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], [pathlib.Path(name) for name in sys.argv[2:]])
