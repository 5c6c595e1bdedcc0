"""./dev without a build: help, unknown verbs, and what it says when it may not install."""
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def dev(*arguments, cwd=ROOT, **environment):
    return subprocess.run([ROOT / "dev", *arguments], cwd=cwd, capture_output=True, text=True, timeout=30,
                          env={**os.environ, **environment})


def folder_of_commands(folder, *names):
    """A PATH that holds only the named commands."""
    for name in names:
        os.symlink(shutil.which(name), pathlib.Path(folder) / name)
    return folder


def add_scripts(folder, **texts):
    for name, text in texts.items():
        script = pathlib.Path(folder) / name
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)


class Dev(unittest.TestCase):
    def test_prints_help_without_arguments_from_any_folder(self):
        result = dev(cwd="/")
        self.assertEqual(result.returncode, 0)
        self.assertTrue(result.stdout.startswith("usage: ./dev VERB"))
        self.assertEqual(result.stderr, "")

    def test_refuses_an_unknown_verb(self):
        result = dev("bild")
        self.assertEqual(result.returncode, 2)
        self.assertIn('there is no verb "bild"', result.stderr)
        self.assertEqual(result.stdout, "")

    def test_names_the_examples_if_there_is_no_such_one(self):
        for arguments in (("example",), ("example", "nothing")):
            result = dev(*arguments)
            self.assertEqual(result.returncode, 2)
            self.assertIn(f'there is no example "{"".join(arguments[1:])}"; expected one of: bigger_than_memory group_sharded ', result.stderr)
            self.assertIn(" sharded_ddp ", result.stderr)
            self.assertEqual(result.stdout, "")

    def test_names_what_is_no_package(self):
        result = dev("test", "motor")
        self.assertEqual(result.returncode, 1)
        self.assertIn('"motor" is no package: CONTRIBUTING.md lists them', result.stderr)

    def test_compares_the_demo_as_it_is(self):
        result = dev("demo", "--compare", "--level", "none")
        self.assertEqual(result.returncode, 1)
        self.assertIn("--compare takes the demo as it is, without ARGS; got: --compare --level none", result.stderr)
        self.assertIn("scripts/compare_speed.py", result.stderr)

    def missing_in_an_empty_system(self, user, *arguments):
        """What ./dev says of its packages where no command is installed, and apt-get installs nothing."""
        with tempfile.TemporaryDirectory() as tree, tempfile.TemporaryDirectory() as commands:
            shutil.copy(ROOT / "dev", tree)
            path = folder_of_commands(commands, "bash", "dirname", "mkdir", "flock", "cat", "cmp")
            add_scripts(commands, **{"id": f"echo {user}", "apt-get": "exit 1"})
            result = subprocess.run([pathlib.Path(tree) / "dev", *arguments], capture_output=True, text=True, timeout=30,
                                    env={"PATH": path})
        self.assertEqual(result.returncode, 1)
        return result.stderr

    def test_names_the_packages_that_another_user_has_to_install_in_one_list(self):
        install = "apt-get update && apt-get install -y --no-install-recommends "
        for verb, packages in {"build": ["python3-dev"], "demo": [], "test": ["python3-dev", "openmpi-bin"]}.items():
            said = self.missing_in_an_empty_system(1000, verb)
            listed = said.partition(install)[2].split()
            for package in ["g++", "cmake", "ninja-build", "ccache", "python3", "python3-venv", *packages]:
                self.assertIn(package, listed, said)
        self.assertIn(install + "python3 doxygen python3-venv\n", self.missing_in_an_empty_system(1000, "docs"))
        self.assertIn(install + "python3 clang-format\n", self.missing_in_an_empty_system(1000, "check"))

    def test_installs_python_as_root_before_it_looks_for_it(self):
        said = self.missing_in_an_empty_system(0, "demo")
        self.assertRegex(said, "installing g[+][+] .* python3 python3-venv\n")
        self.assertRegex(self.missing_in_an_empty_system(0, "build"), "installing g[+][+] .* python3 python3-venv python3-dev\n")

    def test_sanitize_builds_and_runs_with_both_presets(self):
        with tempfile.TemporaryDirectory() as tree, tempfile.TemporaryDirectory() as commands:
            shutil.copy(ROOT / "dev", tree)
            calls = pathlib.Path(tree) / "calls"
            add_scripts(commands, **{name: f'echo {name} "$@" >> {calls}'
                                     for name in ("cmake", "ninja", "ctest", "g++", "ccache")})
            result = subprocess.run([pathlib.Path(tree) / "dev", "sanitize", "unit"], capture_output=True, text=True,
                                    timeout=30, env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}",
                                                     "Torch_DIR": tree, "TESSERA_PRESET": "release"})
            calls = calls.read_text()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertNotIn("readonly", result.stderr)
        for preset in ("asan", "tsan"):
            self.assertIn(f"cmake --preset {preset}", calls)
            self.assertRegex(calls, rf"ninja -C \S+/build/{preset} .*unit_tests")
            self.assertIn(f"ctest --test-dir build/{preset} ", calls)
        self.assertNotIn("release", calls)


if __name__ == "__main__":
    unittest.main()
