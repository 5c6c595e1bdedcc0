#include "checkpoint/tied_copies.h"

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checksum.h"
#include "checkpoint/safetensors.h"

namespace tessera {
namespace {

using Likeness = std::pair<std::string, std::vector<int64_t>>;  // dtype and shape

Likeness likeness_of(const TensorRecord& record) { return {record.dtype, record.shape}; }

uint64_t checksum_of(const at::Tensor& value) {
  return checksum(value.const_data_ptr(), value.nbytes());
}

bool may_be_tied(const TensorRecord& record) {
  return record.kind == "tensor" && record.numel() > 0 &&
         c10::isFloatingType(scalar_type_of(record.dtype));
}

std::set<std::string> optimized_names(const CheckpointIndex& index) {
  std::set<std::string> names;
  for (const ParamGroupRecord& group : index.optimizer->param_groups)
    names.insert(group.params.begin(), group.params.end());
  return names;
}

// Returns the one of the parameters, by their checksums, that has the values of `record`; null if
// none.
TensorRecord* same_param(const std::multimap<uint64_t, TensorRecord*>& params,
                         const TensorRecord& record, ChunkReader& reader) {
  const at::Tensor value = reader.read_whole(record);
  const auto [begin, end] = params.equal_range(checksum_of(value));
  for (auto it = begin; it != end; ++it) {
    const at::Tensor other = reader.read_whole(*it->second);
    if (std::memcmp(value.const_data_ptr(), other.const_data_ptr(), value.nbytes()) == 0)
      return it->second;
  }
  return nullptr;
}

}  // namespace

void tie_copies(CheckpointIndex& index, ChunkReader& reader) {
  const std::set<std::string> optimized = optimized_names(index);
  std::map<Likeness, std::vector<TensorRecord*>> params;
  std::map<Likeness, std::vector<TensorRecord*>> others;
  for (TensorRecord& record : index.tensors) {
    if (!may_be_tied(record)) continue;
    auto& place = optimized.contains(record.names.front()) ? params : others;
    place[likeness_of(record)].push_back(&record);
  }
  std::set<const TensorRecord*> copies;
  for (const auto& [likeness, records] : others) {
    const auto it = params.find(likeness);
    if (it == params.end()) continue;
    std::multimap<uint64_t, TensorRecord*> by_checksum;
    for (TensorRecord* param : it->second)
      by_checksum.emplace(checksum_of(reader.read_whole(*param)), param);
    for (TensorRecord* record : records) {
      TensorRecord* const param = same_param(by_checksum, *record, reader);
      if (!param) continue;
      param->names.insert(param->names.end(), record->names.begin(), record->names.end());
      copies.insert(record);
    }
  }
  std::erase_if(index.tensors,
                [&](const TensorRecord& record) { return copies.contains(&record); });
}

}  // namespace tessera
