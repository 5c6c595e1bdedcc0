#pragma once

#include <ATen/core/Generator.h>

namespace tessera::testing::sim {

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

}  // namespace tessera::testing::sim
