"""What names the version agrees with include/tessera/version.h, and what releases need is there."""
import pathlib
import re
import subprocess
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def version():
    header = (ROOT / "include/tessera/version.h").read_text()
    return ".".join(re.search(rf"TESSERA_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))


class Release(unittest.TestCase):
    def test_the_citation_has_the_version_of_the_header(self):
        citation = (ROOT / "CITATION.cff").read_text()
        self.assertEqual(re.findall(r"^version: (.*)$", citation, re.MULTILINE), [version()])

    def test_the_changelog_begins_with_the_changes_since_the_last_release(self):
        titles = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
        self.assertEqual(titles[0], "[Unreleased]")
        for title in titles[1:]:
            self.assertRegex(title, r"^\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d$")

    def test_images_and_scripts_take_the_tested_libtorch(self):
        tested = re.search(r"torch_version=([\d.]+)", (ROOT / "dev").read_text())[1]
        self.assertIn(f"ARG TORCH_VERSION={tested}\n", (ROOT / "Dockerfile").read_text())
        self.assertIn(f"| {tested} |", (ROOT / "docs/guide/versions.md").read_text())

    def test_the_image_gets_what_the_build_reads(self):
        """The folders that the Dockerfile copies are those that .dockerignore lets through, and they are there."""
        copied = set(re.findall(r"^COPY ([\w.]+) /src/", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
        sent = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
        self.assertEqual(copied, sent)
        self.assertEqual([], [name for name in copied if not (ROOT / name).exists()])

    def test_portability_refuses_an_unknown_check(self):
        for arguments, expected in (((), "got ''"), (("riscv",), "got 'riscv'"), (("torch",), "expected versions of LibTorch")):
            result = subprocess.run([ROOT / ".ci/portability", *arguments], capture_output=True, text=True, timeout=30)
            self.assertEqual(result.returncode, 1)
            self.assertIn(expected, result.stderr)


if __name__ == "__main__":
    unittest.main()
