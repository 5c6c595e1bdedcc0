#include "interop/command/ckpt_command.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpoint_files.h>
#include <tessera/interop/exchange.h>
#include <tessera/planner/plan_report.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "command/command_line.h"
#include "command/exit_code.h"
#include "interop/command/interruption.h"
#include "interop/command/progress_line.h"
#include "interop/command/rename_arguments.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

constexpr size_t kColumns = 80;

constexpr const char* kCkptFooter = R"(
CKPT is a checkpoint's directory, or one with a series of them, of which the latest is taken.
Exit status: 0 if all is well; 1 if `verify` or `ls` found damage or `diff` a difference; 2 if the arguments are
wrong, the work could not be done, or its output could not be written. An interrupt leaves nothing that was begun.)";

const std::map<std::string, ExportFormat> kFormats = {{"safetensors", ExportFormat::kSafetensors},
                                                      {"huggingface", ExportFormat::kHuggingFace}};
const std::set<std::string> kPythonFormats = {"torch", "dcp"},
                            kPythonFiles = {".pt", ".pth", ".bin"};

constexpr int kCkptNotDone = 2;  // differs from the status of a finding

struct Arguments {
  const CLI::App* command = nullptr;
  std::string from, to, format, dtype;
  int ranks = 0;
  std::string rename_file, model_key;
  std::vector<std::string> python_only;  // values of options that need Python
  std::vector<std::string> rename, transpose;
  int64_t max_shard_bytes = 0;  // 0: not given
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
  command->callback([name, command, arguments, work, &exit_code] {
    arguments->command = command;
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

// JSON has no infinities and no NaN: they are text.
nlohmann::json to_json(const std::map<std::string, double>& numbers) {
  nlohmann::json result = nlohmann::json::object();
  for (const auto& [name, value] : numbers)
    result[name] =
        std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(fmt::format("{}", value));
  return result;
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
          {"saved", summary.saved},
          {"bytes", summary.nbytes},
          {"plan", summary.plan},
          {"ranks", summary.ranks},
          {"numbers", to_json(summary.numbers)},
          {"texts", summary.texts},
          {"models", summary.models},
          {"optimizer", summary.optimizer},
          {"optimizer_steps", summary.optimizer_steps},
          {"has_scaler", summary.has_scaler},
          {"schedulers", summary.schedulers},
          {"files", summary.files},
          {"tensors", std::move(tensors)}};
}

// Write errors are checked when the command is over.
void print(const std::string& text) { std::fputs(text.c_str(), stdout); }

std::string time_text(int64_t seconds) {
  return fmt::format("{:%Y-%m-%d %H:%M} UTC", fmt::gmtime(static_cast<std::time_t>(seconds)));
}

// Returns the checkpoint to work with: `path`, or the latest one in it if it is a directory of a
// series, which is said.
std::string checkpoint_at(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored) || fs::exists(fs::path(path) / "index.json", ignored))
    return path;
  const auto latest = latest_checkpoint(path);
  if (!latest) return path;
  fmt::print(stderr, "tessera ckpt: '{}' is a series; its latest is '{}'\n", path,
             latest->string());
  return latest->string();
}

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

// Returns text as a line of at most `most` bytes.
std::string one_line(std::string text, size_t most) {
  if (text.size() > most) {
    while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0) == 0x80) --most;  // UTF-8
    text.resize(most);
  }
  std::ranges::replace_if(
      text, [](unsigned char c) { return c < ' ' || c == 0x7F; }, ' ');
  return text;
}

std::string row_of(const CheckpointTensor& tensor) {
  std::string name = fmt::format("{}", fmt::join(tensor.names, " = "));
  if (!tensor.state.empty()) name += (tensor.kind == "rank" ? " of rank " : " ") + tensor.state;
  const std::string row =
      fmt::format("{:<6} {:<7} {:>8} {:>6}  {}", tensor.kind, tensor.dtype,
                  bytes_text(static_cast<double>(tensor.nbytes)), tensor.pieces, name);
  const std::string shape = fmt::format("[{}]", fmt::join(tensor.shape, ", "));
  const bool fits = row.size() + 1 + shape.size() <= kColumns;
  return fmt::format("{}{}{}\n", row, fits ? " " : "\n" + std::string(34, ' '), shape);
}

std::string text_of(const CheckpointSummary& summary) {
  std::string text =
      fmt::format("saved by {} ranks ({}), id {}\n", summary.ranks, summary.plan, summary.id);
  text += fmt::format("at {}, {} in all\n", time_text(summary.saved),
                      bytes_text(static_cast<double>(summary.nbytes)));
  if (!summary.models.empty())
    text += fmt::format("models {}: each in a directory of its name\n",
                        fmt::join(summary.models, ", "));
  for (const auto& [name, value] : summary.numbers)
    text += fmt::format("number {} = {}\n", name, value);
  for (const auto& [name, value] : summary.texts)
    text += fmt::format("text {} = {}\n", name, one_line(value, 200));
  if (!summary.optimizer.empty())
    text +=
        fmt::format("optimizer {} after {} steps\n", summary.optimizer, summary.optimizer_steps);
  if (summary.has_scaler) text += "a gradient scaler\n";
  if (summary.schedulers > 0) text += fmt::format("{} schedulers\n", summary.schedulers);
  add_kinds(summary, text);
  text +=
      fmt::format("\n{:<6} {:<7} {:>8} {:>6}  name [shape]\n", "kind", "dtype", "size", "pieces");
  for (const CheckpointTensor& tensor : summary.tensors) text += row_of(tensor);
  return text;
}

int inspect(const Arguments& arguments) {
  const CheckpointSummary summary = inspect_checkpoint(checkpoint_at(arguments.from));
  print(arguments.json ? to_json(summary).dump() + "\n" : text_of(summary));
  return 0;
}

// How a model was sharded, in one word.
std::string level_of(const CheckpointSummary& summary) {
  static const std::string kLevel = "level ";
  const size_t at = summary.plan.find(kLevel);
  const std::string rest =
      at == std::string::npos ? summary.plan : summary.plan.substr(at + kLevel.size());
  return summary.models.empty() ? rest.substr(0, rest.find_first_of(" ,"))
                                : fmt::format("{} models", summary.models.size());
}

std::string row_of(const ListedCheckpoint& listed) {
  const CheckpointSummary& summary = listed.summary;
  std::string steps;
  if (const auto step = summary.numbers.find("step"); step != summary.numbers.end())
    steps = fmt::format("{:g}", step->second);
  else if (summary.optimizer_steps > 0)
    steps = std::to_string(summary.optimizer_steps);
  const std::string name = listed.path.filename().string();
  std::string text = fmt::format("{} {:<18} ", listed.is_latest ? '*' : ' ', name);
  if (!summary.id.empty())
    text += fmt::format("{} {:>8} {:>5}  {:<8} {:>8}", time_text(summary.saved),
                        bytes_text(static_cast<double>(summary.nbytes)), summary.ranks,
                        level_of(summary), steps);
  return text + (listed.problem.empty() ? "\n" : "\n    not intact: " + listed.problem + "\n");
}

nlohmann::json to_json(const ListedCheckpoint& listed) {
  nlohmann::json result = {
      {"path", listed.path.string()}, {"latest", listed.is_latest}, {"problem", listed.problem}};
  if (listed.summary.id.empty()) return result;
  nlohmann::json summary = to_json(listed.summary);
  summary.erase("tensors");
  result.update(summary);
  return result;
}

void print_table(const std::vector<ListedCheckpoint>& all) {
  print(fmt::format("  {:<18} {:<20} {:>8} {:>5}  {:<8} {:>8}\n", "* the latest", "saved", "size",
                    "ranks", "level", "step"));
  fs::path directory;
  for (const ListedCheckpoint& listed : all) {
    if (listed.path.parent_path() != directory) {
      directory = listed.path.parent_path();
      print(directory.string() + "\n");
    }
    print(row_of(listed));
  }
}

int list(const Arguments& arguments) {
  const std::vector<ListedCheckpoint> all = list_checkpoints(arguments.from);
  if (arguments.json) {
    nlohmann::json list = nlohmann::json::array();
    for (const ListedCheckpoint& listed : all) list.push_back(to_json(listed));
    print(list.dump() + "\n");
  } else if (all.empty()) {
    print(fmt::format("no checkpoints in '{}'\n", arguments.from));
  } else {
    print_table(all);
  }
  return std::ranges::all_of(all, [](const auto& each) { return each.problem.empty(); }) ? 0 : 1;
}

// Prints findings to stdout, one line each.
int report(const std::vector<std::string>& findings, const std::string& all_well) {
  for (const std::string& finding : findings) print(finding + "\n");
  if (findings.empty()) print(all_well + "\n");
  return findings.empty() ? 0 : 1;
}

int verify(const Arguments& arguments) {
  return report(verify_checkpoint(checkpoint_at(arguments.from), arguments.progress("verify")),
                "all checksums are right");
}

int diff(const Arguments& arguments) {
  return report(compare_checkpoints(checkpoint_at(arguments.from), checkpoint_at(arguments.to),
                                    arguments.progress("diff")),
                "no difference");
}

int reshard(const Arguments& arguments) {
  return run_interruptible([&](const Interruption& interruption) {
    reshard_checkpoint(checkpoint_at(arguments.from), arguments.to, arguments.ranks,
                       interruption.checked(arguments.progress("reshard")));
    return 0;
  });
}

// Throws, naming the command that does the work instead: this one, with its arguments, in Python.
[[noreturn]] void refer_to_python(const CLI::App& command) {
  std::string text = "python -m tessera.exchange " + command.get_name();
  for (const CLI::Option* option : command.get_options()) {
    const bool is_flag = option->get_expected_max() == 0;
    for (const std::string& value : option->results()) {
      if (!option->get_positional()) text += " " + option->get_name();
      if (!is_flag) text += fmt::format(" '{}'", value);
    }
  }
  throw std::invalid_argument(
      "files of torch.save, DCP directories and PyTorch's optimizer state are exchanged by the "
      "Python package; run\n" +
      text);
}

int export_file(const Arguments& arguments) {
  const bool is_python_file = kPythonFiles.contains(fs::path(arguments.to).extension().string());
  if (kPythonFormats.contains(arguments.format) || !arguments.python_only.empty() ||
      (arguments.format.empty() && is_python_file))
    refer_to_python(*arguments.command);
  ExportOptions options;
  if (!arguments.format.empty()) options.format = kFormats.at(arguments.format);
  if (!arguments.dtype.empty()) options.dtype = parse_dtype(arguments.dtype);
  if (arguments.max_shard_bytes > 0) options.max_shard_bytes = arguments.max_shard_bytes;
  options.rename = rename_rules_of(arguments.rename_file, arguments.rename);
  return run_interruptible([&](const Interruption& interruption) {
    options.progress = interruption.checked(arguments.progress("export"));
    export_checkpoint(checkpoint_at(arguments.from), arguments.to, options);
    return 0;
  });
}

int import_file(const Arguments& arguments) {
  if (fs::exists(fs::path(arguments.from) / ".metadata") || !arguments.python_only.empty())
    refer_to_python(*arguments.command);
  ImportOptions options;
  options.rename = rename_rules_of(arguments.rename_file, arguments.rename);
  options.transpose = arguments.transpose;
  options.model_key = arguments.model_key;
  return run_interruptible([&](const Interruption& interruption) {
    options.progress = interruption.checked(arguments.progress("import"));
    import_checkpoint(arguments.from, arguments.to, options);
    return 0;
  });
}

void add_python_only(CLI::App* command, const char* name, const char* text, Arguments& arguments) {
  command->add_option(name, arguments.python_only, text)
      ->type_name("")
      ->expected(1)
      ->group("Options of python -m tessera.exchange");
}

void add_names(CLI::App* command, Arguments& arguments) {
  command
      ->add_option(
          "--rename", arguments.rename,
          "PATTERN=REPLACEMENT for names, a regular expression and its replacement ($1 is a "
          "group); without a name, a tensor is left out. May be repeated")
      ->type_name("RULE")
      ->allow_extra_args(false);
  command
      ->add_option("--rename-file", arguments.rename_file,
                   "JSON: a list of [\"PATTERN\", \"REPLACEMENT\"], or an object of whole names")
      ->type_name("FILE");
}

void add_export(CLI::App* command, Arguments& arguments) {
  add_path(command, "CKPT", arguments.from, "The checkpoint");
  add_path(command, "TO", arguments.to,
           "A file that ends with .safetensors, or a directory for Hugging Face; with Python, a "
           "file that "
           "ends with .pt, .pth or .bin, or a DCP directory");
  command
      ->add_option(
          "--format", arguments.format,
          "safetensors or huggingface (a directory); with Python, torch for torch.load, or dcp for "
          "torch.distributed.checkpoint (default: by TO's name)")
      ->check(CLI::IsMember({"safetensors", "huggingface", "torch", "dcp"}))
      ->type_name("");
  command->add_option("--dtype", arguments.dtype, "Of floating tensors (default: as stored)")
      ->type_name("DTYPE");
  command
      ->add_option("--max-shard-size", arguments.max_shard_bytes,
                   "Most bytes of a file for Hugging Face, such as 500MB (default: 5GB)")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true).description(""))
      ->check(CLI::Validator(CLI::PositiveNumber).description(""))
      ->type_name("SIZE");
  add_names(command, arguments);
  add_python_only(command, "--model", "The key of the model's state dict", arguments);
  add_python_only(command, "--optimizer", "The key of the optimizer's state dict", arguments);
  add_quiet(command, arguments);
}

void add_import(CLI::App* command, Arguments& arguments) {
  add_path(command, "FROM", arguments.from,
           "A safetensors file, the index of such files, a directory as Hugging Face writes it, or "
           "a file "
           "of Python's torch.save; with Python, a directory of torch.distributed.checkpoint");
  add_path(command, "CKPT", arguments.to, "The directory of the checkpoint");
  add_names(command, arguments);
  command
      ->add_option("--model", arguments.model_key,
                   "The key of the model's state dict in a file of torch.save")
      ->type_name("KEY");
  add_python_only(command, "--optimizer", "The key of the optimizer's state dict", arguments);
  add_python_only(command, "--optimizer-class", "The optimizer's class", arguments);
  add_python_only(command, "--optimizer-params", "A file of its parameters' names", arguments);
  command
      ->add_option(
          "--transpose", arguments.transpose,
          "Regular expression for whole names, after --rename, of tensors to transpose. May "
          "be repeated")
      ->type_name("PATTERN")
      ->allow_extra_args(false);
  add_quiet(command, arguments);
}

void add_commands(CLI::App& ckpt, int& exit_code, const ArgumentsPtr& arguments) {
  const auto add = [&](const char* name, const char* text, auto work) {
    return add_command(ckpt, name, text, exit_code, arguments, work);
  };
  CLI::App* command =
      add("ls", "Lists the checkpoints in a directory and below, and those that are damaged", list);
  add_path(command, "DIRECTORY", arguments->from, "Where to look");
  command->add_flag("--json", arguments->json, "Print one line of JSON");

  command = add("inspect", "Lists the contents of a checkpoint", inspect);
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

  add_export(add("export", "Writes the model whole into files for other tools", export_file),
             *arguments);
  add_import(add("import", "Makes a checkpoint of another tool's files", import_file), *arguments);
}

}  // namespace

void add_ckpt(CLI::App& app, int& exit_code) {
  CLI::App* ckpt = app.add_subcommand("ckpt", "Looks at checkpoints, and converts them");
  ckpt->footer(kCkptFooter);
  add_commands(*ckpt, exit_code, std::make_shared<Arguments>());
}

}  // namespace tessera::tools
