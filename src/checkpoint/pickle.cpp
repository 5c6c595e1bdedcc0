#include "checkpoint/pickle.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

namespace tessera {
namespace {

// [Note: Reading a pickle]
//
// A pickle is a program for a machine with a stack and a memo. Python's runs what the program
// names; this one knows a handful of names, and keeps what it does not know as something it leaves
// out.
struct Value;
using ValuePtr = std::shared_ptr<Value>;

struct Value {
  enum class Kind : uint8_t {
    kOther,
    kMark,
    kInt,
    kText,
    kGlobal,
    kItems,
    kDict,
    kStorage,
    kTensor
  };
  Kind kind = Kind::kOther;
  int64_t number = 0;
  std::string text;             // of a text; "module name" of a global
  std::vector<ValuePtr> items;  // of a tuple or list; keys and values of a dict in turns
  PickledTensor tensor;
};

ValuePtr make(Value::Kind kind) {
  auto value = std::make_shared<Value>();
  value->kind = kind;
  return value;
}

const std::map<std::string, std::string>& storage_dtypes() {
  static const std::map<std::string, std::string> kDtypes = {
      {"torch DoubleStorage", "F64"},      {"torch FloatStorage", "F32"},
      {"torch HalfStorage", "F16"},        {"torch BFloat16Storage", "BF16"},
      {"torch LongStorage", "I64"},        {"torch IntStorage", "I32"},
      {"torch ShortStorage", "I16"},       {"torch CharStorage", "I8"},
      {"torch ByteStorage", "U8"},         {"torch BoolStorage", "BOOL"},
      {"torch ComplexFloatStorage", "C64"}};
  return kDtypes;
}

class Machine {
 public:
  explicit Machine(const std::string& program) : program_(program) {}

  ValuePtr run() {
    while (true) {
      const char code = take(1)[0];
      if (code == '.') return pop();
      step(code);
    }
  }

 private:
  using Kind = Value::Kind;

  [[noreturn]] static void refuse(const std::string& what) {
    TORCH_CHECK_VALUE(false, "it holds more than a dict of tensors: ", what);
  }

  std::string_view take(size_t count) {
    TORCH_CHECK_VALUE(count <= program_.size() - next_, "it is cut off");
    next_ += count;
    return std::string_view(program_).substr(next_ - count, count);
  }
  template <class T>
  T take_number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string take_line() {
    const size_t end = program_.find('\n', next_);
    TORCH_CHECK_VALUE(end != std::string::npos, "it is cut off");
    const std::string line(take(end - next_));
    take(1);
    return line;
  }

  void push(ValuePtr value) { stack_.push_back(std::move(value)); }
  void push_int(int64_t number) {
    auto value = make(Kind::kInt);
    value->number = number;
    push(std::move(value));
  }
  void push_text(std::string_view text) {
    auto value = make(Kind::kText);
    value->text = text;
    push(std::move(value));
  }
  ValuePtr pop() {
    TORCH_CHECK_VALUE(!stack_.empty(), "its program is broken");
    ValuePtr value = std::move(stack_.back());
    stack_.pop_back();
    return value;
  }
  Value& top() {
    TORCH_CHECK_VALUE(!stack_.empty(), "its program is broken");
    return *stack_.back();
  }
  std::vector<ValuePtr> pop_to_mark() {
    std::vector<ValuePtr> items;
    for (ValuePtr value = pop(); value->kind != Kind::kMark; value = pop())
      items.insert(items.begin(), std::move(value));
    return items;
  }
  void push_items(std::vector<ValuePtr> items) {
    auto value = make(Kind::kItems);
    value->items = std::move(items);
    push(std::move(value));
  }
  void push_last(size_t count) {
    std::vector<ValuePtr> items(count);
    while (count-- > 0) items[count] = pop();
    push_items(std::move(items));
  }
  void add_items(std::vector<ValuePtr> items) {
    auto& all = top().items;
    all.insert(all.end(), items.begin(), items.end());
  }

  void step(char code) {
    // clang-format off
    switch (code) {
      case '\x80': take(1); return;  // the protocol's version
      case '\x95': take(8); return;  // the length of a frame
      case '(': push(make(Kind::kMark)); return;
      case '}': push(make(Kind::kDict)); return;
      case ')': case ']': push_items({}); return;
      case 't': case 'l': push_items(pop_to_mark()); return;
      case '\x85': push_last(1); return;
      case '\x86': push_last(2); return;
      case '\x87': push_last(3); return;
      case 'a': add_items({pop()}); return;
      case 's': add_last_two(); return;
      case 'e': case 'u': add_items(pop_to_mark()); return;
      case 'N': push(make(Kind::kOther)); return;
      case '\x88': push_int(1); return;
      case '\x89': push_int(0); return;
      case 'K': push_int(take_number<uint8_t>()); return;
      case 'M': push_int(take_number<uint16_t>()); return;
      case 'J': push_int(take_number<int32_t>()); return;
      case '\x8a': push_long(); return;
      case 'G': take(8); push(make(Kind::kOther)); return;
      case 'X': push_text(take(take_number<uint32_t>())); return;
      case '\x8c': push_text(take(take_number<uint8_t>())); return;
      case 'c': push_global(); return;
      case '\x93': push_stack_global(); return;
      case 'q': remember(take_number<uint8_t>()); return;
      case 'r': remember(take_number<uint32_t>()); return;
      case '\x94': remember(memo_.size()); return;
      case 'h': push(recall(take_number<uint8_t>())); return;
      case 'j': push(recall(take_number<uint32_t>())); return;
      case 'Q': push(storage(*pop())); return;
      case 'R': push_result(); return;
      case '\x81': pop(); pop(); push(make(Kind::kOther)); return;
      case 'b': case '0': pop(); return;  // 'b': attributes, such as a state dict's _metadata
      default: refuse("operation " + std::to_string(static_cast<unsigned char>(code)));
    }
    // clang-format on
  }

  void add_last_two() {
    const ValuePtr value = pop(), key = pop();
    add_items({key, value});
  }
  void push_stack_global() {
    const ValuePtr name = pop(), module = pop();
    push_global(module->text, name->text);
  }
  void push_result() {
    const ValuePtr arguments = pop(), function = pop();
    push(call(*function, arguments));
  }
  void push_long() {
    const std::string_view bytes = take(take_number<uint8_t>());
    if (bytes.size() > 8) refuse("a number of more than 64 bits");
    int64_t value = !bytes.empty() && (bytes.back() & 0x80) ? -1 : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    push_int(value);
  }
  void push_global() {
    const std::string module = take_line();
    push_global(module, take_line());
  }
  void push_global(const std::string& module, const std::string& name) {
    auto value = make(Kind::kGlobal);
    value->text = module + " " + name;
    push(std::move(value));
  }
  void remember(size_t place) {
    top();
    memo_[place] = stack_.back();
  }
  ValuePtr recall(size_t place) const {
    const auto it = memo_.find(place);
    TORCH_CHECK_VALUE(it != memo_.end(), "its program is broken");
    return it->second;
  }

  // ("storage", class, key, device, numel)
  static ValuePtr storage(const Value& id) {
    const auto& items = id.items;
    if (items.size() < 3 || items[0]->text != "storage") refuse("a reference that is no storage");
    const auto dtype = storage_dtypes().find(items[1]->text);
    if (dtype == storage_dtypes().end()) refuse("a storage of class " + items[1]->text);
    auto value = make(Kind::kStorage);
    value->tensor.storage = items[2]->text;
    value->tensor.dtype = dtype->second;
    return value;
  }

  static std::vector<int64_t> numbers(const Value& items) {
    std::vector<int64_t> result;
    for (const ValuePtr& item : items.items) result.push_back(item->number);
    return result;
  }

  // (storage, offset, shape, strides, requires_grad, hooks[, metadata])
  static ValuePtr tensor(const std::vector<ValuePtr>& given) {
    if (given[0]->kind != Kind::kStorage) refuse("a tensor without a storage");
    if (given.size() > 6 && !given[6]->items.empty()) refuse("a conjugated or negated view");
    auto value = std::make_shared<Value>(*given[0]);
    value->kind = Kind::kTensor;
    value->tensor.offset = given[1]->number;
    value->tensor.shape = numbers(*given[2]);
    value->tensor.strides = numbers(*given[3]);
    return value;
  }

  static ValuePtr call(const Value& function, const ValuePtr& arguments) {
    const auto& given = arguments->items;
    if (function.text == "collections OrderedDict") return make(Kind::kDict);
    if (function.text == "torch._utils _rebuild_tensor_v2" && given.size() >= 4)
      return tensor(given);
    if (function.text == "torch._utils _rebuild_parameter" && !given.empty()) return given[0];
    if (function.text.find("_rebuild") != std::string::npos)
      refuse("a tensor that needs '" + function.text + "'");
    return make(Kind::kOther);  // what it makes is left out
  }

  const std::string& program_;
  size_t next_ = 0;
  std::vector<ValuePtr> stack_;
  std::map<size_t, ValuePtr> memo_;
};

void collect(const Value& dict, const std::string& prefix, int depth,
             std::vector<std::pair<std::string, PickledTensor>>& tensors) {
  TORCH_CHECK_VALUE(depth < 100, "its dicts hold each other");
  for (size_t i = 0; i + 1 < dict.items.size(); i += 2) {
    const Value& key = *dict.items[i];
    const std::string name =
        prefix + (key.kind == Value::Kind::kInt ? std::to_string(key.number) : key.text);
    const Value& value = *dict.items[i + 1];
    if (value.kind == Value::Kind::kTensor) tensors.emplace_back(name, value.tensor);
    if (value.kind == Value::Kind::kDict) collect(value, name + ".", depth + 1, tensors);
  }
}

}  // namespace

bool is_pickled_dtype(const std::string& dtype) {
  const auto& dtypes = storage_dtypes();
  return std::any_of(dtypes.begin(), dtypes.end(),
                     [&](const auto& item) { return item.second == dtype; });
}

std::vector<std::pair<std::string, PickledTensor>> unpickle_tensors(const std::string& bytes) {
  const ValuePtr value = Machine(bytes).run();
  TORCH_CHECK_VALUE(value->kind == Value::Kind::kDict, "it must hold a dict of tensors");
  std::vector<std::pair<std::string, PickledTensor>> tensors;
  collect(*value, "", 0, tensors);
  return tensors;
}

}  // namespace tessera
