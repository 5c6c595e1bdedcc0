#include "checkpoint/model_view.h"

#include <c10/util/strides.h>

#include "checkpoint/safetensors.h"

namespace tessera {

TensorRecord record_of(const ParamView& param) {
  TensorRecord record{
      .kind = "param", .names = param.names, .shape = param.sizes, .strides = param.strides};
  record.dtype = safetensors_dtype(param.master_dtype);
  return record;
}

TensorRecord record_of(const NamedTensor& buffer) {
  TensorRecord record{
      .kind = "buffer", .names = {buffer.name}, .shape = buffer.tensor.sizes().vec()};
  const auto strides = c10::contiguous_strides(record.shape);
  record.strides.assign(strides.begin(), strides.end());
  record.dtype = safetensors_dtype(buffer.tensor.scalar_type());
  return record;
}

}  // namespace tessera
