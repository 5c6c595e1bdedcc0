#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/interop/exchange.h>

#include <utility>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/name_rules.h"
#include "interop/foreign_files.h"
#include "interop/import_optimizer.h"

namespace tessera {
namespace {

// Adds a tensor, which is read when it is written.
void add_source(ChunkReader& reader, const TensorRecord& source, RankContents& contents) {
  const at::ScalarType dtype = scalar_type_of(source.dtype);
  TensorRecord record = contiguous_record(source.kind, source.names, source.shape, dtype);
  record.state = source.state;
  if (const int64_t numel = record.numel(); numel > 0) {
    record.chunks = {{rank_file(0, 1), record.id(), Region{0, numel}}};
    contents.chunks.push_back({record.id(), dtype, numel, [&reader, &source] {
                                 return reader.read_whole(source).view({-1});
                               }});
  }
  contents.index.tensors.push_back(std::move(record));
}

}  // namespace

void import_checkpoint(const std::filesystem::path& from, const std::filesystem::path& path,
                       const ImportOptions& options) {
  at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(
      !std::filesystem::exists(readable_checkpoint(from) / kIndexFile), "[import_checkpoint] '",
      from.string(),
      "' is a checkpoint already: reshard_checkpoint() and export_checkpoint() convert it");
  const NameRules rules(options.rename, "options.rename");
  ForeignFiles files = open_foreign(from);
  TORCH_CHECK_VALUE(!files.index.tensors.empty(), "[import_checkpoint] '", from.string(),
                    "' has no tensors");
  select_parts(files, options);
  rename_tensors(files.index, files.path,
                 [&](const std::string& name) { return rules.apply(name); });
  transpose_tensors(files.index, options.transpose);
  ChunkReader reader = files.reader();
  std::vector<RankContents> contents(1);
  contents[0].index.plan = "imported";
  contents[0].index.optimizer = reader.index().optimizer;
  for (const TensorRecord& record : reader.index().tensors) {
    reader.check(record);  // before anything is written
    add_source(reader, record, contents[0]);
  }
  write_for_all(path, contents, options.progress);
}

}  // namespace tessera
