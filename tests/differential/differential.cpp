#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <map>
#include <sstream>

#include "differential/outcome.h"

namespace tessera::differential {
namespace {

struct Options {
  std::string seed = "1", part = "1/1";
  int count = 300;
  int jobs = 2;
  int ranks = 0;  // 0: all
  std::string only;
  bool shrink = false, print = false, source = false;
};

bool has_draw(const Program& program, const std::string& name) {
  return name.empty() || describe(program).find(name) != std::string::npos;
}

// What two programs with one fault have in common: the text without words that have numbers.
std::string kind_of(const std::string& finding) {
  if (finding.find(" differ by ") != std::string::npos) return "differs";
  std::string kind, word;
  for (std::istringstream words(finding); words >> word;)
    if (std::ranges::none_of(word, [](unsigned char c) { return std::isdigit(c); })) kind += word;
  return kind;
}

uint64_t first_seed(const std::string& text) {
  if (text != "date") return std::stoull(text);
  const std::time_t now = std::time(nullptr);
  const std::tm date = *std::gmtime(&now);
  return (uint64_t{100} * (100 * (1900 + date.tm_year) + date.tm_mon + 1) + date.tm_mday) * 100'000;
}

std::vector<Program> draw_all(const Options& options) {
  std::vector<Program> programs;
  unsigned part = 0, parts = 0;
  TORCH_CHECK_VALUE(
      std::sscanf(options.part.c_str(), "%u/%u", &part, &parts) == 2 && part >= 1 && part <= parts,
      "--part must be K/N; got ", options.part);
  const uint64_t first = first_seed(options.seed);
  for (uint64_t seed = first; seed < first + options.count; ++seed) {
    if (seed % parts != part - 1) continue;
    Program program = draw(seed);
    if (options.ranks > 0 && program.ranks != options.ranks) continue;
    if (has_draw(program, options.only)) programs.push_back(std::move(program));
  }
  return programs;
}

int run_all(const Options& options) {
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds_since = [](auto then) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
  };
  auto told = begin;
  const std::vector<Program> programs = draw_all(options);
  std::map<Verdict, int> counts;
  std::map<std::string, int> refused;
  std::map<uint64_t, std::string> findings;
  int done = 0;
  run(programs, options.jobs, [&](const Program& program, const Outcome& outcome) {
    ++done;
    if (seconds_since(told) > 60) {
      told = std::chrono::steady_clock::now();
      fmt::print(stderr, "{} of {} programs in {:.0f} s, {} findings\n", done, programs.size(),
                 seconds_since(begin), findings.size());
    }
    ++counts[outcome.verdict];
    if (outcome.verdict == Verdict::kRefused) ++refused[outcome.text];
    if (outcome.verdict == Verdict::kBothRefuse)
      ++refused["both: " + outcome.text.substr(0, outcome.text.find(':'))];
    if (outcome.verdict != Verdict::kFinding) return;
    findings[program.seed] = outcome.text;
    std::printf("seed %lu: %s\n", program.seed, outcome.text.c_str());
    std::fflush(stdout);
  });
  for (const Program& program : programs) {
    if (!options.shrink || !findings.contains(program.seed)) continue;
    const std::string kind = kind_of(findings[program.seed]);
    std::string text;
    const Program least = shrink(program, [&](const Program& smaller) {
      bool fails = false;
      run({smaller}, 1, [&](const Program&, const Outcome& outcome) {
        fails = outcome.verdict == Verdict::kFinding && kind_of(outcome.text) == kind;
        if (fails) text = outcome.text;
      });
      return fails;
    });
    std::printf("seed %lu shrunk: %s\n%s\n%s\n", program.seed, text.c_str(),
                describe(least).c_str(), source_of(least).c_str());
    std::fflush(stdout);
  }
  fmt::print("programs {}  equal {}  both refuse {}  refused {}  findings {}  in {:.1f} s\n",
             programs.size(), counts[Verdict::kEqual], counts[Verdict::kBothRefuse],
             counts[Verdict::kRefused], counts[Verdict::kFinding], seconds_since(begin));
  for (const auto& [reason, count] : refused) fmt::print("  refused {}: {}\n", count, reason);
  return findings.empty() ? 0 : 1;
}

}  // namespace
}  // namespace tessera::differential

int main(int argc, char** argv) {
  using namespace tessera::differential;
  Options options;
  CLI::App app("Runs drawn training programs by Tessera and by LibTorch alone, and compares them");
  app.add_option("--seed", options.seed, "of the first program; \"date\": the day's");
  app.add_option("--count", options.count, "of programs, whose seeds follow each other");
  app.add_option("--part", options.part, "K/N: only every N-th program");
  app.add_option("--jobs", options.jobs, "processes at a time");
  app.add_option("--ranks", options.ranks, "only programs of so many ranks");
  app.add_option("--only", options.only, "only programs whose description has this text");
  app.add_flag("--print", options.print, "print the programs, and run none");
  app.add_flag("--source", options.source, "print the programs in C++, and run none");
  app.add_flag("--shrink", options.shrink, "shrink each finding, and describe it");
  CLI11_PARSE(app, argc, argv);
  if (!options.print && !options.source) return run_all(options);
  for (const Program& program : draw_all(options))
    fmt::print("{}\n", options.source ? source_of(program) : describe(program));
}
