// A stand-in for NVIDIA's assembler and linker (ptxas, nvlink): its output is its
// input, so that the driver is given the text of kernels instead of machine code.
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>

int main(int count, char** arguments) {
  std::string from, to;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument == "--version") {
      std::cout << "ptxas: a stand-in\n"
                   "Cuda compilation tools, release 12.9, V12.9.86\n";
      return 0;
    }
    if (argument == "-o" && i + 1 < count)
      to = arguments[++i];
    else if (argument[0] != '-' && argument.find('/') != std::string::npos &&
             from.empty())
      from = argument;
  }
  if (from.empty() || to.empty()) return 0;  // asked which versions it knows
  std::ifstream in(from, std::ios::binary);
  std::ofstream out(to, std::ios::binary);
  out << in.rdbuf();
  out << '\0';  // the driver has no other length of a text
  return in && out ? 0 : 1;
}
