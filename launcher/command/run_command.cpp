#include "run_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>

#include "launcher/hosts.h"
#include "launcher/launch.h"
#include "run_nodes.h"

namespace tessera::tools {
namespace {

constexpr const char* kFooter = R"(
Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TESSERA_RUN=1,
TESSERA_RESTART, TESSERA_JOB (a text that all ranks of this start share), TESSERA_SECRET (one that nobody
else knows, unless it is set), TESSERA_FLIGHT_DIR (the folder for flight records), and OMP_NUM_THREADS
unless it is set. Stdin is empty; rank 0 gets that of `tessera run` unless it is a terminal or --hosts is
given.

When a rank fails, the others get up to five seconds to say so and to end, and then are ended. The cause
is printed first, then the last words of the others, and the exit status is that of the cause (128 + N if
signal N killed it; 127 or 126 if the program can't be executed): a rank that a signal killed, else the
one that the flight records of the others blame, else the rank that failed first. SIGINT, SIGTERM, SIGHUP,
SIGUSR1, SIGUSR2 and Ctrl-Z are passed on to all ranks; a second SIGINT kills them.

After a failure and after SIGUSR1 the flight records of the ranks are merged: a table of the collectives
in which the ranks differ, and flight.json, a trace for chrome://tracing, in DIR/flight of --log-dir or in
a folder of ~/.local/state/tessera/flight (or XDG_STATE_HOME), which is kept for a week.

With --hosts, mpirun of Open MPI starts this program under the same path, in the same directory, on each
host. Each host must reach the first one by its name, or by that in --master. With --hosts and --nodes,
each launcher restarts its own ranks: those of the other nodes fail, too, when they lose their peers; and
it merges the flight records of its own ranks, on node 1 into flight_node_1.json. With --hosts, SIGINT and
SIGTERM leave the ranks a second.

Unless --default-malloc is given, MALLOC_MMAP_MAX_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ are set,
where they are not set yet, so that glibc keeps freed memory: giving it back and getting it again costs
thousands of page faults in every step.)";

struct RunArguments {
  LaunchOptions launch;
  NodeArguments nodes;
  std::string bind;
  double grace = 5;
  double interrupt_grace = 30;
  bool no_prefix = false;
  std::vector<std::string> shown_in_help;
};

std::chrono::milliseconds from_seconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

void add_ranks_options(CLI::App& run, RunArguments& arguments) {
  LaunchOptions& launch = arguments.launch;
  run.add_option("-n,--ranks", launch.ranks, "Number of ranks (default: one per available core)")
      ->check(CLI::Range(1, 65536))
      ->type_name("N");
  run.add_option("--bind", arguments.bind,
                 "cores: each rank on its own, equal share of the cores (default if there are "
                 "enough); none: anywhere")
      ->check(CLI::IsMember({"cores", "none"}))
      ->type_name("");
  run.add_option("--master-port", launch.master_port, "Port of rank 0 (default: a free one)")
      ->check(CLI::Range(1, 65535))
      ->type_name("PORT");
  run.add_flag("--default-malloc", launch.default_malloc, "Leave glibc's heap settings alone");
}

void add_output_options(CLI::App& run, RunArguments& arguments) {
  LaunchOptions& launch = arguments.launch;
  auto* log_dir = run.add_option("--log-dir", launch.log_dir,
                                 "Also write all output to DIR/rank_N.out and DIR/rank_N.err");
  log_dir->type_name("DIR");
  run.add_flag("--quiet", launch.quiet, "Show the output of rank 0 only (needs --log-dir)")
      ->needs(log_dir);
  run.add_flag("--no-prefix", arguments.no_prefix, "Do not put [rank] before each line");
}

void add_failure_options(CLI::App& run, RunArguments& arguments) {
  run.add_option("--max-restarts", arguments.launch.max_restarts,
                 "After a failure start all ranks again, so many times (default 0)")
      ->check(CLI::Range(0, 1 << 30))
      ->type_name("N");
  run.add_option("--grace", arguments.grace,
                 "From SIGTERM to SIGKILL when the ranks are ended (default 5)")
      ->check(CLI::Range(0.0, 1e6))
      ->type_name("SECONDS");
  run.add_option("--interrupt-grace", arguments.interrupt_grace,
                 "How long ranks may go on after a signal was passed on to them (default 30)")
      ->check(CLI::Range(0.0, 1e6))
      ->type_name("SECONDS");
}

Binding binding_from(const std::string& name) {
  if (name == "cores") return Binding::kCores;
  return name == "none" ? Binding::kNone : Binding::kAuto;
}

/// Returns whether the value of an option is the argument after it ("-n 4", not "-n4" or
/// "--ranks=4").
bool value_follows(const CLI::App& run, const std::string& argument) {
  const bool is_long = argument.starts_with("--");
  if (is_long ? argument.find('=') != std::string::npos : argument.size() > 2) return false;
  const CLI::Option* option = run.get_option_no_throw(argument);
  return option != nullptr && option->get_expected_min() > 0;
}

}  // namespace

std::vector<std::string> take_command(const CLI::App& app, std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments.front() != "run") return {};
  const CLI::App& run = *app.get_subcommand_ptr("run");
  size_t begin = 1;
  while (begin < arguments.size() && arguments[begin].starts_with('-') &&
         arguments[begin] != "--") {
    begin += value_follows(run, arguments[begin]) ? 2 : 1;
  }
  begin = std::min(begin, arguments.size());
  const auto first = arguments.begin() + static_cast<ptrdiff_t>(begin);
  const bool marked = first != arguments.end() && *first == "--";
  std::vector<std::string> command(first + (marked ? 1 : 0), arguments.end());
  arguments.erase(first, arguments.end());
  return command;
}

void add_run(CLI::App& app, const std::vector<std::string>& command, int& exit_code) {
  CLI::App* run = app.add_subcommand(
      "run", "Runs a program as the ranks of one job, on this machine or several");
  const auto arguments = std::make_shared<RunArguments>();
  run->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  run->add_option("PROGRAM", arguments->shown_in_help, "The program and its arguments")
      ->type_name("");
  add_ranks_options(*run, *arguments);
  add_output_options(*run, *arguments);
  add_failure_options(*run, *arguments);
  add_node_options(*run, arguments->nodes);
  run->footer(kFooter);
  run->callback([arguments, &command, &exit_code] {
    if (command.empty()) throw CLI::RequiredError("PROGRAM");
    LaunchOptions& launch_options = arguments->launch;
    launch_options.command = command;
    launch_options.binding = binding_from(arguments->bind);
    launch_options.prefix = !arguments->no_prefix;
    launch_options.grace = from_seconds(arguments->grace);
    launch_options.interrupt_grace = from_seconds(arguments->interrupt_grace);
    launch_options.place = node_place(arguments->nodes, launch_options);
    const auto hosts = hosts_options(arguments->nodes, launch_options);
    exit_code = hosts ? launch_hosts(*hosts) : launch(launch_options);
  });
}

}  // namespace tessera::tools
