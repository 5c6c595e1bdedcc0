#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

// The parts of the backend that LibTorch calls.
namespace tessera::testing::sim {

/// Makes the backend known to LibTorch, once. Not done at the start of the program: tests of other
/// things, which are linked with this backend, shall find no accelerator.
void register_backend();

/// A new library for kernels of `key`. Never destroyed: that would unregister operators before the
/// streams' threads end.
torch::Library& library(const char* ns, c10::DispatchKey key);

/// The parts of register_backend().
void register_operators(torch::Library& aten);
void register_copies(torch::Library& aten);
void register_autocast();

/// A CPU tensor over the memory of `tensor`, which kernels can read and write: over the alias of
/// device memory, or over host memory itself. Does not keep the memory alive.
at::Tensor kernel_view(const at::Tensor& tensor);

/// While it lives, the thread's operators reach plain kernels: no autograd, no autocast, and no
/// keys that the caller has included or excluded.
class PlainDispatch {
 public:
  PlainDispatch()
      : keys_(c10::default_included_set,
              c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView) {}

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  at::NoGradGuard no_grad_;
};

/// Copies values between the host and devices, or within and between devices; `to` decides sizes
/// and dtype. The host returns at once, except that copies from or to the host wait for their end
/// unless the host's memory is pinned and `non_blocking`.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

/// As resize_(): contiguous, with more memory if needed. Warns as kernels do for their `out`.
void resize_out(const at::Tensor& out, at::IntArrayRef sizes);
/// Keeps the first bytes.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

/// A device's source of random numbers: a seed, and the number of calls so far. A random operator
/// takes both when it is issued, so its values do not depend on when it runs.
class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(c10::DeviceIndex device);
  static c10::DeviceType device_type() { return c10::kPrivateUse1; }

  /// A CPU generator for one random operator.
  at::Generator next();

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  SimGenerator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

/// `device` -1: the current one.
const at::Generator& default_generator(c10::DeviceIndex device);

void forget_operators_that_waited();

}  // namespace tessera::testing::sim
