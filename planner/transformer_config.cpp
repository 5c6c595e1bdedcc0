#include <c10/util/Exception.h>
#include <tessera/planner/transformer_config.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "base/files/file.h"
#include "base/files/json_text.h"
#include "base/files/untrusted.h"
#include "planner/described_files.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kFunction = "read_transformer_config";
constexpr int64_t kMostConfigBytes = int64_t{16} << 20;
constexpr int64_t kMostModelIndexBytes = int64_t{256} << 20;
// More than any model has, and few enough to compute with.
constexpr int64_t kMostLayers = 10'000, kMostInConfig = int64_t{1} << 24;

bool is_there(const json& config, const char* name) {
  return config.contains(name) && !config[name].is_null();
}

// Returns a number of the config; without a default, it must be there.
int64_t number(const json& config, const char* name, std::optional<int64_t> otherwise = {},
               int64_t most = kMostInConfig) {
  if (otherwise && !is_there(config, name)) return *otherwise;
  TORCH_CHECK_VALUE(is_there(config, name), "it must have '", name, "'");
  return whole_number(config[name], name, 1, most);
}

bool flag(const json& config, const char* name, bool otherwise) {
  if (!is_there(config, name)) return otherwise;
  TORCH_CHECK_VALUE(config[name].is_boolean(), "'", name, "' must be true or false; got ",
                    shortened(config[name].dump()));
  return config[name].get<bool>();
}

double share(const json& config, const char* name, double otherwise) {
  if (!is_there(config, name)) return otherwise;
  TORCH_CHECK_VALUE(config[name].is_number() && config[name] >= 0 && config[name] < 1, "'", name,
                    "' must be from 0 to 1; got ", shortened(config[name].dump()));
  return config[name].get<double>();
}

// Newer files call it `dtype`.
at::ScalarType dtype_in(const json& config) {
  for (const char* name : {"dtype", "torch_dtype"}) {
    if (!is_there(config, name)) continue;
    const at::ScalarType dtype = parse_dtype(config[name].get<std::string>());
    TORCH_CHECK_VALUE(c10::isFloatingType(dtype), "'", name, "' must be a floating dtype; got ",
                      shortened(config[name].dump()));
    return dtype;
  }
  return at::kFloat;
}

TransformerConfig gpt2_config(const json& config) {
  TORCH_CHECK_NOT_IMPLEMENTED(!flag(config, "add_cross_attention", false),
                              "'add_cross_attention' is not supported");
  TransformerConfig result{.type = "gpt2"};
  result.layers = number(config, "n_layer", {}, kMostLayers);
  result.width = number(config, "n_embd");
  result.hidden = number(config, "n_inner", 4 * result.width);
  result.heads = result.kv_heads = number(config, "n_head");
  result.vocabulary = number(config, "vocab_size");
  result.positions = number(config, "n_positions", 1024);
  result.tied_head = flag(config, "tie_word_embeddings", true);
  result.qkv_bias = result.output_bias = result.mlp_bias = true;
  result.dropout = std::max(share(config, "resid_pdrop", 0.1), share(config, "embd_pdrop", 0.1));
  result.attention_dropout = share(config, "attn_pdrop", 0.1);
  TORCH_CHECK_VALUE(result.width % result.heads == 0,
                    "'n_embd' must be a multiple of 'n_head'; got ", result.width, " and ",
                    result.heads);
  result.head_dim = result.width / result.heads;
  return result;
}

TransformerConfig llama_config(const json& config, const std::string& type) {
  TransformerConfig result{.type = type};
  const bool is_qwen3 = type == "qwen3";
  result.layers = number(config, "num_hidden_layers", {}, kMostLayers);
  result.width = number(config, "hidden_size");
  result.hidden = number(config, "intermediate_size");
  result.heads = number(config, "num_attention_heads");
  // Only the oldest files lack it, and those are Llamas'.
  result.kv_heads = number(config, "num_key_value_heads",
                           type == "llama" ? std::optional(result.heads) : std::nullopt);
  if (!is_there(config, "head_dim") && !is_qwen3)
    TORCH_CHECK_VALUE(
        result.width % result.heads == 0,
        "'hidden_size' must be a multiple of 'num_attention_heads' if there is no 'head_dim'; got ",
        result.width, " and ", result.heads);
  result.head_dim =
      number(config, "head_dim",
             is_qwen3 ? int64_t{128} : std::max<int64_t>(1, result.width / result.heads));
  TORCH_CHECK_VALUE(result.heads % result.kv_heads == 0,
                    "'num_attention_heads' must be a multiple of 'num_key_value_heads'; got ",
                    result.heads, " and ", result.kv_heads);
  result.vocabulary = number(config, "vocab_size");
  result.positions = number(config, "max_position_embeddings", 2048);
  result.tied_head = flag(config, "tie_word_embeddings", false);
  const bool attention_bias = type != "mistral" && flag(config, "attention_bias", false);
  result.qkv_bias = type == "qwen2" || attention_bias;
  result.output_bias = type != "qwen2" && attention_bias;
  result.mlp_bias = type == "llama" && flag(config, "mlp_bias", false);
  result.head_norms = is_qwen3;
  result.attention_dropout = share(config, "attention_dropout", 0);
  return result;
}

TransformerConfig config_of(const json& config) {
  TORCH_CHECK_VALUE(config.is_object() && is_there(config, "model_type"),
                    "it must be an object with a 'model_type'");
  const auto type = config["model_type"].get<std::string>();
  const std::set<std::string> known = {"gpt2", "llama", "mistral", "qwen2", "qwen3"};
  TORCH_CHECK_NOT_IMPLEMENTED(
      known.contains(type), "'model_type' must be gpt2, llama, mistral, qwen2 or qwen3; got '",
      shortened(type), "'. Give the sizes of its parameters as a list, and --activations");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !is_there(config, "quantization_config"),
      "'quantization_config' is not supported: the parameters of such a model are not trained");
  TransformerConfig result = type == "gpt2" ? gpt2_config(config) : llama_config(config, type);
  result.dtype = dtype_in(config);
  return result;
}

// Calls `f`, which reads a file, and makes its errors name that file; they keep their type.
template <class F>
auto naming_config(const fs::path& path, F&& f) {
  try {
    return f();
  } catch (const c10::NotImplementedError& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "[", kFunction, "] '", path.string(),
                                "': ", error.what_without_backtrace());
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "[", kFunction, "] '", path.string(),
                      "' must be a config.json: ", shortened(error.what(), kMostShown));
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "[", kFunction, "] '", path.string(),
                      "': ", shortened(error.what_without_backtrace(), kMostShown));
  }
}

// Tensors that a model keeps beside its parameters, and that older files hold.
bool is_buffer(const std::string& name) {
  return name.ends_with(".rotary_emb.inv_freq") || name.ends_with(".attn.bias") ||
         name.ends_with(".attn.masked_bias");
}

// The files of a GPT-2 may leave out the name of the part that holds its blocks.
std::string without_prefix(const std::string& name) {
  const std::string prefix = "transformer.";
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

struct IndexNames {
  std::set<std::string> names;  // of parameters, without prefixes
  bool has_others = false;      // buffers, or tied parameters a second time
  std::optional<int64_t> nbytes;
};

IndexNames read_index_names(const fs::path& path, const std::set<std::string>& tied) {
  const auto index = parse_json(File::open_file(path).read_all(kMostModelIndexBytes));
  IndexNames result;
  TORCH_CHECK_VALUE(index.contains("weight_map") && index["weight_map"].is_object(),
                    "it must have a 'weight_map' of names and files");
  for (const auto& item : index["weight_map"].items()) {
    const std::string name = without_prefix(item.key());
    const bool is_other = is_buffer(item.key()) || tied.contains(name);
    result.has_others = result.has_others || is_other;
    if (!is_other) result.names.insert(name);
  }
  if (index.contains("metadata") && is_there(index["metadata"], "total_size"))
    result.nbytes = whole_number(index["metadata"]["total_size"], "total_size");
  return result;
}

void check_same_names(const std::set<std::string>& described, const std::set<std::string>& found) {
  std::vector<std::string> missing, unknown;
  std::ranges::set_difference(described, found, std::back_inserter(missing));
  std::ranges::set_difference(found, described, std::back_inserter(unknown));
  TORCH_CHECK_VALUE(missing.empty(),
                    "it must name the parameters that config.json describes; it lacks ",
                    shortened(missing));
  TORCH_CHECK_VALUE(
      unknown.empty(),
      "it must name the parameters that config.json describes, and no others; it has ",
      shortened(unknown));
}

void check_index(const fs::path& path, const TransformerConfig& config) {
  std::set<std::string> names, tied;
  int64_t nbytes = 0;
  for (const ParameterSize& parameter : parameter_sizes(config)) {
    names.insert(without_prefix(parameter.names.front()));
    for (size_t i = 1; i < parameter.names.size(); ++i)
      tied.insert(without_prefix(parameter.names[i]));
    const auto item = static_cast<int64_t>(c10::elementSize(parameter.dtype));
    nbytes = checked_sum(nbytes, CheckedShape(parameter.shape, item).nbytes());
  }
  naming_config(path, [&] {
    const IndexNames index = read_index_names(path, tied);
    check_same_names(names, index.names);
    TORCH_CHECK_VALUE(
        !index.nbytes || index.has_others || *index.nbytes == nbytes,
        "'total_size' must be the bytes of the parameters that config.json describes, ", nbytes,
        " in ", c10::toString(config.dtype), "; got ", index.nbytes.value_or(0));
  });
}

}  // namespace

TransformerConfig read_transformer_config(const std::string& path) {
  const bool is_config = !fs::is_directory(path) && !is_model_index(path);
  const fs::path directory = fs::is_directory(path) ? fs::path(path) : fs::path(path).parent_path();
  const fs::path file = is_config ? fs::path(path) : directory / kConfigFile;
  TORCH_CHECK_VALUE(fs::exists(path), "[", kFunction, "] there is no file or directory '", path,
                    "'");
  TORCH_CHECK_VALUE(fs::exists(file), "[", kFunction, "] '", file.string(),
                    "' must exist: an index has the names of parameters, and no shapes");
  const TransformerConfig config = naming_config(file, [&] {
    return config_of(parse_json(File::open_file(file).read_all(kMostConfigBytes)));
  });
  const fs::path index = is_model_index(path) ? fs::path(path) : directory / kUsualIndex;
  // A config.json of another name, or of several in a directory, need not be the index's.
  if (file.filename() == kConfigFile && fs::exists(index)) check_index(index, config);
  return config;
}

}  // namespace tessera
