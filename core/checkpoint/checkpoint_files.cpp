#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <tessera/checkpoint/checkpoint_files.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/chunk_reader.h"
#include "checkpoint/directory.h"
#include "checkpoint/summary.h"
#include "tensor/chunks.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Collects the errors of `read` without repetitions: a missing file is reported once.
void collect_errors(const std::function<void()>& read, std::vector<std::string>& errors) {
  try {
    read();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    if (std::find(errors.begin(), errors.end(), text) == errors.end()) errors.push_back(text);
  }
}

using Records = std::map<std::string, const TensorRecord*>;

// Maps each name's id to its record, except for tensors that belong to one rank alone.
Records records_of(const CheckpointIndex& index) {
  Records records;
  for (const TensorRecord& record : index.tensors) {
    if (record.kind == "rank") continue;
    for (size_t name = 0; name < record.names.size(); ++name) records[record.id(name)] = &record;
  }
  return records;
}

// Compares bits: NaN equals itself, and 0 is not -0.
bool is_same(const at::Tensor& a, const at::Tensor& b) {
  if (a.nbytes() != b.nbytes()) return false;
  return a.nbytes() == 0 ||  // memcmp accepts no null pointer, not even for 0 bytes
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

std::string describe_values(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  return fmt::format("{} of {} values differ, by at most {:.6g}", x.ne(y).sum().item<int64_t>(),
                     a.numel(), x.sub(y).abs().max().item<double>());
}

template <class Map>
void compare_maps(const std::string& what, const Map& a, const Map& b,
                  std::vector<std::string>& differences) {
  std::set<std::string> names;
  for (const auto& [name, value] : a) names.insert(name);
  for (const auto& [name, value] : b) names.insert(name);
  const auto text = [](const Map& map, const std::string& name) {
    const auto it = map.find(name);
    return it == map.end() ? std::string("none") : fmt::format("{}", it->second);
  };
  for (const std::string& name : names) {
    if (text(a, name) != text(b, name))
      differences.push_back(
          fmt::format("{} '{}': {} against {}", what, name, text(a, name), text(b, name)));
  }
}

void compare_schedulers(const std::vector<std::map<std::string, double>>& a,
                        const std::vector<std::map<std::string, double>>& b,
                        std::vector<std::string>& differences) {
  if (a.size() != b.size())
    differences.push_back(fmt::format("schedulers: {} against {}", a.size(), b.size()));
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    compare_maps(fmt::format("scheduler {}", i), a[i], b[i], differences);
}

void compare_optimizers(const CheckpointIndex& a, const CheckpointIndex& b,
                        std::vector<std::string>& differences) {
  if (!a.optimizer || !b.optimizer) {
    if (a.optimizer.has_value() != b.optimizer.has_value())
      differences.push_back(fmt::format("optimizer: only {} has one", a.optimizer ? "A" : "B"));
    return;
  }
  const OptimizerRecord &x = *a.optimizer, &y = *b.optimizer;
  if (x.kind != y.kind)
    differences.push_back(fmt::format("optimizer: {} against {}", x.kind, y.kind));
  if (x.steps != y.steps)
    differences.push_back(fmt::format("optimizer steps: {} against {}", x.steps, y.steps));
  compare_maps("step counts of", x.counts, y.counts, differences);
  if (x.param_groups.size() != y.param_groups.size()) {
    differences.push_back(fmt::format("optimizer: {} param groups against {}",
                                      x.param_groups.size(), y.param_groups.size()));
    return;
  }
  for (size_t group = 0; group < x.param_groups.size(); ++group) {
    const auto &left = x.param_groups[group], &right = y.param_groups[group];
    compare_maps(fmt::format("option of param group {}", group), left.options, right.options,
                 differences);
    if (left.params != right.params)
      differences.push_back(fmt::format("param group {} has other parameters", group));
  }
}

// Adds elements [begin, end) of a tensor, in the order in which they are stored, to a rank's data.
void add_range(ChunkReader& reader, const TensorRecord& record, Range range, int rank, int ranks,
               RankContents& contents) {
  TensorRecord part = record;
  part.chunks.clear();
  if (range.size() > 0) {
    const std::string key = fmt::format("{}/{}", record.id(), range.begin);
    const Region region{range.begin, range.end};
    part.chunks = {{rank_file(rank, ranks), key, region}};
    const auto dtype = scalar_type_of(record.dtype);
    contents.chunks.push_back({key, dtype, range.size(), [&reader, &record, region, dtype] {
                                 const at::Tensor data = at::empty({region.numel()}, dtype);
                                 reader.read(record, record.strides, region, data);
                                 return data;
                               }});
  }
  contents.index.tensors.push_back(std::move(part));
}

fs::path model_path(const fs::path& path, const std::string& model) {
  return readable_checkpoint(path) / model;
}

int64_t seconds_of_file(const fs::path& file) {
  struct stat status {};
  return ::stat(file.c_str(), &status) == 0 ? status.st_mtim.tv_sec : 0;
}

// Adds the differences between the models of two checkpoints of several.
void compare_models(const fs::path& a, const CheckpointIndex& left, const fs::path& b,
                    const CheckpointIndex& right, const CheckpointProgress& progress,
                    std::vector<std::string>& differences) {
  for (const std::string& model : right.models)
    if (std::ranges::count(left.models, model) == 0)
      differences.push_back(fmt::format("model '{}': only B has it", model));
  for (const std::string& model : left.models) {
    if (std::ranges::count(right.models, model) == 0) {
      differences.push_back(fmt::format("model '{}': only A has it", model));
      continue;
    }
    for (const std::string& difference :
         compare_checkpoints(model_path(a, model), model_path(b, model), progress))
      differences.push_back(fmt::format("model '{}', {}", model, difference));
  }
}

}  // namespace

std::vector<ChunkReader> open_with_models(const fs::path& path) {
  std::vector<ChunkReader> readers;
  readers.emplace_back(path);
  const std::vector<std::string> models = readers.front().index().models;
  for (const std::string& model : models) readers.emplace_back(model_path(path, model));
  return readers;
}

CheckpointSummary summary_of(const fs::path& path, const std::vector<ChunkReader>& readers) {
  const CheckpointIndex& index = readers.front().index();
  CheckpointSummary summary{.id = index.id, .plan = index.plan, .ranks = index.world_size};
  summary.saved = seconds_of_file(readable_checkpoint(path) / kIndexFile);
  for (const ChunkReader& reader : readers) summary.nbytes += total_nbytes(reader.index());
  summary.numbers = index.numbers;
  summary.texts = index.texts;
  summary.models = index.models;
  if (index.optimizer) {
    summary.optimizer = index.optimizer->kind;
    summary.optimizer_steps = index.optimizer->steps;
  }
  summary.has_scaler = !index.scaler.empty();
  summary.schedulers = std::ssize(index.schedulers);
  std::set<std::string> files = {kIndexFile};
  for (const TensorRecord& record : index.tensors) {
    summary.tensors.push_back({record.kind, record.names, record.state, record.dtype, record.shape,
                               record.nbytes(), std::ssize(record.chunks)});
    for (const ChunkRecord& chunk : record.chunks) files.insert(chunk.file);
  }
  summary.files.assign(files.begin(), files.end());
  return summary;
}

CheckpointSummary inspect_checkpoint(const fs::path& path) {
  return summary_of(path, open_with_models(path));
}

std::vector<std::string> verify_checkpoint(const fs::path& path,
                                           const CheckpointProgress& progress) {
  std::vector<std::string> damage;
  std::vector<ChunkReader> readers;
  if (!holds_checkpoint(path)) readers.emplace_back(path);  // throws
  collect_errors([&] { readers.emplace_back(path); }, damage);
  if (readers.empty()) return damage;
  const std::vector<std::string> models = readers.front().index().models;
  for (const std::string& model : models)
    collect_errors([&] { readers.emplace_back(model_path(path, model)); }, damage);
  int64_t total = 0;
  for (const ChunkReader& reader : readers) total += total_nbytes(reader.index());
  ProgressCount count(progress, total);
  for (ChunkReader& reader : readers) {
    for (const TensorRecord& record : reader.index().tensors) {
      for (const ChunkRecord& chunk : record.chunks)
        collect_errors([&] { reader.verify(record, chunk); }, damage);
      count.add(record.nbytes());
    }
  }
  return damage;
}

std::vector<std::string> compare_checkpoints(const fs::path& a, const fs::path& b,
                                             const CheckpointProgress& progress) {
  at::NoGradGuard no_grad;
  ChunkReader left(a), right(b);
  const Records lefts = records_of(left.index()), rights = records_of(right.index());
  std::vector<std::string> differences;
  int64_t total = 0;
  for (const TensorRecord& record : left.index().tensors)
    if (record.kind != "rank") total += record.nbytes();
  ProgressCount count(progress, total);
  // Compares each pair of tied tensors once: tensors tied in one may be separate in the other.
  std::set<std::pair<const TensorRecord*, const TensorRecord*>> compared;
  std::set<const TensorRecord*> counted;
  for (const auto& [id, x] : lefts) {
    const auto it = rights.find(id);
    const TensorRecord* y = it == rights.end() ? nullptr : it->second;
    if (!y) {
      differences.push_back(fmt::format("'{}': only A has it", id));
    } else if (x->shape != y->shape || x->dtype != y->dtype) {
      differences.push_back(fmt::format("'{}': {} [{}] against {} [{}]", id, x->dtype,
                                        fmt::join(x->shape, ", "), y->dtype,
                                        fmt::join(y->shape, ", ")));
    } else if (compared.insert({x, y}).second) {
      const at::Tensor u = left.read_whole(*x), v = right.read_whole(*y);
      if (!is_same(u, v)) differences.push_back(fmt::format("'{}': {}", id, describe_values(u, v)));
    }
    if (counted.insert(x).second) count.add(x->nbytes());
  }
  for (const auto& [id, y] : rights)
    if (!lefts.contains(id)) differences.push_back(fmt::format("'{}': only B has it", id));
  compare_maps("number", left.index().numbers, right.index().numbers, differences);
  compare_maps("scaler", left.index().scaler, right.index().scaler, differences);
  compare_schedulers(left.index().schedulers, right.index().schedulers, differences);
  compare_optimizers(left.index(), right.index(), differences);
  compare_models(a, left.index(), b, right.index(), progress, differences);
  return differences;
}

void reshard_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                        int ranks, const CheckpointProgress& progress) {
  at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(ranks > 0, "[reshard_checkpoint] ranks must be 1 or more; got ", ranks);
  ChunkReader reader(from);
  const CheckpointIndex& index = reader.index();
  TORCH_CHECK_VALUE(index.models.empty(), "[reshard_checkpoint] '", from.string(),
                    "' has several models, ", fmt::format("{}", fmt::join(index.models, ", ")),
                    ": write each again, such as '", (from / index.models.front()).string(), "'");
  std::vector<RankContents> contents(static_cast<size_t>(ranks));
  contents[0].index = index;
  contents[0].index.tensors.clear();
  contents[0].index.saved_as.clear();  // the new one was not saved under a number
  for (RankContents& rank : contents) rank.index.world_size = ranks;
  for (const TensorRecord& record : index.tensors) {
    reader.check(record);
    if (record.kind == "rank") {
      const int owner = record.rank();
      if (owner < ranks)
        add_range(reader, record, {0, record.numel()}, owner, ranks, contents[owner]);
      continue;
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const Range range = chunk(record.numel(), ranks, rank);
      if (rank == 0 || range.size() > 0)
        add_range(reader, record, range, rank, ranks, contents[rank]);
    }
  }
  write_for_all(to, contents, progress);
}

}  // namespace tessera
