// `tessera bench link` makes hosts, trains over their links, counts bytes there, and leaves
// nothing.

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "launched.h"

namespace tessera::link_bench_test {

using nlohmann::json;

ProgramEnd measured(const Command& more) {
  const Command command = {TESSERA_CLI, "bench", "link",    "--size", "tiny",
                           "--rounds",  "1",     "--steps", "2"};
  return run_program(with(command, more));
}

// Without root, or in a container, there are no hosts to be had.
bool is_refused(const ProgramEnd& end) {
  return end.status != 0 && contains(end.err, "network namespaces, which need root");
}

// Those of a process that has ended: other tests may run.
bool any_host_is_left() {
  const std::string prefix = "tessera-link-";
  std::error_code error;
  const std::filesystem::directory_iterator entries("/run/netns", error);
  return std::any_of(begin(entries), end(entries), [&](const auto& entry) {
    const std::string name = entry.path().filename();
    return name.starts_with(prefix) && ::kill(std::stoi(name.substr(prefix.size())), 0) != 0;
  });
}

void expect_fits(const json& report, const std::string& transport) {
  EXPECT_EQ(report.at("transport"), transport);
  const double wire = report.at("wire_nbytes"), formula = report.at("formula_nbytes");
  EXPECT_GT(wire, formula) << "headers and agreements are counted, too";
  EXPECT_LT(wire, 1.15 * formula);
  const double payload = report.at("payload_nbytes");
  EXPECT_LT(payload, wire);
  EXPECT_NEAR(report.at("payload_ratio"), payload / formula, 1e-9);
  // The links have a limit, and the step needs as long at least, but for what their buffers let
  // through at once.
  EXPECT_NEAR(report.at("link_seconds"), wire * 8 / 200e6, 1e-9);
  EXPECT_GT(report.at("seconds"), 0.5 * report.at("link_seconds").get<double>());
  EXPECT_GT(report.at("transfer_seconds"), 0.5 * report.at("link_seconds").get<double>());
  EXPECT_GE(report.at("roofline_seconds"), report.at("compute_seconds"));
}

TEST(LinkBench, MeasuresOneRankAHostAndTwo) {
  // With a congestion control that every kernel has and allows.
  const auto one = measured({"--mbit", "200", "--level", "os_g", "--congestion", "reno", "--json"});
  if (is_refused(one)) GTEST_SKIP() << one.err;
  ASSERT_EQ(one.status, 0) << one.err;
  expect_fits(json::parse(one.out), "gloo");
  const auto two = measured({"--mbit", "200", "--level", "p_g_os", "--congestion", "reno",
                             "--ranks-per-host", "2", "--json"});
  ASSERT_EQ(two.status, 0) << two.err;
  expect_fits(json::parse(two.out), "arena+gloo");
  EXPECT_FALSE(any_host_is_left());
}

TEST(LinkBench, RefusesWhatItCannotMeasure) {
  for (const auto& [arguments, words] : std::vector<std::pair<Command, std::string>>{
           {{"--hosts", "1"}, "--hosts must be from 2"},
           {{"--ranks-per-host", "0"}, "--ranks-per-host"},
           {{"--mbit", "-1"}, "--mbit must be positive"},
           {{"--congestion", "none; ls"},
            "--congestion must be one that /proc/sys/net/ipv4/tcp_allowed_congestion_control "
            "names"},
           {{"--against", "horovod"}, "--against: horovod not in {fsdp2,ddp}"},
           {{"--level", "all"}, "--level: all not in {none,os,os_g,p_g_os}"}}) {
    const auto end = measured(arguments);
    EXPECT_NE(end.status, 0);
    EXPECT_TRUE(contains(end.err, words)) << end.err;
  }
}

}  // namespace tessera::link_bench_test
