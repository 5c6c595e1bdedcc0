#!/usr/bin/env python3
"""Copies the repository's Markdown files to the folder from which MkDocs makes the site, each to its own place.

    site_pages.py FOLDER [ROOT]

So links between them hold as they are, and pictures are copied, too. A link to a public header leads to its page of the reference, which
scripts/reference_pages.py writes; one to another file leads to a page that shows it, and one to a folder to its overview, if
it has pages, or to a page that shows its files.
"""
import os
import pathlib
import re
import shutil
import sys

import check_links
from check_packages import public_headers

# How much pages count in the search, where that is not 1: texts of errors lead to the page that explains them.
WEIGHTS = {"docs/guide/errors.md": 4, "docs/guide/tasks.md": 16}  # scripts/check_search.py tries them
WEIGHT_OF_GUIDES = 6
WEIGHT_OF_SOURCES = 0.2
PICTURES = {".svg", ".png", ".jpg", ".gif"}
LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".py": "python", ".cmake": "cmake", ".sh": "bash"}


def is_cmake(path):
    return path.name == "CMakeLists.txt"


def listing(root, path):
    """Returns Markdown that shows a file, or the files of a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    text = f"# {path.relative_to(root)}\n"
    for file in files:
        language = "cmake" if is_cmake(file) else LANGUAGES.get(file.suffix, "text")
        title = f'title="{file.relative_to(root)}"'
        text += f"\n``````{language} {title}\n{file.read_text().rstrip()}\n``````\n"
    return text


class Site:
    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        self.shown, self.pictures = set(), set()
        self.headers = {path: name for name, path in public_headers(root).items()}

    def page_of(self, path):
        """Returns the page or picture, relative to the folder, that stands for a file or folder of the repository."""
        name = path.relative_to(self.root)
        if path.suffix in PICTURES:
            self.pictures.add(name)
        if path.suffix in {".md", *PICTURES}:
            return name
        if path.is_dir() and (path / "overview.md").exists():
            return name / "overview.md"
        if path in self.headers:
            return pathlib.Path("reference", self.headers[path].removeprefix("tessera/")).with_suffix(".md")
        self.shown.add(path)
        return "sources" / name.with_name(name.name + ".md")

    def translated(self, page, text):
        """Returns the text of a page with links to what is no page turned to their pages."""
        def new_link(match):
            name, mark, anchor = match[1].partition("#")
            file = (page.parent / name).resolve()
            if not name or re.match(r"[a-z]+:", name) or file.suffix == ".md" or not file.exists():
                return match[0]
            target = os.path.relpath(self.page_of(file), page.parent.relative_to(self.root))
            return match[0].replace(match[1], target + mark + anchor)

        prose = {number for number, _ in check_links.lines_of_prose(text)}
        lines = text.split("\n")
        return "\n".join(check_links.LINK.sub(new_link, line) if number in prose and "](" in line else line
                         for number, line in enumerate(lines, 1))

    def write(self, name, text, weight):
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        settings = f"---\nsearch:\n  boost: {weight}\n---\n" if weight != 1 else ""
        (self.folder / name).write_text(settings + text)


def main():
    folder = pathlib.Path(sys.argv[1])
    root = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else pathlib.Path(__file__).parent.parent).resolve()
    site = Site(root, folder)
    pages = check_links.documents(root)
    for page in pages:
        name = page.relative_to(root)
        site.write(name, site.translated(page, page.read_text()), WEIGHTS.get(str(name), WEIGHT_OF_GUIDES if name.parent.name == "guide" else 1))
    for path in sorted(site.shown):
        site.write(site.page_of(path), listing(root, path), WEIGHT_OF_SOURCES)
    for name in site.pictures:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / name)
    shutil.copy(root / "docs" / "nav.yml", folder / ".nav.yml")
    print(f"pages: {len(pages)} documents, and {len(site.shown)} files and folders to which they link")


if __name__ == "__main__":
    main()
