#include "interop/foreign_load.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/files/untrusted.h"
#include "checkpoint/checksum.h"
#include "checkpoint/name_rules.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

// Other tools store a tied tensor under one of its names: gives it the model's other ones.
void complete_ties(CheckpointIndex& index, const ModelView& view) {
  std::unordered_map<std::string, size_t> places;
  for (size_t i = 0; i < index.tensors.size(); ++i)
    for (const std::string& name : index.tensors[i].names) places.emplace(name, i);
  for (const ParamView& param : view.params) {
    const auto stored = std::ranges::find_if(
        param.names, [&](const std::string& name) { return places.contains(name); });
    if (stored == param.names.end()) continue;
    TensorRecord& record = index.tensors[places.at(*stored)];
    for (const std::string& name : param.names)
      if (!places.contains(name)) record.names.push_back(name);
  }
}

ChunkReader reader_of(const std::filesystem::path& path, const ModelView& view,
                      const LoadSafetensorsOptions& options) {
  ForeignFiles files = open_foreign(path);
  const NameRules rules(options.rename, "options.rename");
  rename_tensors(files.index, files.path, [&](const std::string& name) {
    const std::string renamed = rules.apply(name);
    return options.rename_by && !renamed.empty() ? options.rename_by(renamed) : renamed;
  });
  transpose_tensors(files.index, options.transpose);
  complete_ties(files.index, view);
  return files.reader();
}

std::string shape_text(at::IntArrayRef shape) {
  return fmt::format("[{}]", fmt::join(shape.vec(), ", "));
}

// A tensor of the model.
struct Wanted {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype;
};

std::vector<Wanted> wanted_by(const ModelView& view) {
  std::vector<Wanted> wanted;
  for (const ParamView& param : view.params)
    for (const std::string& name : param.names)
      wanted.push_back({name, param.sizes, param.master_dtype});
  for (const NamedTensor& buffer : view.buffers)
    wanted.push_back({buffer.name, buffer.tensor.sizes().vec(), buffer.tensor.scalar_type()});
  return wanted;
}

// Names each missing tensor with the most similar of the others.
std::vector<std::string> describe_missing(const std::vector<Wanted>& missing,
                                          const std::vector<std::string>& others) {
  std::vector<std::string> lines;
  for (const Wanted& tensor : missing) {
    std::string line = fmt::format("'{}' {}", tensor.name, shape_text(tensor.shape));
    if (lines.size() < 10) {  // no message shows more
      const std::string similar = most_similar(tensor.name, others);
      if (!similar.empty()) line += fmt::format(" (similar: '{}')", similar);
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

bool is_equal(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

}  // namespace

ForeignLoad::ForeignLoad(const std::filesystem::path& path, ModelView view,
                         const LoadSafetensorsOptions& options)
    : view_(std::move(view)), reads_(reader_of(path, view_, options)) {
  check_fit(options);
  check_ties();
  plan();
}

void ForeignLoad::check_fit(const LoadSafetensorsOptions& options) {
  std::set<std::string> names;
  std::vector<Wanted> missing;
  std::vector<std::string> unexpected, misfits, texts;
  for (Wanted& wanted : wanted_by(view_)) {
    names.insert(wanted.name);
    const TensorRecord* const record = reads_.table.find("param", wanted.name);
    if (!record) {
      missing.push_back(std::move(wanted));
      continue;
    }
    const at::Tensor like = at::empty(wanted.shape, at::dtype(wanted.dtype).device(at::kMeta));
    const std::string misfit = describe_misfit(*record, wanted.name, like);
    if (!misfit.empty()) misfits.push_back(misfit);
  }
  for (const TensorRecord& record : reads_.reader.index().tensors)
    for (const std::string& name : record.names)
      if (!names.contains(name)) unexpected.push_back(name);
  const auto add_text = [&](const char* title, const std::vector<std::string>& items) {
    if (!items.empty()) texts.push_back(fmt::format("{}: {}", title, shortened(items)));
  };
  if (!options.allow_missing)
    add_text("missing in the files", describe_missing(missing, unexpected));
  std::vector<std::string> quoted;
  for (const std::string& name : unexpected) quoted.push_back(fmt::format("'{}'", shortened(name)));
  if (!options.allow_unexpected) add_text("not in the model", quoted);
  add_text("other shapes or dtypes", misfits);
  TORCH_CHECK_VALUE(texts.empty(), "[load_safetensors] '", reads_.reader.path(),
                    "' must fit the model; ", fmt::format("{}", fmt::join(texts, "; ")),
                    ". options.rename maps names, options.transpose swaps two dims");
  for (const Wanted& tensor : missing) loaded_.missing.push_back(tensor.name);
  loaded_.unexpected = std::move(unexpected);
}

void ForeignLoad::check_ties() {
  for (const ParamView& param : view_.params) {
    const TensorRecord* const first = reads_.table.find("param", param.name());
    std::set<const TensorRecord*> compared = {first};
    for (const std::string& name : param.names) {
      const TensorRecord* const other = reads_.table.find("param", name);
      if (!first || !compared.insert(other).second) continue;
      TORCH_CHECK_VALUE(
          is_equal(reads_.reader.read_whole(*first), reads_.reader.read_whole(*other)),
          "[load_safetensors] the model ties '", param.name(), "' and '", name, "', which '",
          reads_.reader.path(),
          "' must have with equal values; they differ: leave one out by options.rename, or untie "
          "them");
    }
  }
}

void ForeignLoad::plan() {
  for (const ParamView& param : view_.params)
    reads_.add(reads_.table.source_of(param), param.strides, param.region(), param.values,
               param.tensors);
  for (const NamedTensor& buffer : view_.buffers)
    reads_.add(reads_.table.find("buffer", buffer.name), row_major(buffer.tensor.sizes()),
               region_of(buffer.tensor, buffer.name), local_of(buffer.tensor), {buffer.tensor});
}

std::string ForeignLoad::digest() const {
  std::string text;
  for (const TensorRecord& record : reads_.reader.index().tensors) {
    text += fmt::format("{} {} {}\n", fmt::join(record.names, " "), record.dtype,
                        fmt::join(record.shape, ","));
    for (const ChunkRecord& chunk : record.chunks) text += fmt::format(" {}\n", chunk.key);
  }
  return checksum_text(checksum(text.data(), text.size()));
}

LoadedTensors ForeignLoad::load() {
  reads_.read();
  return loaded_;
}

}  // namespace tessera
