#include "init/random_source.h"

#include <tessera/base/generator.h>

#include <utility>

#include "base/dispatch/unit_key.h"
#include "comm/start/rank_generator.h"

namespace tessera {
namespace {

thread_local RandomSource* current_source = nullptr;

c10::DispatchKeySet excluded_now() { return c10::impl::tls_local_dispatch_key_set().excluded_; }

}  // namespace

RandomSource::RandomSource(c10::DispatchKeySet excluded)
    : outer_(std::exchange(current_source, this)),
      seen_(c10::impl::tls_local_dispatch_key_set().included_.add(kUnitKey),
            excluded.remove(kUnitKey)) {}

RandomSource::RandomSource() : RandomSource(excluded_now()) {}

// Values must not depend on whether the calling thread runs under autocast.
RandomSource::RandomSource(const at::Generator& start)
    : RandomSource(excluded_now() | c10::autocast_dispatch_keyset) {
  if (start.defined()) replay_ = copy_of(start);
}

RandomSource::~RandomSource() { current_source = outer_; }

RandomSource* RandomSource::current() { return current_source; }

void RandomSource::serve(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  const size_t count = schema.arguments().size();
  for (size_t i = 0; i < count; ++i) {
    if (!is_generator(schema.arguments()[i])) continue;
    c10::IValue& generator = stack[stack.size() - count + i];
    if (replay_.defined()) {
      generator = replay_;
    } else if (!before_draws_.defined()) {
      before_draws_ =
          copy_of(generator.isGenerator() ? generator.toGenerator() : default_generator());
    }
  }
}

}  // namespace tessera
