// Modules: compiled code. What is text (PTX) is run, by the interpreter in ptx/. Of
// machine code the constants are read. A kernel that can't be run is counted, and
// refused, so that no program goes on with values that nobody computed.
#include <elf.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "kernels.h"
#include "ptx/warp.h"
#include "world.h"

struct CUmod_st {
  std::vector<char> file;  // ELF
  std::shared_ptr<ptx::Module> text;
  std::map<std::string, std::pair<Address, size_t>> globals;
};
struct CUfunc_st {
  std::string name;
  std::shared_ptr<ptx::Module> module;
  const ptx::Kernel* kernel;  // null: it is machine code
};

namespace {

using namespace fakegpu;

/// A copy of an ELF file that XLA's own compiler made. Its header is its only
/// length.
std::vector<char> FileAt(const void* data) {
  const auto* const bytes = static_cast<const char*>(data);
  if (std::memcmp(bytes, ELFMAG, SELFMAG) != 0) return {};
  const auto* const header = static_cast<const Elf64_Ehdr*>(data);
  size_t size = header->e_shoff + size_t{header->e_shnum} * header->e_shentsize;
  const auto* const sections =
      reinterpret_cast<const Elf64_Shdr*>(bytes + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type == SHT_NOBITS) continue;
    size = std::max<size_t>(size, sections[i].sh_offset + sections[i].sh_size);
  }
  return {bytes, bytes + size};
}

/// A symbol's value in a device's memory; {0, 0} if there is none of the name.
std::pair<Address, size_t> Load(const std::vector<char>& file, const char* name) {
  if (file.empty()) return {0, 0};
  const char* const bytes = file.data();
  const auto* const header = reinterpret_cast<const Elf64_Ehdr*>(bytes);
  const auto* const sections =
      reinterpret_cast<const Elf64_Shdr*>(bytes + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    const Elf64_Shdr& table = sections[i];
    if (table.sh_type != SHT_SYMTAB) continue;
    const auto* symbol =
        reinterpret_cast<const Elf64_Sym*>(bytes + table.sh_offset);
    const auto* const end = symbol + table.sh_size / sizeof(Elf64_Sym);
    const char* const names = bytes + sections[table.sh_link].sh_offset;
    for (; symbol != end; ++symbol) {
      if (std::strcmp(names + symbol->st_name, name) != 0) continue;
      if (symbol->st_shndx >= header->e_shnum) continue;
      const Elf64_Shdr& section = sections[symbol->st_shndx];
      char* const value = Allocate(symbol->st_size, 0);
      if (section.sh_type != SHT_NOBITS)
        std::memcpy(value, bytes + section.sh_offset + symbol->st_value,
                    symbol->st_size);
      W().device[value] = Block{symbol->st_size, 0, false};
      return {reinterpret_cast<Address>(value), symbol->st_size};
    }
  }
  return {0, 0};
}

/// The memory of a launch's stream: the driver's blocks. The launch's arguments cut
/// them, since XLA puts arrays that live for one program into one block.
struct DriverMemory : ptx::Memory {
  std::vector<char*> arguments;

  explicit DriverMemory(const ptx::Launch& launch) {
    for (size_t at = 0; at + sizeof(char*) <= launch.params.size();
         at += sizeof(char*)) {
      char* argument;
      std::memcpy(&argument, launch.params.data() + at, sizeof(argument));
      arguments.push_back(argument);
    }
  }
  bool Find(const char* at, ptx::Range& range) override {
    Lock lock(W().mutex);
    for (Blocks* const blocks : {&W().device, &W().pinned}) {
      auto found = blocks->upper_bound(const_cast<char*>(at));
      if (found == blocks->begin()) continue;
      --found;
      range.begin = found->first;
      range.end = found->first + found->second.size;
      range.end_of_word = range.begin + (found->second.size + 3) / 4 * 4;
      if (at >= range.end_of_word) continue;
      for (char* const argument : arguments) {
        if (argument <= at) range.begin = std::max(range.begin, argument);
        if (argument > at && argument < range.end)
          range.end = range.end_of_word = argument;
      }
      return true;
    }
    return false;
  }
  /// Notes what the kernel used, when it is over.
  void Note(const std::string& kernel) {
    Lock lock(W().mutex);
    for (const ptx::Range& range : ranges) {
      if (range.read_from != nullptr && range.read_from < range.end)
        Touch(lock, range.read_from,
              static_cast<size_t>(std::min(range.read_to, range.end) -
                                  range.read_from),
              false, kernel);
      if (range.written_from != nullptr)
        Touch(lock, range.written_from,
              static_cast<size_t>(std::min(range.written_to, range.end) -
                                  range.written_from),
              true, kernel);
    }
  }
};

CUmod_st* NewModule(const void* data) {
  auto* const module = new CUmod_st{FileAt(data), nullptr, {}};
  if (!module->file.empty() || !ptx::IsText(data)) return module;
  const auto place = [](size_t bytes) { return Allocate(bytes, 0); };
  module->text = {
      ptx::Parse(static_cast<const char*>(data), place).release(),
      [](ptx::Module* text) {  // not under the lock: the last launch may drop it
        {
          Lock lock(W().mutex);
          for (auto& [name, global] : text->globals) W().device.erase(global.at);
        }
        for (auto& [name, global] : text->globals) std::free(global.at);
        delete text;
      }};
  return module;
}
/// Makes the module's variables the device's memory.
int Loaded(Lock&, CUmod_st* module, CUmod_st** loaded) {
  if (module->text != nullptr) {
    for (const auto& [name, global] : module->text->globals) {
      W().device[global.at] = Block{global.bytes.size(), 0, false};
      module->globals[name] = {reinterpret_cast<Address>(global.at),
                               global.bytes.size()};
    }
  }
  return *loaded = module, kSuccess;
}

}  // namespace

namespace fakegpu {

int KernelOp(Lock& lock, const KernelLaunch& launch, Op& op) {
  const CUfunc_st* const function = launch.function;
  if (function->kernel == nullptr)
    return Missing(lock, "machine code (" + function->name + ")");
  if (!function->kernel->unknown.empty()) {
    for (const auto& [name, count] : function->kernel->unknown)
      W().missing[name] += 1;
    return ++W().kernels, kNotSupported;
  }
  auto work = std::make_shared<ptx::Launch>();
  work->kernel = function->kernel;
  work->grid = {launch.grid[0], launch.grid[1], launch.grid[2]};
  work->block = {launch.block[0], launch.block[1], launch.block[2]};
  work->dynamic_shared = launch.shared_bytes;
  work->params.resize(function->kernel->param_bytes);
  for (size_t i = 0; i < function->kernel->params.size(); ++i) {
    const ptx::Param& param = function->kernel->params[i];
    std::memcpy(work->params.data() + param.at, launch.params[i], param.bytes);
  }
  op = [work, module = function->module] {
    DriverMemory memory(*work);
    ptx::Launch run = *work;
    run.memory = &memory;
    try {
      ptx::Run(run);
      memory.Note("kernel " + run.kernel->name);
    } catch (const ptx::KernelFault& fault) {
      Lock lock(W().mutex);
      Fault(lock, "kernel " + run.kernel->name + ": " + fault.what(), 0);
    }
  };
  ++W().launches;
  return kSuccess;
}

}  // namespace fakegpu

namespace {

int LaunchOn(Lock& lock, CUstream_st* handle, const KernelLaunch& launch) {
  Op op;
  if (const int code = KernelOp(lock, launch, op); code != kSuccess) return code;
  CUstream_st* const stream = Find(lock, handle);
  if (stream == nullptr) return Fault(lock, "no such stream", kInvalidHandle);
  return Enqueue(lock, stream, std::move(op)), kSuccess;
}

}  // namespace

EXPORT int cuModuleLoadData(CUmod_st** module, const void* data) {
  CUmod_st* const made = NewModule(data);  // which takes a while
  ENTER();
  return Loaded(lock, made, module);
}
EXPORT int cuModuleLoadDataEx(CUmod_st** module, const void* data, unsigned, void*,
                              void*) {
  CUmod_st* const made = NewModule(data);
  ENTER();
  return Loaded(lock, made, module);
}
/// XLA's older runtimes load what the assembler made this way.
EXPORT int cuModuleLoadFatBinary(CUmod_st** module, const void* data) {
  CUmod_st* const made = NewModule(data);
  ENTER();
  return Loaded(lock, made, module);
}
EXPORT int cuModuleUnload(CUmod_st* module) {
  ENTER();
  if (module->text == nullptr) {
    for (const auto& [name, global] : module->globals) {
      W().device.erase(static_cast<char*>(Pointer(global.first)));
      std::free(Pointer(global.first));
    }
  }
  lock.unlock();
  return delete module, kSuccess;
}
EXPORT int cuModuleGetLoadingMode(int* mode) { return *mode = 2, kSuccess; }
EXPORT int cuModuleGetGlobal_v2(Address* address, size_t* bytes, CUmod_st* module,
                                const char* name) {
  ENTER();
  auto found = module->globals.find(name);
  if (found == module->globals.end()) {
    const auto global = Load(module->file, name);
    if (global.first == 0) return kNotFound;
    found = module->globals.emplace(name, global).first;
  }
  if (address != nullptr) *address = found->second.first;
  if (bytes != nullptr) *bytes = found->second.second;
  return kSuccess;
}
EXPORT int cuModuleGetFunction(CUfunc_st** function, CUmod_st* module,
                               const char* name) {
  const ptx::Kernel* kernel = nullptr;
  if (module->text != nullptr) {
    const auto found = module->text->kernels.find(name);
    if (found == module->text->kernels.end()) return kNotFound;
    kernel = found->second.get();
  }
  return *function = new CUfunc_st{name, module->text, kernel}, kSuccess;
}
EXPORT int cuFuncGetName(const char** name, CUfunc_st* function) {
  return *name = function->name.c_str(), kSuccess;
}
EXPORT int cuFuncGetAttribute(int* value, int, void*) {
  return *value = 0, kSuccess;
}
EXPORT int cuFuncSetAttribute(void*, int, int) { return kSuccess; }
EXPORT int cuFuncSetCacheConfig(void*, int) { return kSuccess; }
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int,
                                                       size_t) {
  return *blocks = 16, kSuccess;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, void*,
                                                                int, size_t,
                                                                unsigned) {
  return *blocks = 16, kSuccess;
}
EXPORT int cuLaunchKernel(CUfunc_st* function, unsigned grid_x, unsigned grid_y,
                          unsigned grid_z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned shared_bytes,
                          CUstream_st* stream, void** params, void**) {
  ENTER();
  return LaunchOn(lock, stream,
                  {function,
                   {grid_x, grid_y, grid_z},
                   {block_x, block_y, block_z},
                   shared_bytes,
                   params});
}
/// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  CUstream_st* stream;
  void* attributes;
  unsigned attribute_count;
};
EXPORT int cuLaunchKernelEx(const LaunchConfig* config, CUfunc_st* function,
                            void** params, void**) {
  ENTER();
  KernelLaunch launch{function, {}, {}, config->shared_bytes, params};
  std::copy_n(config->grid, 3, launch.grid);
  std::copy_n(config->block, 3, launch.block);
  return LaunchOn(lock, config->stream, launch);
}
