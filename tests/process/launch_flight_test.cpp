// Flight records that ranks write, merged by `tessera run`.

#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "launched.h"
#include "launcher/flight_folder.h"

namespace tessera {
namespace launch_flight_test {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kNow = 1700000000000000;

json entry(int number, const std::string& collective, const std::string& subject, bool completed) {
  return {{"group", "world"},
          {"channel", "kParams"},
          {"number", number},
          {"collective", collective},
          {"subject", subject},
          {"text", collective + " of unit '" + subject + "': 100 elements of Float"},
          {"bytes", 400},
          {"step", 5},
          {"phase", "forward"},
          {"issued_us", kNow},
          {"completed_us", completed ? json(kNow + 1000) : json(nullptr)}};
}

json record(int rank, int size, int culprit, const std::vector<json>& entries) {
  return {{"rank", rank},
          {"size", size},
          {"host", "a"},
          {"pid", 123},
          {"reason", "a rank is missing"},
          {"culprit", culprit},
          {"step", 5},
          {"phase", "forward"},
          {"written_us", kNow + 3000000},
          {"records", entries}};
}

/// A rank that writes the text for its number to its record, and then goes on with `more`.
Command writing_ranks(const Command& options, const std::vector<std::string>& texts,
                      const std::string& more) {
  std::string script =
      "write() { printf '%s' \"$1\" > $TESSERA_FLIGHT_DIR/rank_$RANK.new; "
      "mv $TESSERA_FLIGHT_DIR/rank_$RANK.new $TESSERA_FLIGHT_DIR/rank_$RANK.json; }\n"
      "case $RANK in\n";
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::string quoted;
    for (const char c : texts[rank]) quoted += c == '\'' ? "'\\''" : std::string(1, c);
    script += std::to_string(rank) + ") text='" + quoted + "';;\n";
  }
  script += "esac\n" + more;
  Command command =
      with({TESSERA_CLI, "run", "--grace", "0.5", "-n", std::to_string(texts.size())}, options);
  return with(command, {"sh", "-c", script});
}

TEST(LaunchFlight, ATableTellsTheStateOfEachRankAfterAFailure) {
  const TemporaryDirectory directory;
  const auto first = entry(40, "all_gather", "blocks.2", true);
  const std::vector<std::string> texts = {
      record(0, 4, 1,
             {first, entry(41, "all_gather", "blocks.3", true),
              entry(42, "reduce_scatter", "head", false)})
          .dump(),
      record(1, 4, -1, {first, entry(41, "all_gather", "blocks.3", false)}).dump(),
      record(2, 4, 1,
             {first, entry(41, "all_gather", "blocks.3", true),
              entry(42, "all_reduce", "clip", false)})
          .dump(),
      ""};
  const auto end = run_program(writing_ranks({"--log-dir", directory.path()}, texts,
                                             "[ $RANK = 3 ] || write \"$text\"; case $RANK in 0) "
                                             "exit 5;; 2) sleep 0.2; exit 6;; esac; sleep 60"));
  EXPECT_EQ(end.status, 5) << "rank 1 still ran: the status is that of the first that failed";
  const std::string line_41 =
      "#41     all_gather of blocks.3          5 forward      done            waiting 3.0 s   "
      "done\n";
  EXPECT_TRUE(contains(end.err, line_41)) << end.err;
  EXPECT_TRUE(contains(end.err, "5 forward      waiting 3.0 s   not issued      other, below\n"))
      << end.err;
  EXPECT_TRUE(contains(
      end.err, "rank 2: other: all_reduce of unit 'clip': 100 elements of Float, waiting 3.0 s\n"));
  EXPECT_TRUE(contains(end.err, "no record of rank 3\n"));
  EXPECT_TRUE(contains(end.err,
                       "tessera run: rank 1 is the cause, by the flight records of the others: "
                       "it did not fail by itself, and the launcher ended it\n"
                       "tessera run: rank 0 failed first: exit status 5\n"))
      << end.err;
  std::istringstream lines(end.err);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("tessera run:")) continue;
    EXPECT_LE(line.size(), 120U) << line;
  }

  const std::string trace_path = directory.path("flight/flight.json");
  EXPECT_TRUE(contains(end.err, trace_path)) << end.err;
  const json trace = json::parse(read_file(trace_path));
  int spans = 0;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    ++spans;
    EXPECT_GE(event.at("dur"), 1000);
    EXPECT_EQ(event.at("args").at("bytes"), 400);
  }
  EXPECT_EQ(spans, 8);
  EXPECT_TRUE(fs::exists(directory.path("flight/rank_0.json")));
}

TEST(LaunchFlight, TheStatusIsThatOfTheRankThatTheOthersBlame) {
  const TemporaryDirectory directory;
  std::vector<std::string> texts;
  for (int rank = 0; rank < 3; ++rank)
    texts.push_back(record(rank, 3, rank == 2 ? -1 : 2, {}).dump());
  const auto end =
      run_program(writing_ranks({"--log-dir", directory.path()}, texts,
                                "write \"$text\"; [ $RANK = 2 ] && sleep 0.3; exit $((7 + RANK))"));
  EXPECT_EQ(end.status, 9) << end.err;
  EXPECT_TRUE(contains(
      end.err, "rank 2 is the cause, by the flight records of the others: exit status 9\n"));
}

TEST(LaunchFlight, ARankThatASignalKilledIsTheCauseWhateverOthersInfer) {
  const TemporaryDirectory directory;
  std::vector<std::string> texts;
  for (int rank = 0; rank < 4; ++rank) texts.push_back(record(rank, 4, 1, {}).dump());
  const auto run = [&](const std::string& more) {
    return run_program(writing_ranks({"--log-dir", directory.path()}, texts, more));
  };
  const std::string others = "sleep 0.2; write \"$text\"; exit 5";
  auto end = run("[ $RANK = 3 ] && kill -KILL $$; " + others);
  EXPECT_EQ(end.status, 128 + SIGKILL) << end.err;
  EXPECT_TRUE(contains(end.err, "rank 3 failed first: killed by signal 9 (Killed)\n")) << end.err;

  end = run("[ $RANK = 3 ] && sleep 0.5 && kill -SEGV $$; " + others);
  EXPECT_EQ(end.status, 128 + SIGSEGV) << end.err;
  EXPECT_TRUE(contains(end.err, "rank 3 is the cause: killed by signal 11")) << end.err;

  end = run("[ $RANK = 1 ] && sleep 60; write \"$text\"; [ $RANK = 3 ] && kill -SEGV $$; exit 5");
  EXPECT_TRUE(contains(end.err, "rank 1 is the cause, by the flight records of the others"))
      << "rank 3 itself blames rank 1: " << end.err;
}

TEST(LaunchFlight, DamagedRecordsCostALineEach) {
  const TemporaryDirectory directory;
  const std::vector<std::string> texts = {
      record(0, 4, -1, {}).dump().substr(0, 80), record(0, 4, -1, {}).dump(),
      R"({"rank":2,"size":4,"records":[{"number":"one"}]})", ""};
  const auto end = run_program(writing_ranks(
      {"--log-dir", directory.path()}, texts,
      "if [ $RANK = 3 ]; then mkfifo $TESSERA_FLIGHT_DIR/rank_3.json; else write \"$text\"; fi; "
      "sleep 0.3; exit 4"));
  EXPECT_EQ(end.status, 4);
  for (const char* reason :
       {"rank_0.json': it is no JSON text", "rank_1.json': it is that of rank 0",
        "rank_2.json': ", "rank_3.json': it is no plain file"}) {
    EXPECT_TRUE(contains(end.err, reason)) << reason << "\n" << end.err;
  }
}

TEST(LaunchFlight, AUserSignalShowsTheRecordsWhileTheJobGoesOn) {
  const TemporaryDirectory directory;
  const std::vector<std::string> texts = {
      record(0, 2, -1, {entry(7, "all_gather", "head", false)}).dump(),
      record(1, 2, -1, {}).dump()};
  ProgramRun run(
      writing_ranks({"--log-dir", directory.path()}, texts,
                    "trap 'write \"$text\"' USR1; echo ready; "
                    "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 0.1; done; echo done"));
  ASSERT_TRUE(run.wait_for_output("ready", 2));
  run.signal(SIGUSR1);
  const auto end = run.wait();
  EXPECT_EQ(end.status, 0) << end.err;
  EXPECT_TRUE(contains(
      end.err,
      "#7      all_gather of head              5 forward      waiting 3.0 s   not issued\n"))
      << end.err;
  EXPECT_TRUE(contains(end.out, "[1] done\n"));
}

TEST(LaunchFlight, TheFolderOfAJobGoesUnlessATraceWasNamedAndThenAfterAWeek) {
  const TemporaryDirectory directory;
  const ProgramRun::Options options{.environment = {{"XDG_STATE_HOME", directory.path()}}};
  const std::string folder = directory.path("tessera/flight");
  const auto count = [&] {
    return std::distance(fs::directory_iterator(folder), fs::directory_iterator());
  };
  run_program(writing_ranks({}, {record(0, 1, -1, {}).dump()}, "write \"$text\""), options);
  run_program({TESSERA_CLI, "run", "-n", "2", "false"}, options);
  EXPECT_EQ(count(), 0);
  ProgramRun killed({TESSERA_CLI, "run", "-n", "1", "sh", "-c", "echo ready; sleep 60"}, options);
  ASSERT_TRUE(killed.wait_for_output("ready"));
  killed.signal(SIGKILL);
  killed.wait();
  for (int i = 0; i < 500 && count() > 0; ++i) ::usleep(10000);
  EXPECT_EQ(count(), 0) << "the launcher was killed";

  const auto end = run_program(
      writing_ranks({}, {record(0, 1, -1, {}).dump()}, "write \"$text\"; exit 3"), options);
  EXPECT_TRUE(contains(end.err, folder)) << end.err;
  ASSERT_EQ(count(), 1);
  const fs::path kept = fs::directory_iterator(folder)->path();
  EXPECT_EQ(fs::status(kept).permissions(), fs::perms::owner_all);
  const auto age = [&](int days) {
    fs::last_write_time(kept, fs::file_time_type::clock::now() - std::chrono::days(days));
    run_program({TESSERA_CLI, "run", "-n", "1", "true"}, options);
    return count();
  };
  EXPECT_EQ(age(6), 1);
  EXPECT_EQ(age(8), 0);
}

TEST(LaunchFlight, WithoutAStateDirectoryAJobHasATemporaryFolder) {
  const TemporaryDirectory directory;
  const auto end =
      run_program(writing_ranks({}, {record(0, 1, -1, {}).dump()}, "write \"$text\"; exit 3"),
                  {.environment = {{"HOME", "/proc"}, {"TMPDIR", directory.path()}}});
  EXPECT_TRUE(contains(end.err, directory.path("tessera-flight-"))) << end.err;
}

TEST(LaunchFlight, WithoutPythonTheRecordsStayAndTheCauseIsTold) {
  const TemporaryDirectory directory;
  const ProgramRun::Options options{
      .environment = {{"XDG_STATE_HOME", directory.path()}, {"PATH", "/nowhere"}}};
  const Command job = {TESSERA_CLI,
                       "run",
                       "-n",
                       "2",
                       "/bin/sh",
                       "-c",
                       "printf '{\"rank\":%s,\"size\":2,\"culprit\":0,\"records\":[]}' $RANK > "
                       "$TESSERA_FLIGHT_DIR/rank_$RANK.json; exit $((4 + RANK))"};
  const auto end = run_program(job, options);
  EXPECT_EQ(end.status, 4) << end.err;
  EXPECT_TRUE(
      contains(end.err, "tessera run: the flight records could not be shown; `tessera flight " +
                            directory.path("tessera/flight/")))
      << end.err;
}

/// What `tessera flight` prints of the records of ranks 0, 1 and so on.
std::string shown(const std::vector<json>& records) {
  const TemporaryDirectory directory;
  for (size_t rank = 0; rank < records.size(); ++rank)
    std::ofstream(directory.path("rank_" + std::to_string(rank) + ".json")) << records[rank];
  const auto end = run_program({TESSERA_CLI, "flight", directory.path()});
  EXPECT_EQ(end.status, 0) << end.err;
  return end.out;
}

TEST(FlightTable, RanksOfOneStateShareAColumn) {
  std::vector<json> records;
  for (int rank = 0; rank < 64; ++rank) {
    std::vector<json> entries = {entry(1, "all_gather", "head", rank != 9)};
    if (rank != 9) entries.push_back(entry(2, "all_gather", "body", false));
    records.push_back(record(rank, 64, -1, entries));
  }
  const std::string text = shown(records);
  EXPECT_TRUE(contains(text, "ranks 0-8, 1... rank 9\n")) << text;
  EXPECT_TRUE(contains(text, "done            waiting 3.0 s\n")) << text;
  EXPECT_TRUE(contains(text, "waiting 3.0 s   not issued\n")) << text;
}

TEST(FlightTable, OfManyCollectivesShowsTheFirstAndTheLast) {
  std::vector<json> entries;
  for (int number = 0; number < 100; ++number)
    entries.push_back(entry(number, "all_gather", "head", true));
  const std::string text =
      shown({record(0, 2, -1, entries), record(1, 2, -1, {entries[0], entries[1]})});
  for (const char* part : {"#1 ", "#2 ", "... 89 more ...", "#99 "})
    EXPECT_TRUE(contains(text, part)) << text;
  EXPECT_FALSE(contains(text, "#0 ")) << text;
}

TEST(FlightTable, OfAFolderWithoutRecordsIsAnError) {
  const TemporaryDirectory directory;
  const auto end = run_program({TESSERA_CLI, "flight", directory.path()});
  EXPECT_EQ(end.status, 1);
  EXPECT_TRUE(contains(end.err, "no flight records in '" + directory.path())) << end.err;
}

TEST(FlightRecord, BlameNeedsTwoRanksThatAgreeOrTheOnlyOther) {
  const auto blamed = [](const std::vector<int>& culprits) {
    std::vector<tools::FlightReport> reports;
    const int size = static_cast<int>(culprits.size());
    for (int rank = 0; rank < size; ++rank) reports.push_back({rank, size, culprits[rank]});
    return tools::blamed_rank(reports);
  };
  EXPECT_EQ(blamed({-1, 0}), 0);
  EXPECT_EQ(blamed({-1, 0, -1}), -1);
  EXPECT_EQ(blamed({-1, 0, 0}), 0);
  EXPECT_EQ(blamed({1, 0, 1, 0}), -1);
  EXPECT_EQ(blamed({1, 1, 1, -1}), 1);
}

TEST(FlightRecord, BlamesTheOneRankWithAnotherCollectiveWhateverTheRanksSay) {
  const auto blamed = [](const std::vector<std::string>& texts) {
    std::vector<tools::FlightReport> reports;
    const int size = static_cast<int>(texts.size());
    for (int rank = 0; rank < size; ++rank) {
      reports.push_back({.rank = rank, .size = size, .culprit = 0});
      reports.back().issued = {{{"kControl", 6}, "a"}, {{"kControl", 7}, texts[rank]}};
    }
    return tools::blamed_rank(reports);
  };
  EXPECT_EQ(blamed({"b", "b", "c"}), 2);
  EXPECT_EQ(blamed({"b", "c", "b", "b"}), 1);
  EXPECT_EQ(blamed({"b", "b", "c", "c"}), 0) << "by the ranks' own words";
  EXPECT_EQ(blamed({"b", "c", "d"}), 0);
  EXPECT_EQ(blamed({"b", "c"}), 0);
  EXPECT_EQ(blamed({"b", "b", "b"}), 0);
}

TEST(FlightRecord, ShowsTheOneRankInAnotherStep) {
  const auto odd = [](const std::vector<int64_t>& steps) {
    std::vector<tools::FlightReport> reports;
    const int size = static_cast<int>(steps.size());
    for (int rank = 0; rank < size; ++rank)
      reports.push_back({.rank = rank, .size = size, .step = steps[rank]});
    return tools::rank_in_another_step(reports);
  };
  EXPECT_EQ(odd({22, 22, 21, 22}), 2);
  EXPECT_EQ(odd({22, 22, 23}), 2);
  EXPECT_EQ(odd({22, 21}), -1);
  EXPECT_EQ(odd({22, 22, 21, 21}), -1);
  EXPECT_EQ(odd({22, 22, 21, 20}), -1);
  EXPECT_EQ(odd({22, 22, 22}), -1);
}

}  // namespace launch_flight_test
}  // namespace tessera
