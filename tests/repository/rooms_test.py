"""The documents name the folders and files that are there."""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from check_layers import LAYERS  # noqa: E402


def pages():
    names = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    return [ROOT / name for name in names if name != "CHANGELOG.md"]


class Rooms(unittest.TestCase):
    def test_every_folder_is_a_layer(self):
        self.assertEqual(sorted(LAYERS), sorted(path.name for path in (ROOT / "src").iterdir() if path.is_dir()))

    def test_the_overview_says_what_each_layer_holds(self):
        table = (ROOT / "docs/design/overview.md").read_text().split("## The rooms")[1].split("\n## ")[0]
        self.assertEqual(LAYERS, re.findall(r"^\| `(\w+)` \| \w", table, re.MULTILINE))

    def test_contributing_lists_the_layers_in_their_order(self):
        rule = (ROOT / "CONTRIBUTING.md").read_text().split("**The layer rule.**")[1].split(":")[0]
        self.assertEqual(LAYERS, re.findall(r"`(\w+)`", rule))

    def test_tests_lie_in_folders_of_layers(self):
        folders = {path.parent.name for path in (ROOT / "tests").glob("*/*_test.cpp")}
        self.assertEqual(set(), folders - set(LAYERS) - {"device", "process", "faults", "mistakes", "support"})

    def test_files_that_documents_name_are_there(self):
        for page in pages():
            for name in re.findall(r"\b((?:src|include|tests|scripts|tools|cmake)/[a-z_0-9/]+(?:\.\w+|/))", page.read_text()):
                self.assertTrue((ROOT / name).exists(), f"{page.relative_to(ROOT)} names {name}, which is not there")


if __name__ == "__main__":
    unittest.main()
