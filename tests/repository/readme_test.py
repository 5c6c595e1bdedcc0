"""The README says what is true: its program is examples/readme.cpp, and its commands exist."""
import pathlib
import re
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from check_packages import public_headers  # noqa: E402

README = (ROOT / "README.md").read_text()
GUIDES = sorted((ROOT / "docs").rglob("*.md"))


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def side(diff, sign):
    """One side of a diff: '+' the new, '-' the old."""
    return "".join(line[1:] or "\n" for line in diff.splitlines(keepends=True) if line[0] in (" ", "\n", sign))


class Readme(unittest.TestCase):
    def test_program_is_the_compiled_example(self):
        self.assertEqual(side(blocks(README, "diff")[0], "+"), (ROOT / "examples" / "readme.cpp").read_text())

    def test_diff_adds_four_lines_and_changes_two(self):
        lines = [line[0] for line in blocks(README, "diff")[0].splitlines() if line]
        self.assertEqual((lines.count("+"), lines.count("-")), (6, 2))

    def test_program_starts_before_line_40(self):
        self.assertLess(README[: README.index("```diff")].count("\n"), 40)

    def test_has_at_most_150_lines_and_no_open_numbers(self):
        self.assertLessEqual(README.count("\n"), 150)
        self.assertTrue("NUMBERS" + "_HERE" not in README, "the README has numbers that nobody measured")

    def test_verbs_exist(self):
        verbs = set(re.findall(r"^  (\w+) ", subprocess.run([ROOT / "dev"], capture_output=True, text=True).stdout, re.MULTILINE))
        for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES):
            for verb in re.findall(r"\./dev ([a-z]+)", document.read_text()):
                self.assertIn(verb, verbs, f"{document.name} names ./dev {verb}")

    def test_public_names_exist(self):
        headers = "\n".join(p.read_text() for p in public_headers(ROOT).values())
        for name in re.findall(r"`tessera::(?:\w+::)*(\w+)\(", README) + re.findall(r"`(k[A-Z]\w+)`", README):
            self.assertRegex(headers, rf"\b{name}\b")


if __name__ == "__main__":
    unittest.main()
