#include "interop/pickle_machine.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <deque>
#include <unordered_map>
#include <utility>

#include "base/files/untrusted.h"

namespace tessera {
namespace {

// [Note: Reading a pickle]
//
// A pickle is a program for a machine with a stack and a memo. Python's machine runs the functions
// that the program names; this one knows a handful of names, and represents other values by a
// placeholder that is left out of the result.
//
// A program of a few bytes can make values that hold each other, or hold the same value 2^60 times,
// or are a million levels deep. So values are owned by one list and refer to each other by plain
// pointers, nothing here recurses into them, and their number is limited: a program takes memory
// and time in proportion to its length. `DictWalk` (pickle.cpp) visits the dicts afterwards, and
// limits how often it visits each one.

constexpr size_t kMostProgramBytes = size_t{64} << 20;
// 400,000 tensors, each with its storage, need as many. They take less than 1 GiB of memory.
constexpr size_t kMostValues = size_t{6} << 20, kMostRemembered = size_t{3} << 20,
                 kMostTensors = size_t{1} << 20;
constexpr size_t kMostKeyBytes = 256;  // of a storage's key, a number

// The storage classes of the module `torch`, and their dtypes as in safetensors.
constexpr std::array<std::pair<std::string_view, std::string_view>, 11> kStorages = {{
    {"DoubleStorage", "F64"},
    {"FloatStorage", "F32"},
    {"HalfStorage", "F16"},
    {"BFloat16Storage", "BF16"},
    {"LongStorage", "I64"},
    {"IntStorage", "I32"},
    {"ShortStorage", "I16"},
    {"CharStorage", "I8"},
    {"ByteStorage", "U8"},
    {"BoolStorage", "BOOL"},
    {"ComplexFloatStorage", "C64"},
}};

// Returns the dtype of a storage class; empty if unknown.
std::string_view storage_dtype(std::string_view storage_class) {
  const auto* const it = std::find_if(kStorages.begin(), kStorages.end(), [&](const auto& storage) {
    return storage.first == storage_class;
  });
  return it == kStorages.end() ? std::string_view() : it->second;
}

}  // namespace

// The values of one pickle. They may refer to each other in any way, in cycles and many levels
// deep, and are freed all at once. Their texts are parts of the program; it must outlive them.
class PickleValues {
 public:
  // All marks share one value, and so do all values that are left out.
  PickleValue* make(PickleValue::Kind kind, int64_t number = 0, std::string_view text = {},
                    std::string_view module = {}) {
    if (kind == PickleValue::Kind::kMark) return &mark_;
    if (kind == PickleValue::Kind::kOther) return &other_;
    TORCH_CHECK_VALUE(values_.size() < kMostValues, "it has more than ", kMostValues, " values");
    return &values_.emplace_back(
        PickleValue{.kind = kind, .number = number, .text = text, .module = module});
  }
  PickleValue* empty_tuple() { return &empty_tuple_; }
  // `kind`: a storage, or a tensor.
  PickleValue* make_tensor(PickleValue::Kind kind, PickledTensor tensor) {
    TORCH_CHECK_VALUE(tensors_.size() < kMostTensors, "it has more than ", kMostTensors,
                      " tensors and storages");
    PickleValue* const value = make(kind, std::ssize(tensors_));
    tensors_.push_back(std::move(tensor));
    return value;
  }
  const PickledTensor& tensor(const PickleValue& value) const { return tensors_[value.number]; }

 private:
  PickleValue mark_{.kind = PickleValue::Kind::kMark}, other_,
      empty_tuple_{.kind = PickleValue::Kind::kTuple};
  std::deque<PickleValue> values_;
  std::deque<PickledTensor> tensors_;
};

namespace {

class PickleMachine {
 public:
  using Kind = PickleValue::Kind;

  PickleMachine(std::string_view program, PickleValues& values)
      : program_(program), values_(values) {}

  const PickleValue* run() {
    while (true) {
      const char code = program_.take(1)[0];
      if (code == '.') return pop();
      step(code);
    }
  }

 private:
  [[noreturn]] static void refuse(const std::string& what) {
    TORCH_CHECK_VALUE(false, "it holds more than a dict of tensors: ", what);
  }
  static void require(bool condition) { TORCH_CHECK_VALUE(condition, "its program is broken"); }

  void push(PickleValue* value) { stack_.push_back(value); }
  PickleValue* pop() {
    require(!stack_.empty());
    PickleValue* const value = stack_.back();
    stack_.pop_back();
    return value;
  }
  PickleValue* pop(Kind kind) {
    PickleValue* const value = pop();
    require(value->is(kind));
    return value;
  }
  PickleValue& top() {
    require(!stack_.empty());
    return *stack_.back();
  }

  // Returns the values pushed since the last mark, and pops them and the mark.
  std::vector<PickleValue*> pop_to_mark() {
    const auto mark = std::find_if(stack_.rbegin(), stack_.rend(),
                                   [](const PickleValue* value) { return value->is(Kind::kMark); });
    require(mark != stack_.rend());
    std::vector<PickleValue*> items(mark.base(), stack_.end());
    stack_.erase(mark.base() - 1, stack_.end());
    return items;
  }
  std::vector<PickleValue*> pop_last(size_t count) {
    require(count <= stack_.size());
    std::vector<PickleValue*> items(stack_.end() - static_cast<std::ptrdiff_t>(count),
                                    stack_.end());
    stack_.resize(stack_.size() - count);
    return items;
  }
  void push_items(Kind kind, std::vector<PickleValue*> items) {
    PickleValue* const value = values_.make(kind);
    value->items = std::move(items);
    push(value);
  }
  void add_items(const std::vector<PickleValue*>& items, Kind kind) {
    PickleValue& value = top();
    if (value.is(Kind::kOther)) return;  // left out with its items
    require(value.is(kind) && (kind == Kind::kList || items.size() % 2 == 0));
    value.items.insert(value.items.end(), items.begin(), items.end());
  }

  void step(char code) {
    // clang-format off
    switch (code) {
      case '\x80': program_.take(1); return;  // the protocol's version
      case '\x95': program_.take(8); return;  // the length of a frame
      case '(': push(values_.make(Kind::kMark)); return;
      case '}': push(values_.make(Kind::kDict)); return;
      case ']': push(values_.make(Kind::kList)); return;
      case ')': push(values_.empty_tuple()); return;
      case 't': push_items(Kind::kTuple, pop_to_mark()); return;
      case 'l': push_items(Kind::kList, pop_to_mark()); return;
      case '\x85': case '\x86': case '\x87': push_items(Kind::kTuple, pop_last(code - '\x84')); return;
      case 'a': add_items(pop_last(1), Kind::kList); return;
      case 's': add_items(pop_last(2), Kind::kDict); return;
      case 'e': add_items(pop_to_mark(), Kind::kList); return;
      case 'u': add_items(pop_to_mark(), Kind::kDict); return;
      case 'N': push(values_.make(Kind::kOther)); return;
      case '\x88': case '\x89': push(values_.make(Kind::kInt, code == '\x88' ? 1 : 0)); return;
      case 'K': push(values_.make(Kind::kInt, program_.number<uint8_t>())); return;
      case 'M': push(values_.make(Kind::kInt, program_.number<uint16_t>())); return;
      case 'J': push(values_.make(Kind::kInt, program_.number<int32_t>())); return;
      case '\x8a': push_long(); return;
      case 'G': program_.take(8); push(values_.make(Kind::kOther)); return;  // a real
      case 'X': push(values_.make(Kind::kText, 0, program_.take(program_.number<uint32_t>()))); return;
      case '\x8c': push(values_.make(Kind::kText, 0, program_.take(program_.number<uint8_t>()))); return;
      case 'c': push_named_global(); return;
      case '\x93': push_stack_global(); return;
      case 'q': remember(program_.number<uint8_t>()); return;
      case 'r': remember(program_.number<uint32_t>()); return;
      case '\x94': remember(memo_.size()); return;
      case 'h': push(recall(program_.number<uint8_t>())); return;
      case 'j': push(recall(program_.number<uint32_t>())); return;
      case 'Q': push_storage(*pop(Kind::kTuple)); return;
      case 'R': push_result(); return;
      case '\x81': push_object(); return;
      case 'b': pop(); return;  // attributes, such as a state dict's _metadata, are left out
      case '0': pop(); return;
      default: refuse("operation " + std::to_string(static_cast<unsigned char>(code)));
    }
    // clang-format on
  }

  void push_long() {
    const std::string_view bytes = program_.take(program_.number<uint8_t>());
    if (bytes.size() > 8) refuse("a number of more than 64 bits");
    int64_t value = !bytes.empty() && (bytes.back() & 0x80) ? -1 : 0;
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(&value));
    push(values_.make(Kind::kInt, value));
  }

  void push_object() {
    pop();  // the arguments of __new__
    pop();  // the class
    push(values_.make(Kind::kOther));
  }

  void push_named_global() {
    const std::string_view module = program_.line();
    push_global(module, program_.line());
  }
  void push_stack_global() {
    const std::string_view name = pop(Kind::kText)->text;
    push_global(pop(Kind::kText)->text, name);
  }
  void push_global(std::string_view module, std::string_view name) {
    push(values_.make(Kind::kGlobal, 0, name, module));
  }

  void remember(size_t place) {
    PickleValue& value = top();
    memo_[place] = &value;
    TORCH_CHECK_VALUE(memo_.size() <= kMostRemembered, "its program must store at most ",
                      kMostRemembered, " values in its memo");
  }
  PickleValue* recall(size_t place) const {
    const auto it = memo_.find(place);
    require(it != memo_.end());
    return it->second;
  }

  // ("storage", class, key, device, numel)
  void push_storage(const PickleValue& id) {
    const auto& items = id.items;
    if (items.size() < 3 || items[0]->text != "storage" || !items[2]->is(Kind::kText) ||
        items[2]->text.size() > kMostKeyBytes)
      refuse("a reference that is no storage");
    const std::string_view dtype =
        items[1]->module == "torch" ? storage_dtype(items[1]->text) : std::string_view();
    if (dtype.empty()) refuse("a storage of class " + global_text(*items[1]));
    PickledTensor tensor{.storage = std::string(items[2]->text), .dtype = std::string(dtype)};
    push(values_.make_tensor(Kind::kStorage, std::move(tensor)));
  }

  static std::string global_text(const PickleValue& value) {
    return shortened(value.module) + " " + shortened(value.text);
  }

  static int64_t number(const PickleValue& value) {
    require(value.is(Kind::kInt));
    return value.number;
  }
  static std::vector<int64_t> numbers(const PickleValue& items) {
    require((items.is(Kind::kTuple) || items.is(Kind::kList)) &&
            items.items.size() <= CheckedShape::kMostDims);
    std::vector<int64_t> result;
    for (const PickleValue* item : items.items) result.push_back(number(*item));
    return result;
  }

  // (storage, offset, shape, strides, requires_grad, hooks[, metadata])
  PickleValue* make_tensor(const std::vector<PickleValue*>& given) {
    if (!given[0]->is(Kind::kStorage)) refuse("a tensor without a storage");
    if (given.size() > 6 && !given[6]->items.empty()) refuse("a conjugated or negated view");
    PickledTensor tensor = values_.tensor(*given[0]);
    tensor.offset = number(*given[1]);
    tensor.shape = numbers(*given[2]);
    tensor.strides = numbers(*given[3]);
    return values_.make_tensor(Kind::kTensor, std::move(tensor));
  }

  void push_result() {
    const auto& given = pop(Kind::kTuple)->items;
    const PickleValue& function = *pop();
    if (function.is_global("collections", "OrderedDict")) {
      push(values_.make(Kind::kDict));
    } else if (function.is_global("torch._utils", "_rebuild_tensor_v2") && given.size() >= 4) {
      push(make_tensor(given));
    } else if (function.is_global("torch._utils", "_rebuild_parameter") && !given.empty()) {
      push(given[0]);
    } else {
      if (function.text.find("_rebuild") != std::string_view::npos)
        refuse("a tensor that needs '" + global_text(function) + "'");
      push(values_.make(Kind::kOther));  // the result is left out
    }
  }

  ByteReader program_;
  PickleValues& values_;
  std::vector<PickleValue*> stack_;
  std::unordered_map<size_t, PickleValue*> memo_;
};

}  // namespace

Pickle::Pickle(std::string program) : program_(std::move(program)) {
  TORCH_CHECK_VALUE(program_.size() <= kMostProgramBytes, "its program must have ",
                    kMostProgramBytes, " bytes at most; it has ", program_.size());
  values_ = std::make_unique<PickleValues>();
  root_ = PickleMachine(program_, *values_).run();
}

Pickle::~Pickle() = default;

const PickledTensor& Pickle::tensor(const PickleValue& value) const {
  return values_->tensor(value);
}

}  // namespace tessera
