#!/usr/bin/env python3
"""Writes a C++ file that has each ```cpp block of the documents, so that all of them compile.

    snippets.py OUTPUT DOCUMENT...

A block with a main() stands in a namespace, one that defines forward() in a class, and any other in a function; all of
guide.md in a namespace in_guide. What they use without declaring it is in surroundings.h. Errors name the document's
line.
"""
import pathlib
import re
import sys

BLOCK = re.compile(r"^```cpp\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)


def frame(number, code):
    """What stands before a block and after it."""
    if "int main()" in code:
        return f"namespace snippet_{number} {{", "}"
    if re.search(r"^torch::Tensor forward\(", code, re.MULTILINE):
        return f"struct Snippet{number} : Layers {{", "};"
    return f"void snippet_{number}() {{", "}"


def translated(document):
    """The includes of its blocks, and the blocks."""
    text = document.read_text()
    includes, parts = [], []
    for match in BLOCK.finditer(text):
        code = match[1]
        includes += INCLUDE.findall(code)
        before, after = frame(len(parts), code)
        line = text.count("\n", 0, match.start(1)) + 1
        # Only the program's main() may end without a return.
        body = INCLUDE.sub("", code).replace("int main()", "void start()")
        parts.append(f'{before}\n#line {line} "{document}"\n{body}{after}\n')
    return includes, [f"namespace in_{document.stem} {{", *parts, "}\n"] if parts else []


def main(output, documents):
    includes, parts = [], []
    for document in documents:
        more_includes, more_parts = translated(document)
        includes += more_includes
        parts += more_parts
    head = dict.fromkeys(['#include "docs/surroundings.h"', *includes])
    lines = [*head, "", "namespace snippets {", *parts, "}  // namespace snippets", "", "int main() {}", ""]
    pathlib.Path(output).write_text("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], [pathlib.Path(name) for name in sys.argv[2:]])
