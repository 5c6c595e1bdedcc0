#include <ATen/Parallel.h>

namespace tessera {
namespace {

// Sums of several threads have no single order, and results are compared to the bit. So a test
// passes also where the environment says nothing about threads.
[[maybe_unused]] const bool is_set = (at::set_num_threads(1), true);

}  // namespace
}  // namespace tessera
