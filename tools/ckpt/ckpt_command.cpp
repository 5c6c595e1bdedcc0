#include "ckpt/ckpt_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/checkpoint_files.h>
#include <tessera/plan_report.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ckpt/interruption.h"
#include "ckpt/progress_line.h"
#include "exit_code.h"

namespace tessera::tools {
namespace {

constexpr const char* kCkptFooter = R"(
CKPT is a checkpoint's directory. Exit status: 0 if all is well; 1 if `verify` found damage or `diff` a
difference; 2 if the arguments are wrong, the work could not be done, or its output could not be written. An
interrupt leaves nothing that was begun.)";

constexpr int kCkptNotDone = 2;  // differs from the status of a finding

struct Arguments {
  std::string from, to, format, dtype;
  int ranks = 0;
  bool json = false, quiet = false;

  CheckpointProgress progress(const std::string& what) const {
    return quiet ? CheckpointProgress() : progress_line(what);
  }
};
using ArgumentsPtr = std::shared_ptr<Arguments>;

CLI::App* add_command(CLI::App& ckpt, const std::string& name, const std::string& text,
                      int& exit_code, const ArgumentsPtr& arguments,
                      const std::function<int(const Arguments&)>& work) {
  CLI::App* command = ckpt.add_subcommand(name, text);
  command->footer(kCkptFooter);
  command->callback([name, arguments, work, &exit_code] {
    exit_code = exit_code_of(
        "tessera ckpt " + name, [&] { return work(*arguments); }, kCkptNotDone);
  });
  return command;
}

void add_path(CLI::App* command, const char* name, std::string& value, const char* text) {
  command->add_option(name, value, text)->required()->type_name("");
}
void add_quiet(CLI::App* command, Arguments& arguments) {
  command->add_flag("--quiet", arguments.quiet, "Show no progress");
}

nlohmann::json to_json(const CheckpointSummary& summary) {
  nlohmann::json tensors = nlohmann::json::array();
  for (const CheckpointTensor& tensor : summary.tensors) {
    tensors.push_back({{"kind", tensor.kind},
                       {"names", tensor.names},
                       {"state", tensor.state},
                       {"dtype", tensor.dtype},
                       {"shape", tensor.shape},
                       {"bytes", tensor.nbytes},
                       {"pieces", tensor.pieces}});
  }
  return {{"id", summary.id},
          {"plan", summary.plan},
          {"ranks", summary.ranks},
          {"numbers", summary.numbers},
          {"optimizer", summary.optimizer},
          {"optimizer_steps", summary.optimizer_steps},
          {"has_scaler", summary.has_scaler},
          {"schedulers", summary.schedulers},
          {"files", summary.files},
          {"tensors", std::move(tensors)}};
}

// Write errors are checked when the command is over.
void print(const std::string& text) { std::fputs(text.c_str(), stdout); }

void add_kinds(const CheckpointSummary& summary, std::string& text) {
  std::map<std::string, std::pair<int64_t, int64_t>> kinds;  // tensors and bytes
  for (const CheckpointTensor& tensor : summary.tensors) {
    auto& [count, nbytes] = kinds[tensor.kind];
    count += 1;
    nbytes += tensor.nbytes;
  }
  for (const auto& [kind, sum] : kinds)
    text += fmt::format("{:<7} {:>6} tensors {:>14} bytes\n", kind, sum.first, sum.second);
}

std::string text_of(const CheckpointSummary& summary) {
  std::string text =
      fmt::format("saved by {} ranks ({}), id {}\n", summary.ranks, summary.plan, summary.id);
  for (const auto& [name, value] : summary.numbers)
    text += fmt::format("number {} = {}\n", name, value);
  if (!summary.optimizer.empty())
    text +=
        fmt::format("optimizer {} after {} steps\n", summary.optimizer, summary.optimizer_steps);
  if (summary.has_scaler) text += "a gradient scaler\n";
  if (summary.schedulers > 0) text += fmt::format("{} schedulers\n", summary.schedulers);
  add_kinds(summary, text);
  text +=
      fmt::format("\n{:<7} {:<5} {:>14} {:>7}  name [shape]\n", "kind", "dtype", "bytes", "pieces");
  for (const CheckpointTensor& tensor : summary.tensors) {
    std::string name = fmt::format("{}", fmt::join(tensor.names, " = "));
    if (!tensor.state.empty()) name += (tensor.kind == "rank" ? " of rank " : " ") + tensor.state;
    text += fmt::format("{:<7} {:<5} {:>14} {:>7}  {} [{}]\n", tensor.kind, tensor.dtype,
                        tensor.nbytes, tensor.pieces, name, fmt::join(tensor.shape, ", "));
  }
  return text;
}

int inspect(const Arguments& arguments) {
  const CheckpointSummary summary = inspect_checkpoint(arguments.from);
  print(arguments.json ? to_json(summary).dump() + "\n" : text_of(summary));
  return 0;
}

// Prints findings to stdout, one line each.
int report(const std::vector<std::string>& findings, const std::string& all_well) {
  for (const std::string& finding : findings) print(finding + "\n");
  if (findings.empty()) print(all_well + "\n");
  return findings.empty() ? 0 : 1;
}

int verify(const Arguments& arguments) {
  return report(verify_checkpoint(arguments.from, arguments.progress("verify")),
                "all checksums are right");
}

int diff(const Arguments& arguments) {
  return report(compare_checkpoints(arguments.from, arguments.to, arguments.progress("diff")),
                "no difference");
}

int reshard(const Arguments& arguments) {
  return run_interruptible([&](const Interruption& interruption) {
    reshard_checkpoint(arguments.from, arguments.to, arguments.ranks,
                       interruption.checked(arguments.progress("reshard")));
    return 0;
  });
}

int export_file(const Arguments& arguments) {
  ExportOptions options;
  if (!arguments.format.empty())
    options.format =
        arguments.format == "torch" ? ExportFormat::kTorch : ExportFormat::kSafetensors;
  if (!arguments.dtype.empty()) options.dtype = parse_dtype(arguments.dtype);
  return run_interruptible([&](const Interruption& interruption) {
    options.progress = interruption.checked(arguments.progress("export"));
    export_checkpoint(arguments.from, arguments.to, options);
    return 0;
  });
}

int import_file(const Arguments& arguments) {
  return run_interruptible([&](const Interruption& interruption) {
    import_checkpoint(arguments.from, arguments.to,
                      interruption.checked(arguments.progress("import")));
    return 0;
  });
}

void add_commands(CLI::App& ckpt, int& exit_code, const ArgumentsPtr& arguments) {
  const auto add = [&](const char* name, const char* text, auto work) {
    return add_command(ckpt, name, text, exit_code, arguments, work);
  };
  CLI::App* command = add("inspect", "Lists the contents of a checkpoint", inspect);
  add_path(command, "CKPT", arguments->from, "The checkpoint");
  command->add_flag("--json", arguments->json, "Print one line of JSON");

  command = add("verify", "Reads everything and compares the checksums", verify);
  add_path(command, "CKPT", arguments->from, "The checkpoint");
  add_quiet(command, *arguments);

  command = add("diff", "Compares the contents of two checkpoints, however they are cut", diff);
  add_path(command, "A", arguments->from, "A checkpoint");
  add_path(command, "B", arguments->to, "Another one");
  add_quiet(command, *arguments);

  command = add("reshard", "Writes a checkpoint as another number of ranks would", reshard);
  add_path(command, "CKPT", arguments->from, "The checkpoint");
  add_path(command, "TO", arguments->to, "The directory of the new one");
  command->add_option("--ranks", arguments->ranks, "How many")
      ->required()
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("N");
  add_quiet(command, *arguments);

  command = add("export", "Writes the model whole into one file for other tools", export_file);
  add_path(command, "CKPT", arguments->from, "The checkpoint");
  add_path(command, "FILE", arguments->to, "Ends with .safetensors, or with .pt, .pth or .bin");
  command
      ->add_option("--format", arguments->format,
                   "safetensors, or torch for Python's torch.load (default: by FILE's name)")
      ->check(CLI::IsMember({"safetensors", "torch"}))
      ->type_name("");
  command->add_option("--dtype", arguments->dtype, "Of floating tensors (default: as stored)")
      ->type_name("DTYPE");
  add_quiet(command, *arguments);

  command = add("import", "Makes a checkpoint of another tool's files", import_file);
  add_path(command, "FILE", arguments->from,
           "A safetensors file, a directory of such as Hugging Face writes them, or a file of "
           "Python's torch.save");
  add_path(command, "CKPT", arguments->to, "The directory of the checkpoint");
  add_quiet(command, *arguments);
}

}  // namespace

void add_ckpt(CLI::App& app, int& exit_code) {
  CLI::App* ckpt = app.add_subcommand("ckpt", "Looks at checkpoints, and converts them");
  ckpt->footer(kCkptFooter);
  add_commands(*ckpt, exit_code, std::make_shared<Arguments>());
}

}  // namespace tessera::tools
