#include "interop/torch_writer.h"

#include <ATen/core/Dict.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include "base/dispatch/math_bits.h"
#include "checkpoint/safetensors.h"
#include "interop/pickle_machine.h"

namespace tessera {

using caffe2::serialize::PyTorchStreamWriter;

TorchWriter::TorchWriter(const std::string& path)
    : writer_(std::make_unique<PyTorchStreamWriter>(path)) {}

TorchWriter::TorchWriter(const std::function<void(const void*, size_t)>& write)
    : writer_(std::make_unique<PyTorchStreamWriter>([write](const void* data, size_t nbytes) {
        write(data, nbytes);
        return nbytes;
      })) {}

TorchWriter::~TorchWriter() = default;

at::Tensor TorchWriter::add(const std::string& name, const at::Tensor& value) {
  static char nowhere = 0;
  const at::Tensor data = with_plain_memory(value).contiguous();
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_pickled_dtype(safetensors_dtype(data.scalar_type())), "[export_checkpoint] '", name,
      "' has the dtype ", data.scalar_type(),
      ", which Python's torch.load does not take from such a file: export to a safetensors file");
  writer_->writeRecord("data/" + std::to_string(count_++), data.const_data_ptr(), data.nbytes());
  return at::from_blob(&nowhere, data.sizes(), at::dtype(data.scalar_type()));
}

// The pickle names shapes and storages in the order in which it meets the tensors, and does not
// read their data.
void TorchWriter::finish(const c10::IValue& value) {
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* bytes, size_t size) { pickle.append(bytes, size); },
                              nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();
  writer_->writeRecord("data.pkl", pickle.data(), pickle.size());
  writer_->writeRecord("byteorder", "little", 6);
  writer_->writeEndOfFile();
}

c10::impl::GenericDict python_dict() {
  return c10::impl::GenericDict(c10::StringType::get(), c10::AnyType::get());
}

}  // namespace tessera
