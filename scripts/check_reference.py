#!/usr/bin/env python3
"""Checks that the reference made by Doxygen has each function that the library exports.

    check_reference.py TAGFILE [ROOT]

Prints a line for each function of the public headers that the tag file lacks; the exit status is 1 if there is any.
"""
import pathlib
import re
import sys
import xml.etree.ElementTree

UNSEEN = re.compile(r"^[^\n]*// internal$|//[^\n]*|^namespace detail \{.*?^\}  // namespace detail$|^ *#[^\n]*",
                    re.DOTALL | re.MULTILINE)
EXPORTED = re.compile(r"\bTESSERA_API\s+(?!class|struct)[^;{()]*?(\w+)\(")


def exported(header):
    text = UNSEEN.sub(lambda m: "\n" * m[0].count("\n"), header.read_text())
    return {match[1] for match in EXPORTED.finditer(text)}


def main():
    root = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else pathlib.Path(__file__).parent.parent).resolve()
    tags = xml.etree.ElementTree.parse(sys.argv[1])
    described = {member.findtext("name") for member in tags.iter("member") if member.get("kind") == "function"}
    headers = {path: exported(path) for path in sorted((root / "include").rglob("*.h"))}
    problems = [f"{path.relative_to(root)}: the reference lacks {name}()"
                for path, names in headers.items() for name in sorted(names - described)]
    count = sum(map(len, headers.values()))
    print("\n".join(problems) if problems else f"reference: has the {count} functions of the headers")
    return 1 if problems or not count else 0


if __name__ == "__main__":
    sys.exit(main())
