// `tessera ckpt`: its output, the files that it makes, and its exit status.

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "launched.h"
#include "launcher/reserved_port.h"

namespace tessera::ckpt_test {

namespace fs = std::filesystem;
using nlohmann::json;

ProgramEnd ckpt(const Command& arguments, ProgramRun::Options options = {}) {
  return run_program(with({TESSERA_CLI, "ckpt"}, arguments), std::move(options));
}

/// A safetensors file with two tensors of float32, whose values begin with `first`.
void write_model(const std::string& path, float first) {
  std::vector<float> values(2000, 1.0F);
  values[0] = first;
  const json header = {
      {"__metadata__", {{"format", "pt"}, {"tied", "weight"}}},
      {"weight", {{"dtype", "F32"}, {"shape", {30, 60}}, {"data_offsets", {0, 7200}}}},
      {"bias", {{"dtype", "F32"}, {"shape", {200}}, {"data_offsets", {7200, 8000}}}}};
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8) << text;
  file.write(reinterpret_cast<const char*>(values.data()), 8000);
}

/// The header of a safetensors file.
json header_of(const std::string& path) {
  const std::string text = read_file(path);
  uint64_t length = 0;
  std::memcpy(&length, text.data(), 8);
  return json::parse(text.substr(8, length));
}

/// A directory with `one.safetensors` and the checkpoint `one` that was made of it.
class Ckpt : public ::testing::Test {
 protected:
  Ckpt() {
    write_model(path("one.safetensors"), 1);
    const auto end = ckpt({"import", path("one.safetensors"), path("one"), "--quiet"});
    EXPECT_EQ(end.status, 0) << end.err;
    EXPECT_EQ(end.out + end.err, "");
  }
  std::string path(const std::string& name) const { return directory_.path(name); }

  void damage(const std::string& file) const {
    std::string text = read_file(file);
    text.back() = static_cast<char>(text.back() ^ 1);
    std::ofstream(file, std::ios::binary) << text;
  }

  TemporaryDirectory directory_;
};

TEST(CkptHelp, NamesEveryCommandAndTheExitStatus) {
  const auto all = ckpt({});
  EXPECT_EQ(all.status, 0) << all.err;
  for (const std::string name :
       {"ls", "inspect", "verify", "diff", "reshard", "export", "import"}) {
    EXPECT_TRUE(contains(all.out, "\n  " + name)) << all.out;
    const auto end = ckpt({name, "--help"});
    EXPECT_EQ(end.status, 0) << end.err;
    EXPECT_TRUE(contains(end.out, "Usage: tessera ckpt " + name)) << end.out;
    EXPECT_TRUE(contains(end.out, "Exit status: 0 if all is well")) << end.out;
    EXPECT_EQ(contains(end.out, "--quiet"), name != "inspect" && name != "ls") << end.out;
  }
}

TEST_F(Ckpt, InspectTellsWhatIsThere) {
  const auto end = ckpt({"inspect", path("one")});
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_EQ(end.err, "");
  EXPECT_TRUE(contains(end.out, "saved by 1 ranks (imported), id ")) << end.out;
  EXPECT_TRUE(contains(end.out, "tensor       2 tensors           8000 bytes")) << end.out;
  EXPECT_TRUE(contains(end.out, "weight = tied [30, 60]")) << end.out;
  EXPECT_TRUE(contains(end.out, "bias [200]")) << end.out;
  const auto machine = ckpt({"inspect", path("one"), "--json"});
  EXPECT_EQ(machine.status, 0) << machine.err;
  EXPECT_EQ(std::count(machine.out.begin(), machine.out.end(), '\n'), 1);
  const json summary = json::parse(machine.out);
  EXPECT_EQ(summary.at("ranks"), 1);
  EXPECT_EQ(summary.at("optimizer"), "");
  EXPECT_EQ(summary.at("files"), json({"index.json", "rank-00000-of-00001.safetensors"}));
  json weight;
  for (const json& tensor : summary.at("tensors"))
    if (tensor.at("names").at(0) == "weight") weight = tensor;
  EXPECT_EQ(weight, json({{"kind", "tensor"},
                          {"names", {"weight", "tied"}},
                          {"state", ""},
                          {"dtype", "F32"},
                          {"shape", {30, 60}},
                          {"bytes", 7200},
                          {"pieces", 1}}));
}

TEST_F(Ckpt, InspectTellsOfTheOptimizerAndTheNumbers) {
  const std::string trained = path("trained");
  {
    const tools::ReservedPort port(0);
    ProgramRun probe({CHECKPOINT_PROBE, trained},
                     {.environment = environment_of(0, 1, port.number())});
    ASSERT_TRUE(probe.wait_for_output("saved 1\n"));
    probe.signal(SIGKILL);
    probe.wait();
  }
  const auto end = ckpt({"inspect", trained});
  EXPECT_EQ(end.status, 0) << end.err;
  for (const std::string part : {"saved by 1 ranks (fully_shard: level p_g_os", "number save = ",
                                 "optimizer AdamW after 1 steps", "exp_avg_sq", "random/"})
    EXPECT_TRUE(contains(end.out, part)) << part << " in " << end.out;
  const json summary = json::parse(ckpt({"inspect", trained, "--json"}).out);
  EXPECT_EQ(summary.at("optimizer"), "AdamW");
  EXPECT_EQ(summary.at("optimizer_steps"), 1);
  EXPECT_GE(summary.at("numbers").at("save"), 1);
}

TEST_F(Ckpt, LsListsWhatIsThereAndVerbsTakeTheLatest) {
  for (const std::string name : {"runs/step-2", "runs/step-10"})
    ASSERT_EQ(ckpt({"import", path("one.safetensors"), path(name), "--quiet"}).status, 0);
  const auto end = ckpt({"ls", path("runs")});
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_TRUE(contains(end.out, "\n  step-2 ") && contains(end.out, "\n* step-10 ")) << end.out;
  EXPECT_TRUE(contains(end.out, " UTC   8.0 kB     1  imported")) << end.out;
  const json all = json::parse(ckpt({"ls", path("runs"), "--json"}).out);
  EXPECT_EQ(all.size(), 2u);
  EXPECT_EQ(all[1].at("path"), path("runs/step-10"));
  EXPECT_TRUE(all[1].at("latest") == true && all[1].at("bytes") == 8000 &&
              all[1].at("problem") == "");
  for (const std::string verb : {"inspect", "verify"}) {
    const auto latest = ckpt({verb, path("runs")});
    EXPECT_EQ(latest.status, 0) << latest.err;
    EXPECT_TRUE(contains(latest.err, "is a series; its latest is '" + path("runs/step-10")))
        << latest.err;
  }
  fs::remove(path("runs/step-2/rank-00000-of-00001.safetensors"));
  const auto damaged = ckpt({"ls", path("runs")});
  EXPECT_EQ(damaged.status, 1);
  EXPECT_TRUE(contains(damaged.out, "    not intact: [checkpoint]")) << damaged.out;
  EXPECT_EQ(ckpt({"ls", path("none")}).status, 2);
}

TEST_F(Ckpt, VerifyEndsWithOneIfThereIsDamage) {
  const auto well = ckpt({"verify", path("one")});
  EXPECT_EQ(well.status, 0) << well.err;
  EXPECT_EQ(well.out, "all checksums are right\n");
  EXPECT_TRUE(contains(well.err, "verify: 0.0 of 0.0 MB (100 %)\n")) << well.err;
  EXPECT_EQ(ckpt({"verify", path("one"), "--quiet"}).err, "");
  const std::string file = path("one/rank-00000-of-00001.safetensors");
  damage(file);
  const auto damaged = ckpt({"verify", path("one"), "--quiet"});
  EXPECT_EQ(damaged.status, 1);
  EXPECT_EQ(damaged.err, "");
  EXPECT_TRUE(contains(damaged.out, "'" + file + "' is damaged")) << damaged.out;
  EXPECT_EQ(std::count(damaged.out.begin(), damaged.out.end(), '\n'), 1);
}

TEST_F(Ckpt, DiffEndsWithOneIfThereIsADifference) {
  write_model(path("other.safetensors"), 3);
  ASSERT_EQ(ckpt({"import", path("other.safetensors"), path("other"), "--quiet"}).status, 0);
  const auto same = ckpt({"diff", path("one"), path("one")});
  EXPECT_EQ(same.status, 0) << same.err;
  EXPECT_EQ(same.out, "no difference\n");
  EXPECT_TRUE(contains(same.err, "diff: ")) << same.err;
  const auto differs = ckpt({"diff", path("one"), path("other"), "--quiet"});
  EXPECT_EQ(differs.status, 1);
  EXPECT_EQ(differs.err, "");
  EXPECT_TRUE(contains(differs.out, "': 1 of 1800 values differ, by at most 2\n")) << differs.out;
}

TEST_F(Ckpt, ReshardWritesForAnotherNumberOfRanks) {
  const auto end = ckpt({"reshard", path("one"), path("on3"), "--ranks", "3"});
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_EQ(end.out, "");
  EXPECT_TRUE(contains(end.err, "reshard: ") && contains(end.err, "(100 %)\n")) << end.err;
  for (const std::string rank : {"0", "1", "2"})
    EXPECT_TRUE(fs::exists(path("on3/rank-0000" + rank + "-of-00003.safetensors")));
  EXPECT_EQ(json::parse(ckpt({"inspect", path("on3"), "--json"}).out).at("ranks"), 3);
  EXPECT_EQ(ckpt({"diff", path("one"), path("on3")}).status, 0);
  EXPECT_EQ(ckpt({"verify", path("on3")}).status, 0);
}

TEST_F(Ckpt, ExportAndImportAreInverse) {
  for (const std::string name : {"again.safetensors", "again/"}) {
    const auto written = ckpt({"export", path("one"), path(name)});
    EXPECT_EQ(written.status, 0) << written.err;
    EXPECT_EQ(written.out, "");
    EXPECT_TRUE(contains(written.err, "export: ")) << written.err;
    const auto read = ckpt({"import", path(name), path("two")});
    EXPECT_EQ(read.status, 0) << read.err;
    EXPECT_TRUE(contains(read.err, "import: ")) << read.err;
    EXPECT_EQ(ckpt({"diff", path("one"), path("two")}).out, "no difference\n");
  }
}

TEST_F(Ckpt, WhatNeedsPythonNamesTheCommandToRun) {
  fs::create_directories(path("dcp"));
  std::ofstream(path("dcp/.metadata")) << "pickle";
  const std::string one = path("one"), to = path("to"), dcp = path("dcp");
  const std::string file = path("one.safetensors"), run = "python -m tessera.exchange ";
  const std::vector<std::pair<Command, std::string>> cases = {
      {{"export", one, to + ".pt"}, "export '" + one + "' '" + to + ".pt'\n"},
      {{"export", one, to, "--format", "dcp", "--quiet", "--rename", "^a=b", "--rename", "b=$1"},
       "export '" + one + "' '" + to +
           "' --format 'dcp' --rename '^a=b' --rename 'b=$1' --quiet\n"},
      {{"export", one, to, "--optimizer", "optim"},
       "export '" + one + "' '" + to + "' --optimizer 'optim'\n"},
      {{"import", dcp, to, "--model", "net"}, "import '" + dcp + "' '" + to + "' --model 'net'\n"},
      {{"import", file, to, "--optimizer", "o", "--optimizer-class", "AdamW"},
       "import '" + file + "' '" + to + "' --optimizer 'o' --optimizer-class 'AdamW'\n"}};
  for (const auto& [arguments, command] : cases) {
    const auto end = ckpt(arguments);
    EXPECT_EQ(end.status, 2) << command;
    EXPECT_TRUE(contains(end.err, run + command)) << end.err;
    EXPECT_FALSE(fs::exists(to) || fs::exists(to + ".pt")) << command;
  }
}

TEST_F(Ckpt, ExportTakesAFormatAndADtype) {
  const auto end = ckpt({"export", path("one"), path("weights"), "--format", "safetensors",
                         "--dtype", "bf16", "--quiet"});
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_EQ(end.out + end.err, "");
  EXPECT_EQ(header_of(path("weights")).at("weight").at("dtype"), "BF16");
  EXPECT_EQ(header_of(path("weights")).at("__metadata__").at("tied"), "weight");
}

TEST_F(Ckpt, ProgressIsOneLineOnATerminal) {
  const auto end =
      ckpt({"reshard", path("one"), path("on2"), "--ranks", "2"}, {.on_terminal = true});
  EXPECT_EQ(end.status, 0) << end.out;
  EXPECT_TRUE(contains(end.out, "\rreshard") || contains(end.out, "\r\033[Kreshard: ")) << end.out;
  EXPECT_EQ(std::count(end.out.begin(), end.out.end(), '\n'), 1) << end.out;
}

TEST_F(Ckpt, ToAFullDeviceEndsWithStatusTwo) {
  ASSERT_EQ(ckpt({"reshard", path("one"), path("on2"), "--ranks", "2", "--quiet"}).status, 0);
  const std::string one = " '" + path("one") + "'", other = " '" + path("on2") + "'";
  const std::vector<std::string> commands = {"ckpt inspect" + one,
                                             "ckpt inspect --json" + one,
                                             "ckpt verify --quiet" + one,
                                             "ckpt --help",
                                             "ckpt diff --quiet" + one + other,
                                             "ckpt",
                                             "version",
                                             "ckpt verify --quiet" + one + " >&-"};
  for (const std::string& command : commands) {
    const bool is_closed = command.ends_with(">&-");
    const auto end =
        run_program({"sh", "-c", TESSERA_CLI " " + command + (is_closed ? "" : " > /dev/full")});
    EXPECT_EQ(end.status, 2) << command;
    EXPECT_TRUE(contains(end.err, "could not write the output")) << command << ": " << end.err;
  }
  // Nothing shows the error, but the status does.
  const std::string none = " '" + path("none") + "'";
  const auto end =
      run_program({"sh", "-c", TESSERA_CLI " ckpt inspect" + none + " > /dev/full 2> /dev/full"});
  EXPECT_EQ(end.status, 2);
  const Command progress = {
      "sh", "-c",
      TESSERA_CLI " ckpt reshard --ranks 3" + one + " '" + path("on3") + "' 2> /dev/full"};
  EXPECT_EQ(run_program(progress).status, 0);
}

/// A safetensors file of 64 tensors of 64 MiB, which takes no room on the disk.
void write_sparse_model(const std::string& path) {
  constexpr int64_t kTensors = 64, kBytes = int64_t{64} << 20;
  json header;
  for (int64_t i = 0; i < kTensors; ++i)
    header["layers." + std::to_string(i)] = {
        {"dtype", "U8"}, {"shape", {kBytes}}, {"data_offsets", {i * kBytes, (i + 1) * kBytes}}};
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(&length), 8) << text;
  fs::resize_file(path, 8 + length + kTensors * kBytes);
}

TEST_F(Ckpt, AnInterruptLeavesNothingThatWasBegun) {
  write_sparse_model(path("large.safetensors"));
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    ProgramRun import({TESSERA_CLI, "ckpt", "import", path("large.safetensors"), path("to")});
    const std::string file = path("to.tmp/rank-00000-of-00001.safetensors");
    const auto has_begun = [&] {
      std::error_code error;
      return fs::file_size(file, error) > (16 << 20) && !error;
    };
    while (!has_begun() && is_running(import.pid()))
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    import.signal(signal);
    const auto end = import.wait();
    EXPECT_EQ(end.status, 128 + signal) << end.err;
    EXPECT_FALSE(fs::exists(path("to")) || fs::exists(path("to.tmp"))) << signal;
  }
  // Ignored signals stay ignored, as with nohup.
  ProgramRun ignoring({"sh", "-c",
                       "trap '' HUP; exec " TESSERA_CLI " ckpt import '" + path("one.safetensors") +
                           "' '" + path("to") + "'"});
  ignoring.signal(SIGHUP);
  EXPECT_LE(ignoring.wait().status, 128 + SIGHUP);
}

TEST_F(Ckpt, AnInterruptedExportLeavesNoDraft) {
  ASSERT_EQ(ckpt({"import", path("one.safetensors"), path("to"), "--quiet"}).status, 0);
  write_sparse_model(path("large.safetensors"));
  fs::resize_file(path("large.safetensors"), fs::file_size(path("large.safetensors")));
  for (const std::string name : {"to.safetensors", "model"}) {
    ProgramRun run({TESSERA_CLI, "ckpt", "export", path("one"), path(name)});
    while (!fs::exists(path(name + ".tmp")) && is_running(run.pid())) {
    }
    run.signal(SIGINT);
    const auto end = run.wait();
    // The export may have been too fast for this test.
    EXPECT_TRUE(end.status == 128 + SIGINT || end.status == 0) << end.status;
    EXPECT_EQ(fs::exists(path(name)), end.status == 0);
    EXPECT_FALSE(fs::exists(path(name + ".tmp"))) << name;
  }
}

// A mount point has no directory beside it on its own file system.
TEST_F(Ckpt, ToAMountPointIsWrittenInsideIt) {
  if (run_program({"unshare", "-rm", "true"}).status != 0)
    GTEST_SKIP() << "this process may not mount anything";
  fs::create_directories(path("mount"));
  const std::string script = R"(set -e
mount -t tmpfs none "$1/mount"
for i in 1 2; do "$0" ckpt import "$1/one.safetensors" "$1/mount" --quiet; done
ls "$1" "$1/mount"
"$0" ckpt verify "$1/mount" --quiet
"$0" ckpt diff "$1/mount" "$1/one" --quiet
"$0" ckpt reshard "$1/mount" "$1/mount/" --ranks 2 --quiet
"$0" ckpt inspect "$1/mount" | head -1
"$0" plan "$1/mount" > /dev/null
cp "$1/one/"* "$1/mount/"
! "$0" ckpt import "$1/one.safetensors" "$1/mount" --quiet
)";
  const auto end =
      run_program({"unshare", "-rm", "sh", "-c", script, TESSERA_CLI, directory_.path()});
  EXPECT_EQ(end.status, 0) << end.out << end.err;
  EXPECT_TRUE(contains(end.out, "mount:\ncheckpoint\n")) << end.out;
  EXPECT_TRUE(contains(end.out, "all checksums are right\nno difference\n")) << end.out;
  EXPECT_TRUE(contains(end.out, "saved by 2 ranks")) << end.out;
  EXPECT_TRUE(contains(end.err, "is a mount point")) << end.err;
  EXPECT_FALSE(fs::exists(path("mount.tmp")));
}

TEST_F(Ckpt, WhatCantBeDoneIsStatusTwoAndNamesTheFile) {
  fs::create_directories(path("empty"));
  std::ofstream(path("text.pt")) << "text";
  std::ofstream(path("short.safetensors")) << "text";
  const std::string none = path("none"), one = path("one"), to = path("to");
  const std::vector<std::pair<Command, std::string>> cases = {
      {{"inspect", none}, none},
      {{"inspect", path("empty")}, path("empty/index.json")},
      {{"verify", none}, none},
      {{"diff", one, none}, none},
      {{"diff", none, one}, none},
      {{"reshard", none, to, "--ranks", "2"}, none},
      {{"reshard", one, path("text.pt"), "--ranks", "2"}, path("text.pt")},
      {{"reshard", one, "/proc/tessera-test", "--ranks", "2"}, "/proc/tessera-test"},
      {{"export", none, path("to.safetensors")}, none},
      {{"export", one, path("to.onnx")}, path("to.onnx")},
      {{"export", one, path("empty"), "--format", "safetensors"}, path("empty")},
      {{"export", one, path("none/to.safetensors")}, none},
      {{"export", one, path("to.safetensors"), "--dtype", "float9"}, "float9"},
      {{"export", one, path("to.safetensors"), "--dtype", "int64"}, "options.dtype"},
      {{"import", path("none.pt"), to}, path("none.pt")},
      {{"import", path("text.pt"), to}, path("text.pt")},
      {{"import", path("short.safetensors"), to}, path("short.safetensors")},
      {{"import", path("empty"), to}, path("empty")},
      {{"import", path("one.safetensors"), path("text.pt")}, path("text.pt")},
  };
  for (const auto& [arguments, named] : cases) {
    const auto end = ckpt(arguments);
    EXPECT_EQ(end.status, 2) << arguments[0] << ' ' << named;
    EXPECT_EQ(end.out, "") << arguments[0] << ' ' << named;
    EXPECT_TRUE(contains(end.err, "tessera ckpt " + arguments[0] + ": ")) << end.err;
    EXPECT_TRUE(contains(end.err, named)) << end.err;
    EXPECT_FALSE(fs::exists(to) || fs::exists(to + ".tmp") || fs::exists(path("to.safetensors")))
        << named;
  }
}

TEST_F(Ckpt, AnswersWrongUsageWithStatusTwo) {
  const std::string one = path("one"), to = path("to");
  const std::vector<std::pair<Command, std::string>> cases = {
      {{"unknown"}, "unknown"},
      {{"inspect"}, "CKPT"},
      {{"inspect", one, one}, one},
      {{"inspect", one, "--quiet"}, "--quiet"},
      {{"verify"}, "CKPT"},
      {{"verify", one, "--json"}, "--json"},
      {{"diff", one}, "B is required"},
      {{"reshard", one, "--ranks", "2"}, "TO"},
      {{"reshard", one, to}, "--ranks"},
      {{"reshard", one, to, "--ranks", "0"}, "--ranks"},
      {{"reshard", one, to, "--ranks", "-1"}, "--ranks"},
      {{"reshard", one, to, "--ranks", "two"}, "--ranks"},
      {{"export", one}, "TO"},
      {{"export", one, to, "--format", "zip"}, "--format"},
      {{"import", one}, "CKPT"},
      {{"import", one, to, "--dtype", "float16"}, "--dtype"},
  };
  for (const auto& [arguments, named] : cases) {
    const auto end = ckpt(arguments);
    EXPECT_EQ(end.status, 2) << arguments[0] << ' ' << named;
    EXPECT_EQ(end.out, "") << named;
    EXPECT_TRUE(contains(end.err, named)) << end.err;
    EXPECT_TRUE(contains(end.err, "Usage: tessera ckpt")) << end.err;
    EXPECT_FALSE(fs::exists(to)) << named;
  }
}

}  // namespace tessera::ckpt_test
