#!/usr/bin/env python3
"""Writes a C++ file that has each ```cpp block of the documents, so that all of them compile.

    snippets.py OUTPUT DOCUMENT...

A block with a main() stands in a namespace, one that defines forward() in a class, and any other in a function; all of
guide.md in a namespace in_guide. Undeclared names that they use are in surroundings.h. Programs come first, after no
other headers than those that each of them includes: they compile with what they show. Errors name the document's line.
"""
import pathlib
import re
import sys

BLOCK = re.compile(r"^```cpp\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)


PROGRAM_HEADERS = ["#include <tessera/tessera.h>", "#include <torch/torch.h>"]


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
    for number, match in enumerate(BLOCK.finditer(text)):
        code = match[1]
        before, after = frame(number, code)
        line = text.count("\n", 0, match.start(1)) + 1
        # Only the program's main() may end without a return.
        body = INCLUDE.sub("", code).replace("int main()", "void start()")
        yield code, f'namespace in_{document.stem} {{\n{before}\n#line {line} "{document}"\n{body}{after}\n}}\n'


def main(output, documents):
    headers, programs, others = {}, [], []
    for document in documents:
        for code, text in translated(document):
            if is_program(code):
                programs.append(text)
                if INCLUDE.findall(code) != PROGRAM_HEADERS:
                    sys.exit(f"{document}: a program includes {INCLUDE.findall(code)}; expected {PROGRAM_HEADERS}")
            else:
                others.append(text)
                headers |= dict.fromkeys(INCLUDE.findall(code))
    lines = [*PROGRAM_HEADERS, '#include "docs/surroundings.h"', "namespace snippets {", *programs, "}", *headers,
             "namespace snippets {", *others, "}", "int main() {}", ""]
    pathlib.Path(output).write_text("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], [pathlib.Path(name) for name in sys.argv[2:]])
