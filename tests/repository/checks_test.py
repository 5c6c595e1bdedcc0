"""The scripts behind ./dev check find what they look for."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(script, files):
    """Runs a script over a tree of the given files; returns its exit status and output."""
    with tempfile.TemporaryDirectory() as tree:
        for name, text in files.items():
            path = pathlib.Path(tree, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        result = subprocess.run([sys.executable, "-B", ROOT / "scripts" / script, tree], capture_output=True, text=True)
    return result.returncode, result.stdout


class CheckPackages(unittest.TestCase):
    HOUSE = {"core/base/CMakeLists.txt": "tessera_package(base\n  LINES 10)\n",
             "core/engine/CMakeLists.txt": "tessera_package(engine\n  STANDS_ON base\n  ROOMS unit grad\n  LINES 10)\n",
             "dialects/paddle/CMakeLists.txt": "tessera_package(paddle\n  STANDS_ON engine\n  LINES 10)\n",
             "dialects/fairscale/CMakeLists.txt": "tessera_package(fairscale\n  STANDS_ON engine\n  LINES 10)\n",
             "core/base/b.h": "", "core/engine/unit/u.h": "", "core/engine/grad/g.h": "",
             "include/tessera/base/y.h": "", "include/tessera/engine/x.h": "#include <tessera/base/y.h>\n",
             "dialects/paddle/include/tessera/dialects/p.h": "", "tests/support/s.h": ""}

    def run_with(self, files):
        return run("check_packages.py", {**self.HOUSE, **files})

    def assert_finds(self, files, message):
        status, output = self.run_with(files)
        self.assertEqual(status, 1, output)
        self.assertIn(message, output)

    def test_takes_an_include_of_a_package_below(self):
        status, output = self.run_with({"core/engine/grad/a.cpp": '#include "engine/unit/u.h"\n#include "base/b.h"\n#include <vector>\n',
                                        "dialects/paddle/a.cpp": '#include "base/b.h"\n#include <tessera/dialects/p.h>\n',
                                        "core/base/tests/t_test.cpp": '#include "engine/grad/g.h"\n#include "support/s.h"\n',
                                        "examples/e.cpp": "#include <tessera/engine/x.h>\n"})
        self.assertEqual(status, 0, output)
        self.assertIn("stands on base", output)

    def test_finds_an_include_of_a_package_above(self):
        self.assert_finds({"core/base/a.cpp": '\n#include "engine/unit/u.h"\n'},
                          'core/base/a.cpp:2: package base includes "engine/unit/u.h", but does not stand on engine')
        self.assert_finds({"core/base/a.cpp": "#include <tessera/engine/x.h>\n"}, "does not stand on engine")
        self.assert_finds({"include/tessera/base/y.h": "#include <tessera/engine/x.h>\n"}, "does not stand on engine")
        self.assert_finds({"core/base/tests/t_test.cpp": "#include <tessera/dialects/p.h>\n"}, "a test of base includes")

    def test_finds_an_include_of_a_later_room(self):
        self.assert_finds({"core/engine/unit/a.cpp": '#include "engine/grad/g.h"\n'}, "room unit includes")

    def test_finds_a_file_in_no_room(self):
        self.assert_finds({"core/engine/extra/a.cpp": ""}, "core/engine/extra/a.cpp: lies in no room of engine")

    def test_finds_packages_that_stand_on_each_other(self):
        result = self.run_with({"core/base/CMakeLists.txt": "tessera_package(base\n  STANDS_ON engine\n  LINES 10)\n"})
        self.assertEqual(result[0], 1)

    def test_finds_a_package_of_more_lines_than_it_states(self):
        self.assert_finds({"core/base/a.cpp": "int x;\n" * 11}, "core/base: has 11 lines of C++; it states LINES 10")

    def test_finds_a_dialect_in_the_engine(self):
        self.assert_finds({"core/engine/unit/a.cpp": "#include <tessera/dialects/p.h>\n"}, "does not stand on paddle")
        self.assert_finds({"core/engine/unit/a.cpp": "// as FairScale does\n"}, "names a dialect")

    def test_finds_a_dialect_in_another(self):
        self.assert_finds({"dialects/fairscale/a.cpp": "#include <tessera/dialects/p.h>\n"}, "does not stand on paddle")
        self.assert_finds({"dialects/fairscale/python/a.py": "from ..paddle import b\n"}, "imports the dialect paddle")

    def test_finds_a_private_header_in_a_public_one(self):
        self.assert_finds({"include/tessera/engine/x.h": '#include "engine/unit/u.h"\n'}, "public headers include only")

    def test_finds_a_private_header_in_a_program(self):
        self.assert_finds({"examples/x.cpp": '#include "engine/unit/u.h"\n'}, "programs include public headers")
        self.assert_finds({"launcher/x.cpp": "#include <tessera/engine/x.h>\n"}, "it starts without the library")


class CheckTypes(unittest.TestCase):
    def assert_clash(self, files, message):
        self.assertEqual(run("check_types.py", files), (1, message + "\n"))

    def assert_none(self, files):
        self.assertEqual(run("check_types.py", files), (0, "types: no program has two of one name\n"))

    def test_finds_two_types_of_one_name(self):
        self.assert_clash({"core/group/a.h": "namespace tessera {\n\n/// A part.\nstruct Part {\n  int x;\n};\n}\n",
                           "core/optim/b.cpp": "namespace tessera { class TESSERA_API Part final : public Base<int> { }; }\n"},
                          "type tessera::Part is defined in core/group/a.h:4 and in core/optim/b.cpp:1")

    def test_finds_them_in_a_program_and_the_library(self):
        self.assert_clash({"include/tessera/a.h": "namespace a::b { enum class Kind : int { kOne }; }\n",
                           "launcher/b.h": "namespace a { namespace b { template <class T> struct Kind {}; } }\n"},
                          "type a::b::Kind is defined in include/tessera/a.h:1 and in launcher/b.h:1")
        self.assert_clash({"tests/group/a.cpp": "union U {};\n", "tests/support/b.h": "struct U {};\n"},
                          "type U is defined in tests/support/b.h:1 and in tests/group/a.cpp:1")

    def test_finds_members_of_one_name(self):
        self.assert_clash({"core/unit/a.cpp": "struct A::Impl { struct [[nodiscard]] Part {}; };\n",
                           "core/unit/b.cpp": "struct A { private: struct Impl {}; };\n"},
                          "type A::Impl is defined in core/unit/a.cpp:1 and in core/unit/b.cpp:1")

    def test_takes_types_that_no_other_file_sees(self):
        text = ("struct A;\nnamespace {\nstruct A { int x = 1; };\n}\nnamespace t {\nvoid f() {\n  struct A {};\n}\n}\n"
                "// struct B {\nconst char* text = \"struct B {\";\n")
        self.assert_none({"core/unit/a.cpp": text, "core/unit/b.cpp": text})

    def test_takes_types_of_different_scopes_programs_and_arguments(self):
        self.assert_none({"core/unit/a.cpp": "namespace a { struct A {}; template <> struct B<int> {}; }\n",
                          "core/unit/b.cpp": "namespace b { struct A {}; }\nnamespace a { template <> struct B<a::A> {}; }\n",
                          "tests/group/a.cpp": "struct C {};\n", "tests/unit/a.cpp": "struct C {};\n",
                          "core/group/x.cpp": "struct D {};\n", "core/group/no_x.cpp": "struct D {};\n"})


class CheckWords(unittest.TestCase):
    def assert_finds(self, files, message):
        status, output = run("check_words.py", files)
        self.assertEqual(status, 1, output)
        self.assertIn(message, output)

    def clauses(self, text):
        """The lines of a document that --clauses prints."""
        with tempfile.TemporaryDirectory() as tree:
            pathlib.Path(tree, "a.md").write_text(text)
            output = subprocess.run([sys.executable, "-B", ROOT / "scripts/check_words.py", "--clauses", tree],
                                    capture_output=True, text=True).stdout
        return [line for line in output.split("\n") if line.startswith("a.md:")]

    def test_finds_clauses_without_a_noun(self):
        for text in ("What is gathered is freed.", "It sends what it has.", "Who waits looks first.", "It is up to who waits."):
            self.assertEqual(self.clauses(text), ["a.md:1: " + text])

    def test_leaves_questions_and_relative_clauses_alone(self):
        for text in ("What is a shard?", "The message says what came.", "A user, who waits, looks first.", "`what` it is"):
            self.assertEqual(self.clauses(text), [])

    def test_refuses_too_many_clauses(self):
        words = "one two three four five six seven eight nine ten\n" * 150
        self.assert_finds({"docs/a.md": words + "It sends what it has.\n" * 9}, "in place of a noun; expected at most 2")
        self.assertEqual(run("check_words.py", {"docs/a.md": words + "It sends what it has.\n"})[0], 0)

    def habits(self, name, text):
        """The habits in a file that --habits prints, without the place."""
        with tempfile.TemporaryDirectory() as tree:
            path = pathlib.Path(tree, name)
            path.parent.mkdir(parents=True)
            path.write_text(text)
            output = subprocess.run([sys.executable, "-B", ROOT / "scripts/check_words.py", "--habits", tree],
                                    capture_output=True, text=True).stdout
        return [line.split("[")[1].rstrip("]") for line in output.split("\n") if line.startswith(name)]

    def test_finds_habits_also_over_lines(self):
        for text, habit in (("// Of sums, nothing.\n", '"Of" at the beginning of a sentence'),
                            ("int a;  /// The same for b.\n", '"The same" without a noun'),
                            ("// Waits in\n// vain.\n", '"in vain"'), ("// a thing,\n// which is small\n", '", which"')):
            self.assertEqual(self.habits("core/a.h", text), [habit])
        for text in ("// One of sums\nint x;\n// Of course.\n", "// The same rows. It may differ for good reasons.\n", "int gone;\n"):
            self.assertEqual(self.habits("core/a.h", text), [])

    def test_refuses_habits_but_for_a_share_of_which(self):
        self.assert_finds({"core/a.h": "// It is gone.\n"}, '"gone" occurs 1 times elsewhere; expected at most 0')
        self.assertEqual(run("check_words.py", {"core/a.h": "// a, which is small\n"})[0], 0)
        self.assert_finds({"core/a.h": "// a, which is small\n" * 2}, '", which" occurs 2 times')
        self.assertEqual(run("check_words.py", {"core/tests/a.h": "// It is gone.\n"})[0], 0)

    def test_finds_vague_names(self):
        self.assert_finds({"core/group/tensor_utils.h": ""}, 'is named "utils"')
        self.assert_finds({"core/group/a.h": "class BufferManager {};\n"}, "type BufferManager")

    def test_finds_paths_of_a_machine(self):
        self.assert_finds({"docs/a.md": "see /home/" + "somebody/tessera\n"}, "a path of one machine")

    def test_finds_names_of_one_device(self):
        self.assert_finds({"core/unit/a.cpp": "bool b = tensor.is_cuda();\n"}, "is_cuda; expected a device of any type")
        self.assertEqual(run("check_words.py", {"core/unit/a.cpp": "// as is_cuda() was\n"})[0], 0)

    def test_finds_dead_links_and_blanks(self):
        self.assert_finds({"README.md": "[a](docs/none.md)\n"}, "link to docs/none.md")
        self.assert_finds({"a.cpp": "int a; \n"}, "blanks at the end")

    def test_takes_a_clean_tree(self):
        status, output = run("check_words.py", {"README.md": "[a](docs/a.md#b)\n", "docs/a.md": "https://a.b/work\n"})
        self.assertEqual(status, 0, output)


class CheckBudgets(unittest.TestCase):
    def problems(self, name, text):
        """The problems of a tree with one file."""
        status, output = run("check_budgets.py", {"core/unit/CMakeLists.txt": "tessera_package(unit)\n", name: text})
        found = [line for line in output.split("\n") if "budget " in line]
        self.assertEqual(status, 1 if found else 0, output)
        return found

    def test_measures_functions(self):
        body = "".join(f"  a({i});  // }}\n" for i in range(50))
        function = "namespace n {\nvoid NAME(int x) {\n" + body + "}\n}\n"
        self.assertEqual(self.problems("core/unit/a.cpp", function.replace("NAME", "long_one")),
                         ["core/unit/a.cpp:2: long_one: 52 lines, budget 40"])
        self.assertEqual(self.problems("core/unit/tests/a_test.cpp", function), [])
        self.assertEqual(self.problems("core/unit/a.cpp", function.replace("NAME", "cases")), [])
        self.assertEqual(self.problems("core/unit/a.cpp", "MACRO(a)\nMACRO(b)\nnamespace n {\n" + "int x;\n" * 50 + "}\n"), [])

    def test_measures_files_and_lines(self):
        self.assertEqual(self.problems("core/unit/a.cpp", "int x;\n" * 501), ["core/unit/a.cpp: 501 lines, budget 500"])
        self.assertEqual(self.problems("core/unit/a.cpp", "int " + "x" * 100 + ";\n"),
                         ["core/unit/a.cpp: wide lines: 1 lines of over 100 columns, budget 0"])
        self.assertEqual(self.problems("core/unit/a.cpp", 'auto* text = R"(' + "x" * 100 + ')";\n'), [])
        self.assertEqual(self.problems("CHANGELOG.md", "a\n" * 121), ["CHANGELOG.md: 121 lines, budget 120"])

    def test_counts_members_of_classes_but_for_plain_structs(self):
        members = "".join(f"  std::map<int, int> m{i}_ = {{{{1, 2}}}};\n" for i in range(14))
        rest = "  explicit A(int x) : m_{x} {}\n  enum B { kB };\n  struct C {\n    int c, d;\n  };\n  std::function<void(int)> f_, g_;\n"
        self.assertEqual(self.problems("core/unit/a.h", "class A {\n public:\n" + rest + members + "};\n"),
                         ["core/unit/a.h:1: class A: 16 members, budget 15"])
        self.assertEqual(self.problems("core/unit/a.h", "struct A {\n  int x();\n" + members * 2 + "};\n"), [])


if __name__ == "__main__":
    unittest.main()
