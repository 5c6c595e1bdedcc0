#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

namespace caffe2::serialize {
class PyTorchStreamWriter;
}

namespace tessera {

/// Writes a file, or a part of one, that Python's `torch.load(weights_only=True)` reads: values of
/// numbers, texts, lists, dicts and tensors.
class TorchWriter {
 public:
  /// Calls `write` with the bytes, in their order.
  explicit TorchWriter(const std::function<void(const void* data, size_t nbytes)>& write);
  explicit TorchWriter(const std::string& path);
  ~TorchWriter();

  /// Writes a tensor, and returns a stand-in for it without data, for the value of `finish()`. That
  /// value must have the stand-ins in the order of these calls. `name` is for messages. Throws
  /// `c10::NotImplementedError` for a dtype that `torch.load` does not take.
  at::Tensor add(const std::string& name, const at::Tensor& value);
  void finish(const c10::IValue& value);

 private:
  std::unique_ptr<caffe2::serialize::PyTorchStreamWriter> writer_;
  size_t count_ = 0;
};

/// An empty dict of any values, by texts.
c10::impl::GenericDict python_dict();

}  // namespace tessera
