#!/usr/bin/env python3
"""Checks the site that MkDocs has made: that its relative links lead to its files, and those of pictures to pictures.

    check_site.py FOLDER

MkDocs checks the links of pages to pages, not what scripts/site_pages.py has made of them. Prints a line for each dead link; the
exit status is 1 if there is any.
"""
import html.parser
import pathlib
import re
import sys
import urllib.parse


class Links(html.parser.HTMLParser):
    """The targets of the links of a page, and whether each must be a picture."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.found.append((value, tag == "img"))


def problems_of(folder, page):
    for target, is_picture in Links(page.read_text()).found:
        name = urllib.parse.unquote(target.partition("#")[0].partition("?")[0])
        if not name or re.match(r"[a-z]+:|/", target):
            continue
        file = page.parent / name
        if not (file / "index.html" if file.is_dir() else file).exists():
            yield f"{page.relative_to(folder)}: link to {target}, which the site lacks"
        elif is_picture and file.suffix == ".html":
            yield f"{page.relative_to(folder)}: picture {target}, which is a page"


def main():
    folder = pathlib.Path(sys.argv[1])
    pages = sorted(folder.rglob("*.html"))
    problems = [problem for page in pages for problem in problems_of(folder, page)]
    print("\n".join(problems) if problems else f"site: the links of {len(pages)} pages lead somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
