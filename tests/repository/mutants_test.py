"""scripts/mutants.py: the places that it changes, and the test programs that it runs. Nothing is compiled."""
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import mutants  # noqa: E402


def changed(text, kind):
    return [text[:start] + new + text[end:] for found, start, end, new in mutants.changes(mutants.code_of(text), text) if found == kind]


class Changes(unittest.TestCase):
    def test_of_each_kind(self):
        for kind, text, expected in [
                ("comparison", "if (a < b) f<int>(x);", ["if (a <= b) f<int>(x);"]),
                ("junction", "x = a && b;", ["x = a || b;"]),
                ("boolean", "f(/*waits=*/true);", ["f(/*waits=*/false);"]),
                ("negation", "if (auto i = f(); i.g(1)) {", ["if (auto i = f();!( i.g(1))) {"]),
                ("drop", "for (int i = 0; i < n; ++i) a->b(i).c();", ["for (int i = 0; i < n; ++i) {}"]),
                ("drop", "if (a) { b_ = c; }\nint d = e();", ["if (a) { {} }\nint d = e();"]),
                ("early", "if (a) return f(b);\nreturn c;", ["if (a) {}\nreturn c;"]),
                ("swap", "f(a,\n  b + 1);", ["f(b + 1,\n  a);"]),
                ("swap", "int f(int a, const B& b) {", []),
                ("bound", "at(x.size());", ["at(x.size() + 1);", "at(x.size() - 1);"]),
                ("bound", "x[12] = y2;", ["x[(12 + 1)] = y2;", "x[(12 - 1)] = y2;"])]:
            self.assertEqual(changed(text, kind), expected, text)

    def test_are_of_code_alone(self):
        for text in ('// if (a) return 1;\n#include <a < b>\nconst char* s = "if (a == 1)";', "TORCH_INTERNAL_ASSERT(a == 1 && b);",
                     'std::string describe(int i) {\n  if (i == 1) return f(a, b);\n}'):
            self.assertEqual(list(mutants.changes(mutants.code_of(text), text)), [], text)
        checked = 'TORCH_CHECK(a.b(), "[f] ", c == 1 ? 2 : 3, f(d, e));'
        self.assertEqual([kind for kind, *_ in mutants.changes(mutants.code_of(checked), checked)], ["drop"])

    def test_leave_the_numbers_of_lines(self):
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "a.cpp"
            source.write_text("f(a,\n  b);\nend")
            self.assertEqual(mutants.Mutant("p.drop.0", source, 0, 10, "{}").text(), "{}\n\nend")


class Programs(unittest.TestCase):
    def run_script(self, text, patience=20):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "program"
            program.write_text("#!/bin/sh\n" + text)
            program.chmod(0o755)
            return mutants.run_program(program, ["A.B"], patience)[:2]

    def test_are_judged_by_their_end(self):
        self.assertEqual(self.run_script("echo '[  PASSED  ] 1 test.'"), ("passed", None))
        self.assertEqual(self.run_script("echo '[ RUN      ] A.B'\nexit 0"), ("killed", "A.B"))
        self.assertEqual(self.run_script("echo '[  PASSED  ] 1 test.'\nkill -SEGV $$"), ("killed", "(before any test)"))
        self.assertEqual(self.run_script("echo '[ RUN      ] A.B'\necho '[  FAILED  ] A.B (1 ms)'\nexit 1"), ("killed", "A.B"))

    def test_that_hang_are_ended_with_all_that_they_started(self):
        with tempfile.TemporaryDirectory() as folder:
            start = f"sleep 61 & echo $! >{folder}/1; setsid sh -c 'sleep 62 & echo $! >{folder}/2; wait' & sleep 63"
            self.assertEqual(self.run_script(f"echo '[ RUN      ] A.B'\n{start}", patience=1), ("timed out", "A.B"))
            for name in ("1", "2"):
                self.assertFalse(pathlib.Path(f"/proc/{(pathlib.Path(folder) / name).read_text().strip()}").exists())


if __name__ == "__main__":
    unittest.main()
