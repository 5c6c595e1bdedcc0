"""scripts/compile_with.py, with builds that hold one small file."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class CompileWith(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        for torch in ("own", "other"):
            api = self.folder / torch / "include/torch/csrc/api/include"
            api.mkdir(parents=True)
            (api / "which.h").write_text(f"#define {torch.upper()}\n")
        self.pch = self.folder / "CMakeFiles/thing.dir/cmake_pch.hxx"
        self.pch.parent.mkdir(parents=True)
        self.pch.write_text("inline int of_header() { return 1; }\n")
        pathlib.Path(f"{self.pch}.gch").write_text("made by another compiler")

    def run_on(self, source, *arguments):
        path = self.folder / "thing.cpp"
        path.write_text(source)
        command = (f"/nowhere/ccache /nowhere/c++ -isystem {self.folder}/own/include/torch/csrc/api/include -fpch-preprocess -Wall "
                   f"-include {self.pch} -o CMakeFiles/thing.dir/thing.cpp.o -c {path}")
        (self.folder / "compile_commands.json").write_text(
            json.dumps([{"directory": str(self.folder), "command": command, "file": str(path)}]))
        return subprocess.run([sys.executable, "-B", ROOT / "scripts/compile_with.py", self.folder, "--compiler", "g++",
                               "--targets", "thing", *arguments], capture_output=True, text=True, timeout=60)

    def test_compiles_with_the_other_compiler_and_the_text_of_the_precompiled_header(self):
        result = self.run_on("#include <which.h>\n#ifndef OWN\n#error\n#endif\nint main() { return of_header(); }\n")
        self.assertEqual((result.returncode, result.stdout), (0, "1 of 1 files compile, with 0 warnings\n"), result.stderr)
        self.assertFalse((self.folder / "CMakeFiles/thing.dir/thing.cpp.o").exists())

    def test_takes_the_headers_of_another_libtorch(self):
        source = "#include <which.h>\n#ifdef OWN\n#error own\n#endif\n"
        self.assertEqual(self.run_on(source, "--torch", self.folder / "other").returncode, 0)
        self.assertEqual(self.run_on(source).returncode, 1)

    def test_shows_errors_and_counts_warnings(self):
        result = self.run_on("int main() { int unused; return missing; }\n", "--syntax-only")
        self.assertEqual(result.returncode, 1)
        self.assertIn("missing", result.stdout)
        self.assertIn("0 of 1 files compile, with 1 warnings", result.stdout)

    def test_makes_code_unless_told_not_to(self):
        source = 'int main() { asm("no_such_instruction"); }\n'
        self.assertEqual(self.run_on(source).returncode, 1)
        self.assertEqual(self.run_on(source, "--syntax-only").returncode, 0)

    def test_fails_if_there_is_no_such_file(self):
        self.assertEqual(self.run_on("", "--only", "another").returncode, 1)


if __name__ == "__main__":
    unittest.main()
