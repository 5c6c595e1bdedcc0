#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/checkpoint_files.h>

#include <string>
#include <utility>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/single_process.h"
#include "mesh/chunks.h"

namespace tessera {
namespace {

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

}  // namespace

void reshard_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                        int ranks, const CheckpointProgress& progress) {
  at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(ranks > 0, "[reshard_checkpoint] ranks must be 1 or more; got ", ranks);
  ChunkReader reader(from);
  const CheckpointIndex& index = reader.index();
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
  write_for_all(to, std::move(contents), progress);
}

}  // namespace tessera
