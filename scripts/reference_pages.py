#!/usr/bin/env python3
"""Writes the reference as Markdown, a page for each public header, from the XML that Doxygen makes of them.

    reference_pages.py XML FOLDER [ROOT]

Each class, member and function has a heading, so that the site's search finds it.
"""
import collections
import itertools
import pathlib
import re
import sys
import xml.etree.ElementTree

import check_links
from check_packages import public_headers

INTRODUCTION = re.compile(r"^(?:namespace tessera[\w:]* \{|#pragma once)\n\n((?:// .*\n|//\n)+)\n", re.MULTILINE)
WIDTH = 96


# --- comments ------------------------------------------------------------------------------------
def escaped(text):
    return re.sub(r"([\\*_\[\]])", r"\\\1", text or "").replace("<", "&lt;")


def plain(node):
    return "" if node is None else "".join(node.itertext())


def code_line(node):
    """The text of a line of code, in which Doxygen writes blanks as elements."""
    text = " " if node.tag == "sp" else node.text or ""
    return text + "".join(code_line(part) + (part.tail or "") for part in node)


def fenced(code):
    return f"\n\n```cpp\n{code.rstrip()}\n```\n\n"


def items(node, mark):
    texts = (content(item).strip().replace("\n", "\n    ") for item in node.findall("listitem"))
    return "\n\n" + "\n".join(f"{mark} {text}" for text in texts) + "\n\n"


FORMS = {
    "para": lambda node: content(node).strip() + "\n\n",
    "computeroutput": lambda node: f"`{plain(node)}`",
    "bold": lambda node: f"**{content(node)}**",
    "emphasis": lambda node: f"*{content(node)}*",
    "ulink": lambda node: f"[{content(node)}]({node.get('url')})",
    "ref": lambda node: content(node),
    "simplesect": lambda node: content(node),
    "programlisting": lambda node: fenced("\n".join(map(code_line, node.findall("codeline")))),
    "verbatim": lambda node: fenced(plain(node)),
    "itemizedlist": lambda node: items(node, "-"),
    "orderedlist": lambda node: items(node, "1."),
    "ndash": lambda node: "--",
}


def content(node):
    """Returns the Markdown of a node's text and children."""
    if node is None:
        return ""
    text = escaped(node.text)
    for child in node:
        if child.tag not in FORMS:
            sys.exit(f"{child.tag}: an element of a comment that scripts/reference_pages.py does not know")
        text += FORMS[child.tag](child) + escaped(child.tail)
    return text


def comment(node):
    return (content(node.find("briefdescription")) + content(node.find("detaileddescription"))).strip()


# --- declarations --------------------------------------------------------------------------------
def tidy(code):
    code = re.sub(r"\s*([&*]+) ?(?=[\w.)=,>]|$)", r"\1 ", code)
    code = re.sub(r"([&*]) (?=[,)>=])", r"\1", code)
    return re.sub(r"\s*(?<![=!<>])=\s*(?!=)", " = ", code).replace("< ", "<").replace(" >", ">").strip()


def templates_of(node):
    # Doxygen has the name of a parameter with a concept twice.
    lists = ([re.sub(r"\b(\w+) \1$", r"\1", " ".join(plain(p).split())) for p in t] for t in node.findall("templateparamlist"))
    return "".join(f"template <{tidy(', '.join(parameters))}>\n" for parameters in lists)


def declaration(member):
    kind, name = member.get("kind"), member.findtext("name")
    arguments, type_of = tidy(plain(member.find("argsstring"))), tidy(plain(member.find("type")))
    if kind == "typedef":
        return f"{templates_of(member)}using {name} = {type_of}{arguments};"
    words = [word for word in ("static", "explicit") if member.get(word) == "yes"]
    words += ["virtual"] if member.get("virt") in ("virtual", "pure-virtual") else []
    value = f" {plain(member.find('initializer'))}" if member.find("initializer") is not None else ""
    line = " ".join([*words, *filter(None, [type_of]), f"{name}{arguments}{value};"])
    return templates_of(member) + (split_arguments(line) if kind == "function" and len(line) > WIDTH else line)


def split_arguments(line):
    """Puts each argument of a long declaration on a line of its own."""
    depth, text = 0, ""
    for letter in line:
        depth += {"(": 1, "<": 1, "{": 1, ")": -1, ">": -1, "}": -1}.get(letter, 0)
        text += "(\n    " if letter == "(" and depth == 1 else ",\n   " if letter == "," and depth == 1 else letter
    return text


# --- pages ---------------------------------------------------------------------------------------
def is_shown(member):
    """Copies, moves and destructors are shown if they have a comment."""
    args, name = (member.findtext("argsstring") or "").replace(" ", ""), member.findtext("name")
    is_usual = name.startswith("~") or name == "operator=" or "&&" in args
    return (member.get("prot") == "public" and member.get("kind") != "friend" and not args.endswith("=delete")
            and (comment(member) or not is_usual))


def title_of(member, scope):
    name = member.findtext("name")
    return f"{scope}{name}{'()' if member.get('kind') == 'function' else ''}"


def of_members(members, scope, level):
    """Returns the sections of members; overloads that follow each other have one."""
    text, last = "", ""
    for member in members:
        title = title_of(member, scope)
        if title != last:
            text += f"\n{'#' * level} `{title}`\n"
        last = title
        if member.get("kind") == "enum":
            text += "\n" + comment(member) + "\n\n"
            text += "".join(f"- `{value.findtext('name')}`: {comment(value)}\n" for value in member.findall("enumvalue"))
        elif member.get("kind") == "variable":
            text += f"\n`{declaration(member)}`\n\n{comment(member)}\n"
        else:
            text += fenced(declaration(member)) + comment(member) + "\n"
    return text


def name_of(compound):
    return compound.findtext("compoundname").removeprefix("tessera::")


def of_class(compound):
    kind, name = compound.get("kind"), name_of(compound)
    bases = ", ".join(tidy(plain(base)) for base in compound.findall("basecompoundref"))
    templates = templates_of(compound)
    members = [m for section in compound.findall("sectiondef") for m in section.findall("memberdef") if is_shown(m)]
    members.sort(key=lambda m: int(m.find("location").get("line")))
    head = fenced(f"{templates}{kind} {name}{' : public ' + bases if bases else ''};") if templates or bases else "\n"
    return f"\n## `{name}`\n{head}{comment(compound)}\n{of_members(members, name.split('::')[-1] + '::', 3)}"


def parts_of_scope(compound, seen):
    """Yields the (file, line, Markdown, name) of each member of a namespace, or of a file outside of its namespaces, that was
    not seen before, overloads together."""
    scope = "" if compound.get("kind") == "file" else (compound.findtext("compoundname") + "::").removeprefix("tessera::")
    members = [m for m in compound.iter("memberdef") if m.get("id") not in seen and m.get("kind") != "define"]
    seen.update(m.get("id") for m in members)
    members.sort(key=lambda m: (m.find("location").get("file"), int(m.find("location").get("line"))))
    key = lambda m: (m.find("location").get("file"), title_of(m, scope))
    for (file, title), group in itertools.groupby(members, key):
        group = list(group)
        yield file, int(group[0].find("location").get("line")), of_members(group, scope, 2), title


def collect(folder):
    """Returns the (line, Markdown, name) of each header's parts, by the header's path."""
    parts, seen = collections.defaultdict(list), set()
    for path in sorted(folder.glob("*.xml")):
        for compound in xml.etree.ElementTree.parse(path).iter("compounddef"):
            if compound.get("kind") in ("class", "struct") and compound.get("prot") in ("public", None):
                place = compound.find("location")
                parts[place.get("file")].append((int(place.get("line")), of_class(compound), name_of(compound)))
            elif compound.get("kind") == "file" or \
                    compound.get("kind") == "namespace" and compound.findtext("compoundname").startswith("tessera"):
                for file, *part in parts_of_scope(compound, seen):
                    parts[file].append(tuple(part))
    return parts


def introduction(header):
    """The comment at the beginning of a header or of its namespace, which belongs to no declaration."""
    match = INTRODUCTION.search(header.read_text())
    return re.sub(r"^// ?", "", match[1], flags=re.MULTILINE) if match else ""


def main():
    source, folder = map(pathlib.Path, sys.argv[1:3])
    root = pathlib.Path(sys.argv[3] if len(sys.argv) > 3 else pathlib.Path(__file__).parent.parent)
    headers = public_headers(root)
    index = "# Reference\n\nA page for each public header; the search finds their names.\n\n| header | names |\n| --- | --- |\n"
    for file, parts in sorted(collect(source).items()):
        page = folder / file.removeprefix("tessera/").replace(".h", ".md")
        page.parent.mkdir(parents=True, exist_ok=True)
        title = page.stem.replace("_", "")
        # First what the header is named after.
        parts.sort(key=lambda part: (re.sub(r"[_()]", "", part[2]).lower() != title, part[0]))
        text = f"# {file}\n\n{introduction(headers[file])}\n" + "\n".join(part[1] for part in parts)
        page.write_text(re.sub(r"\n{3,}", "\n\n", text))
        where = page.relative_to(folder)
        names = ", ".join(f"[`{name}`]({where}#{check_links.slug_of(name)})" for _, _, name in parts)
        index += f"| [{file}]({where}) | {names} |\n"
    (folder / "index.md").write_text(index)


if __name__ == "__main__":
    main()
