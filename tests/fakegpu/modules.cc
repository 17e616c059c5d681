// Modules: compiled code. Its constants are read; its kernels are counted, and
// refused, so that no program goes on with values that nobody computed.
#include <elf.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "world.h"

struct CUmod_st {
  std::vector<char> file;  // ELF
  std::map<std::string, std::pair<Address, size_t>> globals;
};
struct CUfunc_st {
  std::string name;
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

}  // namespace

EXPORT int cuModuleLoadData(CUmod_st** module, const void* data) {
  ENTER();
  return *module = new CUmod_st{FileAt(data), {}}, kSuccess;
}
EXPORT int cuModuleLoadDataEx(CUmod_st** module, const void* data, unsigned, void*,
                              void*) {
  ENTER();
  return *module = new CUmod_st{FileAt(data), {}}, kSuccess;
}
EXPORT int cuModuleLoadFatBinary(CUmod_st** module, const void*) {
  ENTER();
  return *module = new CUmod_st, kSuccess;
}
EXPORT int cuModuleUnload(CUmod_st* module) {
  ENTER();
  for (const auto& [name, global] : module->globals) {
    W().device.erase(static_cast<char*>(Pointer(global.first)));
    std::free(Pointer(global.first));
  }
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
EXPORT int cuModuleGetFunction(CUfunc_st** function, CUmod_st*, const char* name) {
  return *function = new CUfunc_st{name}, kSuccess;
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
EXPORT int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, unsigned, CUstream_st*, void**, void**) {
  ENTER();
  return ++W().kernels, kNotSupported;
}
EXPORT int cuLaunchKernelEx(const void*, void*, void**, void**) {
  ENTER();
  return ++W().kernels, kNotSupported;
}
