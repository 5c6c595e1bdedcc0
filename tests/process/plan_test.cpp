// `tessera plan`: its numbers, and its errors for impossible plans.

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "launched.h"

namespace tessera::plan_test {

using nlohmann::json;

ProgramEnd plan(const Command& arguments) {
  return run_program(with({TESSERA_CLI, "plan"}, arguments));
}

json report_of(Command arguments) {
  arguments.emplace_back("--json");
  const auto end = plan(arguments);
  EXPECT_EQ(end.status, 0) << end.err;
  return json::parse(end.out);
}

std::string write_list(const TemporaryDirectory& directory, const std::string& text) {
  std::ofstream(directory.path("list")) << text;
  return directory.path("list");
}

TEST(Plan, PrintsTheNumbersOfTheZeroPaperBesideItsOwn) {
  const Command paper = {"--parameters", "7.5e9", "--ranks", "64", "--param-dtype", "float16"};
  const auto end = plan(paper);
  EXPECT_EQ(end.status, 0) << end.err;
  const std::string line = "formula of the ZeRO paper";
  const auto at = end.out.find(line);
  ASSERT_NE(at, std::string::npos) << end.out;
  std::istringstream words(end.out.substr(at + line.size(), end.out.find('\n', at) - at));
  for (const std::string expected : {"120.0", "31.4", "16.6", "1.9"}) {
    std::string number, unit;
    words >> number >> unit;
    EXPECT_EQ(number, expected) << end.out;
    EXPECT_EQ(unit, "GB");
  }
  const json report = report_of(paper);
  EXPECT_EQ(report.at("parameters"), 7'500'000'000);
  const double expected[] = {120e9, 31.40625e9, 16.640625e9, 1.875e9};
  for (size_t i = 0; i < 4; ++i)
    EXPECT_EQ(report.at("levels").at(i).at("zero_paper_bytes"), expected[i]);
}

// Two ranks, two units of 64 elements of float32; whole numbers that can be checked by hand.
TEST(Plan, PrintsWhatARankKeepsAndSends) {
  const TemporaryDirectory directory;
  const auto file = write_list(directory, "a float32 8 8\nb float32 64\n");
  const json report = report_of({file, "--ranks", "2", "--level", "p_g_os", "--unit-bytes", "0",
                                 "--rank", "1", "--prefetch", "0"});
  ASSERT_EQ(report.at("levels").size(), 1U);
  const json& level = report["levels"][0];
  EXPECT_EQ(level.at("level"), "p_g_os");
  EXPECT_EQ(level.at("units").size(), 2U);
  const json& memory = level.at("rank").at("memory");
  EXPECT_EQ(level["rank"].at("rank"), 1);
  EXPECT_EQ(memory.at("parameters"), 256);
  EXPECT_EQ(memory.at("gradients"), 256);
  EXPECT_EQ(memory.at("optimizer_state"), 512);
  EXPECT_EQ(memory.at("kept"), 1024);
  EXPECT_EQ(memory.at("peak_unsharded"), 256);
  const json& sent = level["rank"].at("sent_per_step");
  EXPECT_EQ(sent.at("gather_forward"), json({{"calls", 2}, {"bytes", 256}}));
  EXPECT_EQ(sent.at("gather_backward"), json({{"calls", 1}, {"bytes", 128}}));
  EXPECT_EQ(sent.at("reduce"), json({{"calls", 2}, {"bytes", 256}}));
  EXPECT_EQ(sent.at("agree"), json({{"calls", 1}, {"bytes", 13}}));
  EXPECT_EQ(sent.at("all"), json({{"calls", 6}, {"bytes", 653}}));
}

// Float matrices of 4096, 1024 and 1024 elements on three ranks, each whole, and a vector.
TEST(Plan, MuonKeepsMatricesWholeAndTheFullestRankIsNamed) {
  const TemporaryDirectory directory;
  const auto file = write_list(
      directory, "emb float32 96 16\nw1 float32 64 64\nw2 float32 32 32\nw3 float32 32 32\n");
  const Command muon = {file, "--ranks",     "3",    "--level",       "os", "--unit-bytes",
                        "0",  "--optimizer", "muon", "--muon-except", "emb"};
  const json level = report_of(muon).at("levels")[0];
  std::map<std::string, int> owners;
  for (const json& unit : level.at("units"))
    for (const json& cut : unit.value("cuts", json::array())) {
      EXPECT_EQ(cut.at("cut"), "whole");
      owners[cut.at("name")] = cut.at("owner");
      EXPECT_EQ(unit.at("shards")[owners[cut.at("name")]], unit.at("elements"));
    }
  EXPECT_EQ(owners, (std::map<std::string, int>{{"w1", 0}, {"w2", 1}, {"w3", 2}}));
  EXPECT_EQ(level.at("keeps_most").at("rank"), 0);
  // Momentum of w1, and two moments of the 512 elements of emb that each rank has.
  EXPECT_EQ(level["keeps_most"].at("memory").at("optimizer_state"), 4 * 4096 + 2 * 4 * 512);
  const auto end = plan(muon);
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_NE(end.out.find("  w2: whole, on rank 1\n"), std::string::npos) << end.out;
}

TEST(Plan, TakesRulesOfCutsAndRefusesOthers) {
  const TemporaryDirectory directory;
  const auto file = write_list(directory, "a float32 64 64\nb float32 6 32\nc float32 64 frozen\n");
  const json level = report_of({file, "--ranks", "2", "--level", "os", "--unit-bytes", "0", "--cut",
                                "a:whole", "--cut", "b*:rows:2:2"})
                         .at("levels")[0];
  EXPECT_EQ(level.at("units")[0].at("cuts")[0],
            json({{"name", "a"}, {"cut", "whole"}, {"owner", 0}}));
  EXPECT_EQ(level.at("units")[1].at("cuts")[0],
            json({{"name", "b"}, {"cut", "rows"}, {"block", 64}}));
  // The rule of 8-bit state comes after those.
  const json small = report_of({file, "--ranks", "2", "--level", "os", "--unit-bytes", "0", "--cut",
                                "a:whole", "--optimizer", "cpuadam-8bit"})
                         .at("levels")[0];
  EXPECT_EQ(small.at("units")[0].at("cuts")[0], level.at("units")[0].at("cuts")[0]);
  EXPECT_EQ(small.at("units")[1].at("cuts")[0].at("cut"), "elements");
  const auto refuse = [&](const Command& more, const std::string& text) {
    const auto end = plan(with({file}, more));
    EXPECT_EQ(end.status, 2);
    EXPECT_NE(end.err.find(text), std::string::npos) << end.err;
  };
  refuse({"--cut", "a"}, "--cut must be NAMES:CUT");
  refuse({"--cut", "a:half"}, "got 'a:half'");
  refuse({"--cut", "a:rows:x"}, "must be whole numbers; got 'x'");
  refuse({"--cut", "z:whole"}, "'z' fits no parameter");
  refuse({"--muon-except", "a"}, "--muon-except needs --optimizer muon; got adamw");
  const auto master = [&](const Command& more) {
    return report_of(with({file, "--param-dtype", "bfloat16", "--level", "none"}, more))
        .at("levels")[0]
        .at("rank")
        .at("memory")
        .at("master_weights")
        .get<int64_t>();
  };
  EXPECT_EQ(master({}) - master({"--round-frozen"}), 4 * 64);
}

TEST(Plan, PrintsWhatRanksKeepThatShareMemory) {
  const TemporaryDirectory directory;
  const auto file = write_list(directory, "a float32 8 8\nb float32 64\n");
  const json levels = report_of({file, "--ranks", "2"}).at("levels");
  for (const json& level : levels) {
    const bool is_none = level.at("level") == "none", is_all = level.at("level") == "p_g_os";
    const json &sent = level.at("rank").at("memory"),
               &shared = level.at("shared_memory").at("rank");
    EXPECT_EQ(sent.at("parameters"), is_all ? 256 : 512) << level;
    EXPECT_EQ(shared.at("parameters"), is_none ? 512 : 256) << level;
    EXPECT_EQ(shared.at("optimizer_state"), sent.at("optimizer_state")) << level;
    EXPECT_EQ(shared.at("peak_unsharded"), 0) << level;
  }
  const std::string text = plan({file, "--ranks", "2"}).out;
  EXPECT_TRUE(contains(text, "kept by rank 0, if ranks send messages")) << text;
  EXPECT_TRUE(contains(text, "kept by rank 0, if ranks share the memory of their host")) << text;
}

TEST(Plan, OfADirectoryWithAnIndexTakesTheFilesThatItNames) {
  const TemporaryDirectory directory;
  const auto write = [&](const std::string& name, const std::string& tensor) {
    const std::string header =
        R"({")" + tensor + R"(":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
    const uint64_t length = header.size();
    std::ofstream(directory.path(name), std::ios::binary)
            .write(reinterpret_cast<const char*>(&length), 8)
        << header << "12345678";
  };
  write("model-00001-of-00002.safetensors", "a");
  write("consolidated.safetensors", "a");
  std::ofstream(directory.path("model.safetensors.index.json"))
      << R"({"weight_map":{"a":"model-00001-of-00002.safetensors",)"
      << R"("b":"model-00002-of-00002.safetensors"}})";
  const auto end = plan({directory.path()});
  EXPECT_EQ(end.status, 2);
  EXPECT_TRUE(contains(end.err, "model-00002-of-00002.safetensors")) << end.err;
  write("model-00002-of-00002.safetensors", "b");
  EXPECT_EQ(report_of({directory.path()}).at("parameters"), 4);
}

TEST(Plan, ToAFullDeviceEndsWithStatusTwo) {
  for (const std::string json : {"", " --json"}) {
    const auto end =
        run_program({"sh", "-c", TESSERA_CLI " plan --parameters 1e6" + json + " > /dev/full"});
    EXPECT_EQ(end.status, 2);
    EXPECT_TRUE(contains(end.err, "could not write the output")) << end.err;
    EXPECT_FALSE(contains(end.err, "Usage")) << end.err;
  }
}

TEST(Plan, HonoursEveryOption) {
  const TemporaryDirectory directory;
  const auto file = write_list(directory, "a float32 100 100\nb float32 300\nc float32 700\n");
  const auto kept = [&](const Command& more) {
    return report_of(with({file, "--ranks", "4", "--level", "p_g_os"}, more)).at("levels").at(0);
  };
  const json plain = kept({});
  const std::vector<Command> options = {{"--replicas", "2"},
                                        {"--rank", "3", "--partition", "whole"},
                                        {"--param-dtype", "bf16"},
                                        {"--reduce-dtype", "bf16"},
                                        {"--gather-dtype", "bf16"},
                                        {"--param-dtype", "bf16", "--reduce-dtype", "float32"},
                                        {"--optimizer", "sgd"},
                                        {"--optimizer", "amsgrad"},
                                        {"--optimizer", "cpuadam-bf16"},
                                        {"--optimizer", "cpuadam-8bit"},
                                        {"--offload", "host"},
                                        {"--unit-bytes", "0"},
                                        {"--unit-bytes", "0", "--resident-bytes", "-1"},
                                        {"--unit-bytes", "0", "--prefetch", "0"},
                                        {"--whole-numel", "300"},
                                        {"--level", "os"}};
  std::vector<json> seen = {plain};
  for (const Command& option : options) {
    const json level = kept(option);
    EXPECT_EQ(std::count(seen.begin(), seen.end(), level), 0) << option[0];
    seen.push_back(level);
  }
  const auto bf16 = write_list(directory, "a bf16 100 100\n");
  const Command command = {bf16, "--ranks", "4", "--level", "os"};
  EXPECT_EQ(report_of(command)["levels"][0]["rank"]["memory"]["master_weights"], 0);
  EXPECT_EQ(report_of({bf16, "--ranks", "4", "--level", "os", "--master-dtype",
                       "float32"})["levels"][0]["rank"]["memory"]["master_weights"],
            10'112);
}

TEST(Plan, AnswersWrongUsageWithStatusTwo) {
  const TemporaryDirectory directory;
  const auto list = write_list(directory, "a float32 2\n");
  const std::vector<std::pair<Command, std::string>> cases = {
      {{}, "FILE or --parameters"},
      {{directory.path("none")}, "there is no file or directory"},
      {{list, "--level", "zero3"}, "--level"},
      {{list, "--ranks", "0"}, "--ranks"},
      {{list, "--ranks", "two"}, "--ranks"},
      {{list, "--replicas", "-1"}, "--replicas"},
      {{list, "--ranks", "2", "--rank", "2"}, "options.rank"},
      {{list, "--partition", "rows"}, "--partition"},
      {{list, "--optimizer", "lbfgs"}, "--optimizer"},
      {{list, "--offload", "tape"}, "--offload"},
      {{list, "--param-dtype", "float9"}, "float9"},
      {{list, "--param-dtype", "int64"}, "param_dtype"},
      {{list, "--unit-bytes", "-1"}, "unit_bytes"},
      {{list, "--prefetch", "-1"}, "prefetch"},
      {{list, "--resident-bytes", "-2"}, "resident_bytes"},
      {{list, "--whole-numel", "-1"}, "whole_numel"},
      {{list, "--parameters", "100"}, "--parameters"},
      {{"--parameters", "0"}, "--parameters"},
      {{"--parameters", "100.5"}, "whole number"},
      {{"--parameters", "10"}, "32 layers"},
      {{list, "--layers", "2"}, "--layers"},
      {{list, "--unknown"}, "--unknown"},
  };
  for (const auto& [arguments, named] : cases) {
    const auto end = plan(arguments);
    EXPECT_EQ(end.status, 2) << named;
    EXPECT_EQ(end.out, "") << named;
    EXPECT_TRUE(contains(end.err, named)) << end.err;
    EXPECT_TRUE(contains(end.err, "Usage: tessera plan")) << end.err;
  }
  EXPECT_EQ(plan({"--help"}).status, 0);
}

// Two units of 1 MB over a link of 1 MB/s: their reductions and gathers send 2 MB from each host.
TEST(Plan, PredictsTheTimeOfAStep) {
  const Command job = {"--parameters", "524288", "--layers", "2",     "--unit-bytes", "0",
                       "--hosts",      "2",      "--link",   "8Mbit", "--compute",    "0",
                       "--level",      "os_g",   "--ranks",  "2"};
  const json report = report_of(job);
  EXPECT_EQ(report.at("ranks"), 2);
  const json& time = report.at("step_time");
  EXPECT_EQ(time.at("hosts"), 2);
  EXPECT_EQ(time.at("ranks_per_host"), 1);
  EXPECT_EQ(time.at("link_bandwidth"), 1e6);
  ASSERT_EQ(time.at("levels").size(), 1U);
  EXPECT_NEAR(time["levels"][0].at("link_nbytes").get<double>(), 1 << 21, 100);
  const double payload = 1448.0 / 1514.0;
  EXPECT_NEAR(time["levels"][0].at("seconds").get<double>(), (1 << 21) / 1e6 / payload, 1e-3);
  const auto end = plan(job);
  EXPECT_EQ(end.status, 0) << end.err;
  for (const std::string text : {"time of a step on 2 hosts with 1 ranks each", "8 Mbit/s",
                                 "95.64 % of its bytes are payload", "67 % of them backward"})
    EXPECT_NE(end.out.find(text), std::string::npos) << text << "\n" << end.out;
}

TEST(Plan, TakesTheNumberOfRanksFromTheirHosts) {
  const Command hosts = {"--parameters", "500000", "--compute",        "1", "--link", "unlimited",
                         "--hosts",      "4",      "--ranks-per-host", "2"};
  EXPECT_EQ(report_of(hosts).at("ranks"), 8);
}

TEST(Plan, RefusesContradictoryHostsAndLinks) {
  const auto refuses = [](const Command& arguments, const std::string& words) {
    const auto end = plan(with({"--parameters", "500000"}, arguments));
    EXPECT_NE(end.status, 0);
    EXPECT_NE(end.err.find(words), std::string::npos) << end.err;
  };
  refuses({"--hosts", "2", "--link", "1Gbit"}, "need --compute");
  refuses({"--hosts", "2", "--compute", "1"}, "need --link");
  refuses({"--compute", "1", "--link", "1Gbit"}, "one host has no link");
  refuses({"--compute", "1", "--link-latency", "1ms"}, "one host has no link");
  refuses({"--compute", "1", "--host-link", "1GB"}, "shares no memory");
  refuses({"--compute", "1", "--hosts", "2", "--link", "1Gbit", "--ranks", "3"},
          "multiple of --hosts");
  refuses({"--compute", "1", "--hosts", "2", "--ranks-per-host", "2", "--link", "1Gbit", "--ranks",
           "2"},
          "--hosts x --ranks-per-host");
  refuses({"--compute", "1", "--replicas", "2"}, "--replicas");
  refuses({"--compute", "1", "--offload", "host"}, "offload");
  refuses({"--compute", "1h"}, "must be a time");
  refuses({"--compute", "1", "--hosts", "2", "--link", "200"}, "must be a bandwidth");
}

}  // namespace tessera::plan_test
