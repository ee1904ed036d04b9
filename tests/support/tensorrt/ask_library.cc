// Asks a library of plugins what TensorRT asks, and has its plugins start kernels on a driver that writes down.
//
//     ask_library LIBRARY < cases
//
// A case: name, inputs (number, and of each its dimensions), number of outputs, fields (number, and of each name, "f" or
// "i", its 32 bits), and the bytes of its kernels after a line with their number. An answer is a line: aliases, types,
// grid and arguments. Inputs and outputs lie at addresses 1, 2, …
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstring>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

using namespace nvinfer1;

std::ostringstream started;
int num_inputs, num_sizes, num_outputs;

// What fake_driver.cc calls.
extern "C" void kernel_started(unsigned const* grid, void** arguments, void* stream) {
  started << grid[0] << ' ' << grid[1] << ' ' << grid[2] << " :";
  for (int index = 0; index < num_inputs + num_sizes + num_outputs; ++index) {
    bool is_size = index >= num_inputs && index < num_inputs + num_sizes;
    if (is_size) started << ' ' << *static_cast<int32_t*>(arguments[index]);
    else started << " @" << *static_cast<uint64_t*>(arguments[index]);
  }
  started << " : " << reinterpret_cast<uint64_t>(stream);
}

void types(IPluginV3OneBuildV2* build, std::vector<DynamicPluginTensorDesc> begun, int count) {
  int position = static_cast<int>(begun.size());
  if (position == count) {
    for (auto const& tensor : begun) std::cout << static_cast<int>(tensor.desc.type) << ' ';
    std::cout << "; ";
    return;
  }
  for (int type : {0, 1, 2, 3, 6, 7, 8}) {
    auto next = begun;
    next.emplace_back();
    next.back().desc.type = static_cast<DataType>(type);
    next.back().desc.format = TensorFormat::kLINEAR;
    next.resize(count);
    if (!build->supportsFormatCombination(position, next.data(), num_inputs, num_outputs)) continue;
    next.resize(position + 1);
    types(build, next, count);
  }
}

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return std::cerr << dlerror() << '\n', 1;
  auto creators = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
  int32_t count = 0;
  auto found = creators(count);
  std::string name;
  while (std::cin >> name >> num_inputs) {
    std::vector<PluginTensorDesc> inputs(num_inputs);
    for (auto& input : inputs) {
      std::cin >> input.dims.nbDims;
      for (int dim = 0; dim < input.dims.nbDims; ++dim) std::cin >> input.dims.d[dim];
    }
    int num_fields = 0;
    std::cin >> num_outputs >> num_sizes >> num_fields;
    std::vector<std::string> names(num_fields), kinds(num_fields);
    std::vector<uint32_t> values(num_fields);
    std::vector<PluginField> fields;
    for (int index = 0; index < num_fields; ++index) {
      std::cin >> names[index] >> kinds[index] >> values[index];
      auto kind = kinds[index] == "f" ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32;
      fields.emplace_back(names[index].c_str(), &values[index], kind, 1);
    }
    size_t length = 0;
    std::cin >> length;
    std::cin.get();
    std::string kernels(length, '\0');
    std::cin.read(kernels.data(), static_cast<std::streamsize>(length));
    fields.emplace_back("kernels", kernels.data(), PluginFieldType::kINT8, static_cast<int32_t>(length));
    PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
    IPluginV3* plugin = nullptr;
    for (int index = 0; index < count; ++index) {
      auto creator = static_cast<IPluginCreatorV3One*>(found[index]);
      if (name == creator->getPluginName())
        plugin = creator->createPlugin(name.c_str(), &collection, TensorRTPhase::kRUNTIME);
    }
    if (plugin == nullptr) return std::cerr << "no plugin " << name << '\n', 1;
    auto build = static_cast<IPluginV3OneBuildV2*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
    for (int index = 0; index < build->getNbOutputs(); ++index) std::cout << build->getAliasedInput(index) << ' ';
    std::cout << "| ";
    types(build, {}, num_inputs + num_outputs);
    auto run = static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    std::vector<void const*> in;
    std::vector<void*> out;
    for (uint64_t place = 1; place <= static_cast<uint64_t>(num_inputs + num_outputs); ++place) {
      if (in.size() < inputs.size()) in.push_back(reinterpret_cast<void*>(place));
      else out.push_back(reinterpret_cast<void*>(place));
    }
    started.str("");
    auto copy = run->attachToContext(nullptr);
    run = static_cast<IPluginV3OneRuntime*>(copy->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
    if (run->enqueue(inputs.data(), nullptr, in.data(), out.data(), nullptr, reinterpret_cast<cudaStream_t>(77)) != 0)
      return 1;
    std::cout << "| " << started.str() << '\n';
    delete copy;
    delete plugin;
  }
}
