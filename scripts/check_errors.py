#!/usr/bin/env python3
"""Compares docs/guide/errors.md, which explains errors and warnings, with the messages in the sources.

    check_errors.py [--list] [ROOT]

The tables of the page have messages as code in their first column, with `...` in place of values. Each of them must occur in
the library, its programs, exchange.py or *_files.py. Each message that one of these raises, programs apart, must have a
part of it in the page. If a message begins with "[area]", that must be in a table of a section in which a line that begins with
"Areas:" has the area.
The exit status is 1 if one of this is not so. --list prints the messages, for authors of the page.
"""
import argparse
import ast
import pathlib
import re
import sys

from check_packages import library, programs

PAGE = "docs/guide/errors.md"
VALUE = "..."
STRING = r'R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"'
COMMENT = re.compile(rf"({STRING}|'(?:\\.|[^'\\\n])')|//[^\n]*|/\*.*?\*/", re.DOTALL)
STATEMENT = re.compile(rf"(?:{STRING}|'(?:\\.|[^'\\\n])'|[^;])+", re.DOTALL)
LITERAL = re.compile(rf"({STRING})", re.DOTALL)
RAISES = re.compile(r"\b(?:TORCH_CHECK\w*|C10_THROW_ERROR|TORCH_WARN\w*|throw\s+std::\w+)\s*[({]")
AREA = re.compile(r"\[([A-Za-z_][\w: ]*)\] ")
WORD = re.compile(r"[A-Za-z]{2,}")
SPAN = re.compile(r"(?<!`)(`+) ?(.+?) ?\1(?!`)")


def text_of(statement):
    """Joins the literals of a statement, with VALUE where an expression stands between them."""
    text = ""
    for i, part in enumerate(LITERAL.split(statement)):
        if i % 2:
            literal = part[3:-2] if part.startswith("R") else part[1:-1].replace('\\"', '"').replace("\\n", " ")
            text += re.sub(r"(?<!\{)\{[^{} ]*\}", VALUE, literal).replace("{{", "{").replace("}}", "}")
        elif text and part.strip(" \n,()+"):
            text += VALUE
    return text.removesuffix(VALUE)


def python_messages(path):
    """Yields the text of each exception that a Python module raises."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            text = "".join(part.value if isinstance(part, ast.Constant) else VALUE for argument in node.exc.args for part in (
                argument.values if isinstance(argument, ast.JoinedStr) else [argument]))
            yield text.removesuffix(VALUE)


def messages(root, files):
    """Yields (file, text, area, whether it is raised) of each statement that has a text with a blank. A text with an area is
    raised in any case: by another statement, if not by its own."""
    for path in sorted(files):
        if path.suffix == ".py":
            for text in python_messages(path):
                area = AREA.search(text)
                yield path.relative_to(root), text, area and area[1], len(WORD.findall(text)) > 2
            continue
        code = COMMENT.sub(lambda m: m[1] or " ", path.read_text())
        for statement in STATEMENT.findall(code):
            raises = RAISES.search(statement)
            text = text_of(statement[raises.start():] if raises else statement)
            area = AREA.search(text)
            text = text[area.start():] if area else text
            if " " in text:
                is_part = len(WORD.findall(AREA.sub("", text))) < 3  # of other messages
                yield path.relative_to(root), text, area and area[1], bool((raises or area) and not is_part)


def read_page(text):
    """Returns (quote, the areas of its section) of each message in the tables."""
    quotes, areas, in_areas, in_table = [], set(), False, False
    for line in text.splitlines():
        in_areas = line.startswith("Areas:") or in_areas and line != ""
        in_table = line.startswith("| message |") or in_table and line.startswith("|")
        if line.startswith("## "):
            areas = set()
        if in_areas:
            areas |= {span[2].strip("[]") for span in SPAN.finditer(line)}
        elif in_table and not line.startswith(("| message |", "| ---")):
            quotes += [(span[2], areas) for span in SPAN.finditer(line.split(" | ")[0])]
    return quotes


def pattern_of(quote):
    return re.compile(".*?".join(re.escape(part.strip()) for part in quote.split(VALUE)), re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).parent.parent, type=pathlib.Path)
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    explained = library(root) + [*root.glob("python/tessera/exchange.py"), *root.glob("python/tessera/*_files.py")]
    raised = [message[:3] for message in messages(root, explained) if message[3]]
    if arguments.list:
        print("\n".join(f"{path}: {text}" for path, text, _ in raised))
        return 0
    everything = "\n".join(message[1] for message in messages(root, explained + programs(root)))
    quotes = [(quote, areas, pattern_of(quote)) for quote, areas in read_page((root / PAGE).read_text())]
    problems = [f"{PAGE}: no source has the message `{quote}`" for quote, _, pattern in quotes
                if not re.search(pattern.pattern.replace(".*?", "[^\n]*?"), everything)]
    for path, text, area in raised:
        if not any(pattern.search(text) for _, areas, pattern in quotes if not area or area in areas):
            problems.append(f"{PAGE}: lacks a message of {path}{f', in the area [{area}]' if area else ''}: {text}")
    print("\n".join(problems) if problems else f"errors: {PAGE} has the {len(raised)} messages of the sources")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
