// TensorRT's plugins for deployments without Python: what plugins/trt_v3.py does, in C++, from the same definitions.
//
// plugins/trt_cpp.py writes descriptions.inc: the plugins (DEFINITIONS), and kernels to build plans with (KERNELS).
// Running a plan needs none of the latter: the plan holds its kernels. The CUDA driver is loaded when one is started.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace nvinfer1;

struct Attribute {
  char const* name;
  bool is_float;
};

// `alias`: the input that is updated, or -1. `shape_of`, `dtype_of`: the input whose shape or type it has, or -1 for
// `shape` and `dtype`. Dimensions are formulas, operators after operands, of "i0.1" (dimension 1 of input 0),
// "a.<attribute>" and integers.
struct Output {
  int alias;
  int shape_of;
  int dtype_of;
  DataType dtype;
  std::vector<char const*> shape;
};

struct Definition {
  char const* name;
  int num_inputs;
  std::vector<Attribute> attributes;
  std::vector<Output> outputs;
  std::vector<std::vector<DataType>> types;
};

#include "descriptions.inc"

constexpr char const* NAMESPACE = "kvforge";
constexpr char const* VERSION = "1";
constexpr char const* KERNELS_FIELD = "kernels";
constexpr char const* MAGIC = "kvforge kernels";

std::vector<std::string> split(std::string const& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// Evaluates a formula: `leaf` makes a value of a name or number, `combine` of an operator and two values.
template <typename Value, typename Leaf, typename Combine>
Value evaluate(std::string const& formula, Leaf leaf, Combine combine) {
  std::vector<Value> stack;
  for (auto const& token : split(formula, ' ')) {
    if (token == "+" || token == "-" || token == "*" || token == "//") {
      if (stack.size() < 2) throw std::runtime_error("a formula ends too early");
      Value right = stack.back();
      stack.pop_back();
      stack.back() = combine(token, stack.back(), right);
    } else {
      stack.push_back(leaf(token));
    }
  }
  if (stack.size() != 1) throw std::runtime_error("a formula has no one result");
  return stack.back();
}

int64_t compute(std::string const& name, int64_t left, int64_t right) {
  return name == "+" ? left + right : name == "-" ? left - right : name == "*" ? left * right : left / right;
}

// A kernel of a plan: see `pack` in plugins/trt_launch.py.
struct Launch {
  int capability, num_threads, shared_bytes;
  std::string entry, ptx;
  std::vector<std::pair<int, int>> sizes;
  std::string grid[3];
};

std::vector<Launch> unpack(std::string const& data) {
  auto end = data.find('\n');
  if (end == std::string::npos || data.compare(0, std::strlen(MAGIC), MAGIC) != 0)
    throw std::runtime_error("the plan's kernels are damaged");
  int count = std::stoi(data.substr(std::strlen(MAGIC), end));
  std::vector<Launch> found;
  for (size_t start = end + 1; count-- > 0;) {
    end = data.find('\n', start);
    if (end == std::string::npos) throw std::runtime_error("the plan's kernels are cut off");
    auto parts = split(data.substr(start, end - start), '|');
    if (parts.size() != 6) throw std::runtime_error("the plan's kernels are of another release");
    Launch launch;
    size_t length = 0;
    std::istringstream(parts[0]) >> launch.capability >> launch.num_threads >> launch.shared_bytes >> length;
    launch.entry = parts[1];
    std::istringstream places(parts[2]);
    for (int index, dim; places >> index >> dim;) launch.sizes.emplace_back(index, dim);
    for (int axis = 0; axis < 3; ++axis) launch.grid[axis] = parts[3 + axis];
    launch.ptx = data.substr(end + 1, length);
    start = end + 1 + length;
    found.push_back(std::move(launch));
  }
  return found;
}

// The few functions of libcuda that start a kernel.
class Driver {
 public:
  static Driver& get() {
    static Driver driver;
    return driver;
  }

  // Major * 10 + minor of the current context's GPU.
  int capability() const {
    int device = 0, major = 0, minor = 0;
    check(context_device_(&device), "cuCtxGetDevice");
    check(attribute_(&major, 75, device), "cuDeviceGetAttribute");
    check(attribute_(&minor, 76, device), "cuDeviceGetAttribute");
    return 10 * major + minor;
  }

  void* load(Launch const& launch) const {
    void *module = nullptr, *function = nullptr;
    check(load_(&module, launch.ptx.c_str()), "cuModuleLoadData");
    check(function_(&function, module, launch.entry.c_str()), "cuModuleGetFunction");
    if (launch.shared_bytes > 48 * 1024) check(set_(function, 8, launch.shared_bytes), "cuFuncSetAttribute");
    return function;
  }

  void start(void* function, int64_t const (&grid)[3], Launch const& launch, void** arguments, void* stream) const {
    check(launch_(function, grid[0], grid[1], grid[2], launch.num_threads, 1, 1, launch.shared_bytes, stream, arguments,
                  nullptr),
          "cuLaunchKernel");
  }

 private:
  Driver() {
    library_ = dlopen("libcuda.so.1", RTLD_NOW);
    if (library_ == nullptr) throw std::runtime_error("there is no NVIDIA driver (libcuda.so.1)");
    find(context_device_, "cuCtxGetDevice");
    find(attribute_, "cuDeviceGetAttribute");
    find(load_, "cuModuleLoadData");
    find(function_, "cuModuleGetFunction");
    find(set_, "cuFuncSetAttribute");
    find(launch_, "cuLaunchKernel");
  }

  template <typename Function>
  void find(Function& function, char const* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (function == nullptr) throw std::runtime_error(std::string("the NVIDIA driver lacks ") + name);
  }

  static void check(int code, char const* what) {
    if (code != 0) throw std::runtime_error(std::string(what) + " failed with " + std::to_string(code));
  }

  void* library_;
  int (*context_device_)(int*);
  int (*attribute_)(int*, int, int);
  int (*load_)(void**, void const*);
  int (*function_)(void**, void*, char const*);
  int (*set_)(void*, int, int);
  int (*launch_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
};

// The kernel that a GPU runs best: see `choose` in plugins/trt_launch.py.
Launch const& choose(std::vector<Launch> const& found, int capability) {
  Launch const* best = nullptr;
  for (auto const& launch : found) {
    if (launch.capability == capability) return launch;
    bool is_forward = launch.capability == 80 || launch.capability == 89;
    if (is_forward && launch.capability <= capability && (!best || launch.capability > best->capability))
      best = &launch;
  }
  if (best == nullptr) throw std::runtime_error("the plan has no kernel for this GPU; build the engine for it");
  return *best;
}

// Loaded once for all layers of the same kernel in the same context.
void* loaded(Launch const& launch, int capability) {
  static std::mutex mutex;
  static std::map<std::pair<int, std::string>, void*> functions;
  std::lock_guard<std::mutex> lock(mutex);
  auto [place, is_new] = functions.try_emplace({capability, launch.ptx}, nullptr);
  if (is_new) place->second = Driver::get().load(launch);
  return place->second;
}

// Whether kernels of this key are those of a plugin: a size of -1 in theirs is any, as they do not depend on it.
bool matches(std::string const& theirs, std::string const& key) {
  auto their_parts = split(theirs, '|'), parts = split(key, '|');
  if (their_parts.size() != parts.size()) return false;
  for (size_t part = 0; part < parts.size(); ++part) {
    auto their_sizes = split(their_parts[part], ','), sizes = split(parts[part], ',');
    if (their_sizes.size() != sizes.size()) return false;
    for (size_t index = 0; index < sizes.size(); ++index)
      if (their_sizes[index] != "-1" && their_sizes[index] != sizes[index]) return false;
  }
  return true;
}

template <typename Function>
int32_t guarded(char const* plugin, Function function) noexcept {
  try {
    function();
    return 0;
  } catch (std::exception const& error) {
    std::fprintf(stderr, "kvforge: %s: %s\n", plugin, error.what());
    return -1;
  }
}

class Plugin final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuildV2, public IPluginV3OneRuntime {
 public:
  Plugin(Definition const& definition, std::map<std::string, uint32_t> attributes, std::string kernels)
      : definition_(definition), attributes_(std::move(attributes)), kernels_(std::move(kernels)) {}

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
      case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
      case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
      case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }

  IPluginV3* clone() noexcept override {
    auto copy = new Plugin(definition_, attributes_, kernels_);
    copy->key_ = key_;
    return copy;
  }

  AsciiChar const* getPluginName() const noexcept override { return definition_.name; }
  AsciiChar const* getPluginVersion() const noexcept override { return VERSION; }
  AsciiChar const* getPluginNamespace() const noexcept override { return NAMESPACE; }
  int32_t getNbOutputs() const noexcept override { return static_cast<int32_t>(definition_.outputs.size()); }
  int32_t getAliasedInput(int32_t index) noexcept override { return definition_.outputs[index].alias; }

  int32_t getOutputDataTypes(DataType* outputs, int32_t, DataType const* inputs, int32_t) const noexcept override {
    for (size_t index = 0; index < definition_.outputs.size(); ++index) {
      auto const& output = definition_.outputs[index];
      outputs[index] = output.dtype_of >= 0 ? inputs[output.dtype_of] : output.dtype;
    }
    return 0;
  }

  int32_t getOutputShapes(DimsExprs const* inputs, int32_t, DimsExprs const*, int32_t, DimsExprs* outputs, int32_t,
                          IExprBuilder& builder) noexcept override {
    using Expression = IDimensionExpr const*;
    auto leaf = [&](std::string const& token) -> Expression {
      if (token[0] == 'i') {
        auto point = token.find('.');
        return inputs[std::stoi(token.substr(1, point))].d[std::stoi(token.substr(point + 1))];
      }
      if (token[0] == 'a') return builder.constant(static_cast<int32_t>(attributes_.at(token.substr(2))));
      return builder.constant(std::stoi(token));
    };
    auto combine = [&](std::string const& name, Expression left, Expression right) -> Expression {
      auto operation = name == "+"   ? DimensionOperation::kSUM
                       : name == "-" ? DimensionOperation::kSUB
                       : name == "*" ? DimensionOperation::kPROD
                                     : DimensionOperation::kFLOOR_DIV;
      return builder.operation(operation, *left, *right);
    };
    return guarded(definition_.name, [&] {
      for (size_t index = 0; index < definition_.outputs.size(); ++index) {
        auto const& output = definition_.outputs[index];
        if (output.shape_of >= 0) {
          outputs[index] = inputs[output.shape_of];
          continue;
        }
        outputs[index].nbDims = static_cast<int32_t>(output.shape.size());
        for (size_t dim = 0; dim < output.shape.size(); ++dim)
          outputs[index].d[dim] = evaluate<Expression>(output.shape[dim], leaf, combine);
      }
    });
  }

  bool supportsFormatCombination(int32_t position, DynamicPluginTensorDesc const* tensors, int32_t,
                                 int32_t) noexcept override {
    if (tensors[position].desc.format != TensorFormat::kLINEAR) return false;
    for (auto const& types : definition_.types) {
      bool fits = true;
      for (int32_t index = 0; index <= position; ++index) fits = fits && types[index] == tensors[index].desc.type;
      if (fits) return true;
    }
    return false;
  }

  // The key of `key_of` in plugins/trt_cpp.py.
  int32_t configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t count, DynamicPluginTensorDesc const*,
                          int32_t) noexcept override {
    std::ostringstream key;
    key << definition_.name;
    for (int32_t index = 0; index < count; ++index) {
      auto const& desc = inputs[index].desc;
      key << '|' << static_cast<int32_t>(desc.type);
      for (int32_t dim = 0; dim < desc.dims.nbDims; ++dim) key << ',' << desc.dims.d[dim];
    }
    for (auto const& attribute : definition_.attributes) key << '|' << attributes_.at(attribute.name);
    key_ = key.str();
    return 0;
  }

  int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept override {
    return 0;
  }

  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }

  PluginFieldCollection const* getFieldsToSerialize() noexcept override {
    for (auto const& kernels : KERNELS)
      if (kernels_.empty() && matches(kernels.key, key_)) kernels_ = std::string(kernels.data, kernels.size);
    if (kernels_.empty()) {
      std::fprintf(stderr, "kvforge: %s: the library holds no kernel for %s\n", definition_.name, key_.c_str());
      return nullptr;
    }
    fields_.clear();
    for (auto const& attribute : definition_.attributes)
      fields_.emplace_back(attribute.name, &attributes_.at(attribute.name),
                           attribute.is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32, 1);
    fields_.emplace_back(KERNELS_FIELD, kernels_.data(), PluginFieldType::kINT8,
                         static_cast<int32_t>(kernels_.size()));
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    return &collection_;
  }

  int32_t enqueue(PluginTensorDesc const* descriptions, PluginTensorDesc const*, void const* const* inputs,
                  void* const* outputs, void*, cudaStream_t stream) noexcept override {
    return guarded(definition_.name, [&] {
      int capability = Driver::get().capability();
      if (launches_.empty()) launches_ = unpack(kernels_);
      Launch const& launch = choose(launches_, capability);
      std::vector<int32_t> sizes;
      for (auto const& [index, dim] : launch.sizes)
        sizes.push_back(static_cast<int32_t>(descriptions[index].dims.d[dim]));
      int64_t grid[3];
      for (int axis = 0; axis < 3; ++axis)
        grid[axis] = evaluate<int64_t>(
            launch.grid[axis],
            [&](std::string const& token) -> int64_t {
              return token[0] == 's' ? sizes.at(std::stoi(token.substr(1))) : std::stoll(token);
            },
            compute);
      if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return;
      std::vector<void const*> addresses(inputs, inputs + definition_.num_inputs);
      addresses.insert(addresses.end(), outputs, outputs + definition_.outputs.size());
      std::vector<void*> arguments;
      for (int index = 0; index < definition_.num_inputs; ++index) arguments.push_back(&addresses[index]);
      for (auto& size : sizes) arguments.push_back(&size);
      for (size_t index = definition_.num_inputs; index < addresses.size(); ++index)
        arguments.push_back(&addresses[index]);
      Driver::get().start(loaded(launch, capability), grid, launch, arguments.data(), stream);
    });
  }

 private:
  Definition const& definition_;
  std::map<std::string, uint32_t> attributes_;  // the 32 bits of each value
  std::string kernels_, key_;
  std::vector<Launch> launches_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

class Creator final : public IPluginCreatorV3One {
 public:
  explicit Creator(Definition const& definition) : definition_(definition) {
    for (auto const& attribute : definition.attributes)
      fields_.emplace_back(attribute.name, nullptr,
                           attribute.is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32, 1);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  IPluginV3* createPlugin(AsciiChar const*, PluginFieldCollection const* given, TensorRTPhase) noexcept override {
    std::map<std::string, uint32_t> attributes;
    std::string kernels;
    for (int32_t index = 0; index < given->nbFields; ++index) {
      auto const& field = given->fields[index];
      if (std::strcmp(field.name, KERNELS_FIELD) == 0)
        kernels.assign(static_cast<char const*>(field.data), field.length);
      else if (field.length == 1 &&
               (field.type == PluginFieldType::kFLOAT32 || field.type == PluginFieldType::kINT32))
        std::memcpy(&attributes[field.name], field.data, sizeof(uint32_t));
    }
    for (auto const& attribute : definition_.attributes)
      if (attributes.count(attribute.name) == 0) {
        std::fprintf(stderr, "kvforge: %s: attribute %s is missing\n", definition_.name, attribute.name);
        return nullptr;
      }
    return new Plugin(definition_, std::move(attributes), std::move(kernels));
  }

  PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }
  AsciiChar const* getPluginName() const noexcept override { return definition_.name; }
  AsciiChar const* getPluginVersion() const noexcept override { return VERSION; }
  AsciiChar const* getPluginNamespace() const noexcept override { return NAMESPACE; }

 private:
  Definition const& definition_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_{};
};

}  // namespace

extern "C" {

// What TensorRT looks for in a library of plugins.
nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static std::vector<std::unique_ptr<Creator>> creators;
  static std::vector<nvinfer1::IPluginCreatorInterface*> found;
  if (found.empty())
    for (auto const& definition : DEFINITIONS) {
      creators.push_back(std::make_unique<Creator>(definition));
      found.push_back(creators.back().get());
    }
  count = static_cast<int32_t>(found.size());
  return found.data();
}

void setLoggerFinder(nvinfer1::ILoggerFinder*) {}
}
