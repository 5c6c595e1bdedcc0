#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <c10/util/Exception.h>
#include <tessera/interop/exchange.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/dispatch/math_bits.h"
#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/name_rules.h"
#include "interop/foreign_files.h"

namespace tessera {
namespace {

// Leaves the tensors under a key, without the key in their names.
void select_part(CheckpointIndex& index, const std::string& from, const std::string& key) {
  if (key.empty()) return;
  const std::string prefix = key + ".";
  std::erase_if(index.tensors, [&](TensorRecord& record) {
    std::erase_if(record.names, [&](const auto& name) { return !name.starts_with(prefix); });
    for (std::string& name : record.names) name.erase(0, prefix.size());
    return record.names.empty();
  });
  TORCH_CHECK_VALUE(!index.tensors.empty(), "[import_checkpoint] '", from,
                    "' has no tensors under the key '", key, "'");
}

void apply(const ImportOptions& options, const std::string& from, CheckpointIndex& index) {
  const NameRules rules(options.rename, "options.rename");
  TORCH_CHECK_VALUE(!index.tensors.empty(), "[import_checkpoint] '", from, "' has no tensors");
  select_part(index, from, options.model_key);
  rename_tensors(index, from, [&](const std::string& name) { return rules.apply(name); });
  transpose_tensors(index, options.transpose);
}

// Calls `read` when a tensor is written. It must return it contiguous.
void write_tensors(const CheckpointIndex& index,
                   const std::function<at::Tensor(const TensorRecord&)>& read,
                   const std::filesystem::path& path, const CheckpointProgress& progress) {
  std::vector<RankContents> contents(1);
  contents[0].index.plan = "imported";
  contents[0].index.optimizer = index.optimizer;
  for (const TensorRecord& source : index.tensors) {
    const at::ScalarType dtype = scalar_type_of(source.dtype);
    TensorRecord record = contiguous_record(source.kind, source.names, source.shape, dtype);
    record.state = source.state;
    if (const int64_t numel = record.numel(); numel > 0) {
      record.chunks = {{rank_file(0, 1), record.id(), Region{0, numel}}};
      contents[0].chunks.push_back(
          {record.id(), dtype, numel, [&read, &source] { return read(source).view({-1}); }});
    }
    contents[0].index.tensors.push_back(std::move(record));
  }
  write_for_all(path, contents, progress);
}

}  // namespace

void import_checkpoint(const std::filesystem::path& from, const std::filesystem::path& path,
                       const ImportOptions& options) {
  at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      !std::filesystem::exists(readable_checkpoint(from) / kIndexFile), "[import_checkpoint] '",
      from.string(),
      "' is a checkpoint already: reshard_checkpoint() and export_checkpoint() convert it");
  ForeignFiles files = open_foreign(from);
  apply(options, files.path, files.index);
  ChunkReader reader = files.reader();
  for (const TensorRecord& record : reader.index().tensors)
    reader.check(record);  // before anything is written
  write_tensors(
      reader.index(), [&](const TensorRecord& record) { return reader.read_whole(record); }, path,
      options.progress);
}

void import_tensors(const std::string& index, const std::function<at::Tensor(size_t number)>& read,
                    const std::filesystem::path& path, const ImportOptions& options) {
  at::NoGradGuard no_grad;
  CheckpointIndex parsed = index_from_json(index, "index");
  for (size_t i = 0; i < parsed.tensors.size(); ++i) {
    TensorRecord& record = parsed.tensors[i];
    record.strides = row_major(record.shape);
    record.chunks = {{"", std::to_string(i), Region{0, record.numel()}}};  // finds it again
  }
  apply(options, "index", parsed);
  const auto read_record = [&](const TensorRecord& record) {
    const at::Tensor value = read(std::stoull(record.chunks.front().key));
    TORCH_CHECK_VALUE(
        value.numel() == record.numel() && value.scalar_type() == scalar_type_of(record.dtype),
        "[import_tensors] '", record.id(), "' must be ", record.numel(), " elements of ",
        record.dtype, ", as the index has it; got ", value.numel(), " of ", value.scalar_type());
    // The strides are those of a transposed tensor, where `options` has one.
    return at::as_strided(with_plain_memory(value).cpu().contiguous(), record.shape, record.strides)
        .contiguous();
  };
  write_tensors(parsed, read_record, path, options.progress);
}

}  // namespace tessera
