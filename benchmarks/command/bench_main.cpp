// The part of the command-line tool that is linked with LibTorch: `tessera bench`, `tessera plan`
// and `tessera ckpt` execute it with their own arguments.

#include <tessera/comm/build_info.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "benchmarks/link_bench.h"
#include "benchmarks/scale_bench.h"
#include "benchmarks/step_bench.h"
#include "command/command_line.h"
#include "interop/command/ckpt_command.h"
#include "planner/command/plan_command.h"

namespace {

// Returns the facts without their first line: `tessera` has printed that.
std::string facts_of_library() {
  const std::string text = tessera::describe(tessera::build_info());
  return text.substr(text.find('\n') + 1);
}

}  // namespace

int main(int argc, char** argv) {
  int exit_code = 0;
  CLI::App app("Tessera: sharded training for LibTorch", "tessera");
  app.set_version_flag("--version", facts_of_library, "Prints the facts of the library");
  CLI::App* bench = app.add_subcommand("bench", "Measures training steps");
  tessera::tools::add_step_bench(*bench, exit_code);
  tessera::tools::add_loop_bench(*bench, exit_code);
  tessera::tools::add_step_worker(*bench, exit_code);
  tessera::tools::add_link_bench(*bench, exit_code);
  tessera::tools::add_scale_bench(*bench, exit_code);
  tessera::tools::add_plan(app, exit_code);
  tessera::tools::add_ckpt(app, exit_code);
  return tessera::tools::run_command_line(app, {argv + 1, argv + argc}, exit_code);
}
