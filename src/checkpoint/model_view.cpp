#include "checkpoint/model_view.h"

#include <c10/util/strides.h>

#include <utility>

#include "checkpoint/safetensors.h"

namespace tessera {

std::vector<int64_t> row_major(at::IntArrayRef sizes) {
  const auto strides = c10::contiguous_strides(sizes);
  return {strides.begin(), strides.end()};
}

TensorRecord record_of(const ParamView& param) {
  TensorRecord record{
      .kind = "param", .names = param.names, .shape = param.sizes, .strides = param.strides};
  record.dtype = safetensors_dtype(param.master_dtype);
  return record;
}

TensorRecord record_of(const NamedTensor& buffer) {
  return contiguous_record("buffer", {buffer.name}, buffer.tensor.sizes().vec(),
                           buffer.tensor.scalar_type());
}

TensorRecord contiguous_record(std::string kind, std::vector<std::string> names,
                               std::vector<int64_t> shape, at::ScalarType dtype) {
  TensorRecord record{
      .kind = std::move(kind), .names = std::move(names), .shape = std::move(shape)};
  record.strides = row_major(record.shape);
  record.dtype = safetensors_dtype(dtype);
  return record;
}

}  // namespace tessera
