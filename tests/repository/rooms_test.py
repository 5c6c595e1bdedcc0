"""The documents name the packages, folders and files that are there."""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from check_packages import House, public_headers  # noqa: E402

HOUSE = House(ROOT)
FOLDERS = "include|core|dialects|interop|loop|trace|planner|capi|command|launcher|benchmarks|tests|scripts|cmake"


def pages():
    names = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    return [ROOT / name for name in names if name != "CHANGELOG.md"]


def page_of(package):
    return (package.folder.parent if package.is_dialect else package.folder) / "README.md"


class Packages(unittest.TestCase):
    def test_each_has_a_page_with_its_headers_and_what_it_stands_on(self):
        for package in HOUSE.packages.values():
            page = page_of(package).read_text()
            self.assertIn("**Promise.**", page)
            standing = page.split("on** ")[1].split("\n\n")[0]
            for other in package.stands_on:
                self.assertRegex(standing, rf"\b{other}\b", package.name)
            for header in [] if package.is_dialect else package.headers:
                self.assertIn(f"{header.name}`", page)
            for room in package.rooms:
                self.assertRegex(page, rf"(?m)^\| `{room}/` \| \w", package.name)

    def test_pages_name_rooms_in_their_order(self):
        for package in HOUSE.packages.values():
            rooms = re.findall(r"(?m)^\| `(\w+)/` \| \w", page_of(package).read_text())
            self.assertTrue(package.is_dialect or rooms == package.rooms, package.name)

    def test_overview_and_contributing_list_them(self):
        table = (ROOT / "docs/design/overview.md").read_text().split("## The packages")[1].split("\n## ")[0]
        listed = re.findall(r"^\| \[`([\w/]+)`\]", table, re.MULTILINE)
        folders = {str(page_of(p).parent.relative_to(ROOT)) for p in HOUSE.packages.values()} | {"launcher", "benchmarks"}
        self.assertEqual(set(listed), folders)
        tree = (ROOT / "CONTRIBUTING.md").read_text().split("```")[1]
        for folder in folders:
            self.assertRegex(tree, rf"\b{pathlib.Path(folder).name}\b")

    def test_files_that_documents_name_are_there(self):
        headers = public_headers(ROOT)
        for page in pages():
            for name in re.findall(rf"(?<![\w/.])((?:{FOLDERS})/[a-z_0-9/]+(?:\.\w+|/))", page.read_text()):
                self.assertTrue((ROOT / name).exists() or f"tessera/{name}" in headers, f"{page.relative_to(ROOT)} names {name}, which is not there")

    def test_files_that_tables_of_tasks_name_are_there(self):
        headers = {pathlib.Path(name).name for name in public_headers(ROOT)}
        for page in pages():
            _, _, table = page.read_text().partition("| question or task | files |\n")
            for name in re.findall(r"`([a-z_0-9/]+\.(?:cpp|h|py|sh|md))`", table.split("\n\n")[0]):
                found = (page.parent / name).exists() or (ROOT / name).exists() or any(page.parent.glob(f"*/{name}"))
                self.assertTrue(found or name in headers, f"{page.relative_to(ROOT)} names {name}, which is not there")


if __name__ == "__main__":
    unittest.main()
