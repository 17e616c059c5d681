// Reads the text of a module. Each kernel becomes one array of instructions: the
// functions that it calls, each once, and then its own.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <unordered_map>

#include "decode.h"

namespace ptx {

namespace {

using Text = std::string_view;

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
Text Trimmed(Text text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return text;
}
bool StartsWith(Text text, Text begin) {
  return text.substr(0, begin.size()) == begin;
}

std::vector<Text> Split(Text text, char at) {  // outside of brackets
  std::vector<Text> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '{' || c == '[' || c == '(') ++depth;
    if (c == '}' || c == ']' || c == ')') --depth;
    if (c != at || depth != 0) continue;
    parts.push_back(Trimmed(text.substr(begin, i - begin)));
    begin = i + 1;
  }
  parts.push_back(Trimmed(text.substr(begin)));
  return parts;
}
std::vector<Text> Words(Text text) {
  std::vector<Text> words;
  for (size_t i = 0; i < text.size();) {
    while (i < text.size() && IsSpace(text[i])) ++i;
    const size_t begin = i;
    while (i < text.size() && !IsSpace(text[i])) ++i;
    if (i != begin) words.push_back(text.substr(begin, i - begin));
  }
  return words;
}

/// Comments become spaces, so that lines keep their numbers.
std::string WithoutComments(const char* text) {
  std::string result(text);
  for (size_t i = 0; i + 1 < result.size(); ++i) {
    if (result[i] == '"') {
      const size_t end = result.find('"', i + 1);
      if (end == std::string::npos) break;
      i = end;
    } else if (result[i] == '/' && result[i + 1] == '/') {
      while (i < result.size() && result[i] != '\n') result[i++] = ' ';
    } else if (result[i] == '/' && result[i + 1] == '*') {
      size_t end = result.find("*/", i + 2);
      end = end == std::string::npos ? result.size() : end + 2;
      for (; i < end; ++i)
        if (result[i] != '\n') result[i] = ' ';
      --i;
    }
  }
  return result;
}

/// A declared piece of memory: `.align 8 .b8 name[40]`, or `.b32 name`.
struct Declared {
  std::string name;
  size_t bytes = 0, align = 1;
  int element = 1;  // bytes
};
Declared Declaration(Text text) {
  Declared found;
  Text bracket;
  if (const size_t open = text.find('['); open != Text::npos) {
    bracket = text.substr(open + 1);
    text = text.substr(0, open);
  }
  const std::vector<Text> words = Words(text);
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == ".align") {
      const auto align =
          static_cast<size_t>(std::atoi(std::string(words[i + 1]).c_str()));
      // That of what a pointer points to comes after its type.
      if (i == 0 || words[i - 1] != ".ptr")
        found.align = std::max(found.align, align);
      ++i;
      continue;
    }
    if (words[i][0] != '.') {
      found.name = std::string(words[i]);
      continue;
    }
    const Type type = TypeNamed(words[i].substr(1));
    if (type.kind != 0) found.element = std::max(1, type.bits / 8);
  }
  size_t count = 1;
  while (!bracket.empty()) {  // of each dimension
    count *= std::strtoull(std::string(bracket).c_str(), nullptr, 10);
    const size_t open = bracket.find('[');
    bracket = open == Text::npos ? Text{} : bracket.substr(open + 1);
  }
  found.bytes = count * static_cast<size_t>(found.element);
  found.align = std::max<size_t>(found.align, static_cast<size_t>(found.element));
  return found;
}

/// The text of a kernel or a function.
struct Function {
  std::string name;
  std::vector<Declared> params, results;
  Text body;
  int line = 1;  // where the body begins
};

struct Symbol {
  enum Kind { kRegister, kRegisters, kLocal, kParam, kShared, kGlobal } kind;
  int bits = 0;                // of registers
  uint64_t at = 0;             // an offset, or an address
  std::vector<uint32_t> rows;  // of numbered registers, once they are used
};

struct ModuleText {
  std::unordered_map<std::string, Function> functions;
  std::map<std::string, Declared> shared;
  std::map<std::string, bool> shared_is_dynamic;
  Module* module;
};

const std::pair<Text, Special> kSpecials[] = {
    {"%tid.x", Special::kTidX},
    {"%tid.y", Special::kTidY},
    {"%tid.z", Special::kTidZ},
    {"%ntid.x", Special::kNtidX},
    {"%ntid.y", Special::kNtidY},
    {"%ntid.z", Special::kNtidZ},
    {"%ctaid.x", Special::kCtaidX},
    {"%ctaid.y", Special::kCtaidY},
    {"%ctaid.z", Special::kCtaidZ},
    {"%nctaid.x", Special::kNctaidX},
    {"%nctaid.y", Special::kNctaidY},
    {"%nctaid.z", Special::kNctaidZ},
    {"%laneid", Special::kLaneid},
    {"%warpid", Special::kWarpid},
    {"%nwarpid", Special::kNwarpid},
    {"%lanemask_eq", Special::kLanemaskEq},
    {"%lanemask_lt", Special::kLanemaskLt},
    {"%lanemask_le", Special::kLanemaskLe},
    {"%lanemask_gt", Special::kLanemaskGt},
    {"%lanemask_ge", Special::kLanemaskGe},
    {"%clock", Special::kClock},
    {"%dynamic_smem_size", Special::kDynamicShared}};

struct Unknown : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Callee;

/// The instructions of a kernel or of a function, before they have their place in
/// the kernel's.
struct Unit {
  std::vector<Instr> code;
  std::vector<std::pair<size_t, Callee*>> calls;
  std::unordered_map<std::string, uint32_t> labels;
  std::vector<std::pair<size_t, std::string>> jumps;  // to labels
  std::vector<std::pair<std::vector<uint32_t>*, std::vector<std::string>>> tables;
  Callee* callee = nullptr;  // null: a kernel's
};

/// A function that a kernel calls.
struct Callee {
  const Function* function;
  Operand returns;                        // where each lane goes on
  std::vector<uint32_t> params, results;  // in the memory of a lane
  uint32_t at = 0;
  Unit unit;
};

/// Compiles one kernel.
class Compiler {
 public:
  Compiler(const ModuleText& text, Kernel* kernel) : text_(text), kernel_(kernel) {}

  void Compile(const Function& entry) {
    for (const Declared& param : entry.params) {
      uint32_t& end = kernel_->param_bytes;
      end = static_cast<uint32_t>((end + param.align - 1) / param.align *
                                  param.align);
      kernel_->params.push_back(
          Param{param.name, end, static_cast<uint32_t>(param.bytes)});
      end += static_cast<uint32_t>(param.bytes);
    }
    for (const auto& [name, shared] : text_.shared) {
      if (text_.shared_is_dynamic.at(name)) continue;
      shared_[name] = Allocate(kernel_->shared_bytes, shared);
    }
    kernel_->shared_bytes = (kernel_->shared_bytes + 127) / 128 * 128;
    for (const auto& [name, shared] : text_.shared)
      if (text_.shared_is_dynamic.at(name)) shared_[name] = kernel_->shared_bytes;

    Unit main;
    unit_ = &main;
    scopes_.emplace_back();
    for (const Param& param : kernel_->params)
      scopes_.back()[param.name] = Symbol{Symbol::kParam, 0, param.at, {}};
    Body(entry);
    scopes_.clear();
    for (size_t i = 0; i < called_.size(); ++i) CompileFunction(*called_[i]);
    // Functions come first: lanes that are in one are at the lowest place, and so
    // run until they are back where the others wait.
    for (const auto& callee : called_) Append(callee->unit);
    kernel_->entry = static_cast<uint32_t>(kernel_->code.size());
    Append(main);
    for (const auto& [at, callee] : calls_) kernel_->code[at].target = callee->at;
    kernel_->constants.resize(kernel_->constants.size() + 64);
  }

 private:
  template <typename Size>
  static uint32_t Allocate(Size& end, const Declared& what) {
    const auto at =
        static_cast<uint32_t>((end + what.align - 1) / what.align * what.align);
    end = static_cast<Size>(at + what.bytes);
    return at;
  }

  void Append(Unit& unit);
  void CompileFunction(Callee& callee);
  Callee* CalleeOf(Text name);

  // --- Registers, constants, symbols ---

  uint32_t NewRow(int bits) {
    const uint32_t at = kernel_->register_bytes;
    kernel_->register_bytes +=
        bits == 1 ? 8 : static_cast<uint32_t>(bits / 8 * kLanes);
    return at;
  }
  Operand Constant(uint64_t value, int bits) {
    const auto key = std::pair(value, bits);
    const auto [found, is_new] = constants_.try_emplace(key, 0);
    if (is_new) {
      auto& rows = kernel_->constants;
      found->second = static_cast<uint32_t>(rows.size());
      const size_t size = bits == 1 ? 4 : static_cast<size_t>(bits / 8);
      if (bits == 1) value = value != 0 ? ~uint64_t{0} : 0;
      for (int lane = 0; lane < (bits == 1 ? 2 : kLanes); ++lane) {
        const char* const bytes = reinterpret_cast<const char*>(&value);
        rows.insert(rows.end(), bytes, bytes + size);
      }
    }
    Operand operand;
    operand.at = found->second;
    operand.bits = static_cast<uint8_t>(bits);
    operand.constant = true;
    return operand;
  }
  Operand SpecialRow(Special special) {
    const auto [found, is_new] = specials_.try_emplace(special, 0);
    if (is_new) {
      found->second = NewRow(32);
      kernel_->specials.emplace_back(special, found->second);
    }
    Operand operand;
    operand.at = found->second;
    operand.bits = 32;
    return operand;
  }
  static Operand Nowhere() {
    Operand operand;
    operand.at = kNowhere;
    return operand;
  }

  Symbol* Find(Text name, size_t& number) {
    number = 0;
    const std::string whole(name);
    size_t digits = name.size();
    while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9')
      --digits;
    const std::string prefix(name.substr(0, digits));
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->find(whole); found != scope->end())
        return &found->second;
      if (digits == name.size()) continue;
      const auto found = scope->find(prefix);
      if (found == scope->end() || found->second.kind != Symbol::kRegisters)
        continue;
      number = std::strtoull(std::string(name.substr(digits)).c_str(), nullptr, 10);
      return &found->second;
    }
    return nullptr;
  }
  Operand RegisterOf(Symbol& symbol, size_t number) {
    if (symbol.rows.size() <= number) symbol.rows.resize(number + 1, kNowhere);
    uint32_t& row = symbol.rows[number];
    if (row == kNowhere) row = NewRow(symbol.bits);
    Operand operand;
    operand.at = row;
    operand.bits = static_cast<uint8_t>(symbol.bits);
    return operand;
  }

  /// The value of a number or of a symbol's address, maybe with an offset.
  uint64_t ValueOf(Text text, int bits, bool is_float) {
    if (StartsWith(text, "0f") || StartsWith(text, "0F")) {
      const uint64_t value =
          std::strtoull(std::string(text.substr(2)).c_str(), nullptr, 16);
      if (bits != 64) return value;
      return Bits<uint64_t>(
          static_cast<double>(Bits<float>(static_cast<uint32_t>(value))));
    }
    if (StartsWith(text, "0d") || StartsWith(text, "0D")) {
      const uint64_t value =
          std::strtoull(std::string(text.substr(2)).c_str(), nullptr, 16);
      if (bits != 32) return value;
      return Bits<uint32_t>(static_cast<float>(Bits<double>(value)));
    }
    const char first = text.empty() ? '\0' : text[0];
    if (first == '-' || (first >= '0' && first <= '9')) {
      const std::string number(text);
      if (is_float || number.find('.') != std::string::npos) {
        const double value = std::strtod(number.c_str(), nullptr);
        if (bits == 64) return Bits<uint64_t>(value);
        if (bits == 32) return Bits<uint32_t>(static_cast<float>(value));
        if (number.find('.') != std::string::npos)
          throw Unknown("a number of 16 bits");
      }
      if (first == '-')
        return static_cast<uint64_t>(std::strtoll(number.c_str(), nullptr, 0));
      return std::strtoull(number.c_str(), nullptr, 0);
    }
    int64_t offset = 0;
    Text name = text;
    if (const size_t plus = text.find('+'); plus != Text::npos) {
      offset = std::strtoll(std::string(text.substr(plus + 1)).c_str(), nullptr, 0);
      name = Trimmed(text.substr(0, plus));
    }
    Space space;
    return AddressOf(name, space) + static_cast<uint64_t>(offset);
  }
  uint64_t AddressOf(Text name, Space& space) {
    size_t number;
    if (const Symbol* const symbol = Find(name, number)) {
      space = symbol->kind == Symbol::kLocal    ? Space::kLocal
              : symbol->kind == Symbol::kParam  ? Space::kParam
              : symbol->kind == Symbol::kShared ? Space::kShared
                                                : Space::kGlobal;
      return symbol->at;
    }
    const std::string whole(name);
    if (const auto found = shared_.find(whole); found != shared_.end()) {
      space = Space::kShared;
      return found->second;
    }
    const auto found = text_.module->globals.find(whole);
    if (found == text_.module->globals.end()) throw Unknown("no symbol " + whole);
    space = Space::kGlobal;
    return reinterpret_cast<uint64_t>(found->second.at);
  }

  /// `wanted` bits of an immediate; of a register if it is `exact`.
  Operand OperandOf(Text text, int wanted, bool is_float, bool exact) {
    if (text == "_") return Nowhere();
    if (text.empty()) throw Unknown("an operand is missing");
    if (text[0] == '!') {
      Operand operand = OperandOf(text.substr(1), 1, false, true);
      operand.negated = true;
      return operand;
    }
    if (text[0] == '%') {
      for (const auto& [name, special] : kSpecials)
        if (name == text) return Checked(SpecialRow(special), wanted, exact, text);
      if (StartsWith(text, "%clock") || StartsWith(text, "%globaltimer"))
        return Constant(0, wanted);
      if (text == "WARP_SZ") return Constant(32, wanted);
    }
    size_t number;
    Symbol* const symbol = Find(text, number);
    if (symbol != nullptr &&
        (symbol->kind == Symbol::kRegister || symbol->kind == Symbol::kRegisters))
      return Checked(RegisterOf(*symbol, number), wanted, exact, text);
    if (text[0] == '%') throw Unknown(std::string(text));
    return Constant(ValueOf(text, wanted, is_float),
                    std::max(wanted, wanted == 1 ? 1 : 16));
  }
  static Operand Checked(Operand operand, int wanted, bool exact, Text) {
    if (exact && operand.bits != wanted)
      throw Unknown("a register of another width");
    return operand;
  }

  // --- Statements ---

  void Body(const Function& function);
  void Statement(Text statement, int line);
  void Declare(Text statement);
  void Instruction(Text opcode, Text rest, const Operand& guard, int line);
  void Operands(const std::vector<Text>& parts, const std::vector<Text>& args,
                Instr& in);
  void Memory(const std::vector<Text>& parts, const std::vector<Text>& args,
              Instr& in);
  void Address(Text text, Instr& in, Operand& base, int64_t& offset);
  void CallOf(Text rest, Instr in);
  Instr& Emit(Instr in) { return unit_->code.emplace_back(in); }

  const ModuleText& text_;
  Kernel* const kernel_;
  Unit* unit_ = nullptr;
  std::vector<std::unordered_map<std::string, Symbol>> scopes_;
  std::map<std::pair<uint64_t, int>, uint32_t> constants_;
  std::map<Special, uint32_t> specials_;
  std::map<std::string, uint64_t> shared_;
  std::vector<std::unique_ptr<Callee>> called_;
  std::vector<std::pair<size_t, Callee*>> calls_;
};

void Compiler::Append(Unit& unit) {
  const auto base = static_cast<uint32_t>(kernel_->code.size());
  if (unit.callee != nullptr) unit.callee->at = base;
  for (const auto& [at, label] : unit.jumps) {
    const auto found = unit.labels.find(label);
    if (found == unit.labels.end()) {
      ++kernel_->unknown["a jump to " + label];
      continue;
    }
    unit.code[at].target = base + found->second;
  }
  for (const auto& [table, labels] : unit.tables)
    for (const std::string& label : labels)
      table->push_back(base + unit.labels[label]);
  for (const auto& [at, callee] : unit.calls)
    calls_.emplace_back(base + at, callee);
  kernel_->code.insert(kernel_->code.end(), unit.code.begin(), unit.code.end());
}

Callee* Compiler::CalleeOf(Text name) {
  for (const auto& callee : called_)
    if (callee->function->name == name) return callee.get();
  const auto found = text_.functions.find(std::string(name));
  if (found == text_.functions.end() || found->second.body.empty())
    throw Unknown("call of " + std::string(name));
  auto callee = std::make_unique<Callee>();
  callee->function = &found->second;
  callee->returns.at = NewRow(32);
  callee->returns.bits = 32;
  for (const Declared& param : found->second.params)
    callee->params.push_back(Allocate(kernel_->local_bytes, param));
  for (const Declared& result : found->second.results)
    callee->results.push_back(Allocate(kernel_->local_bytes, result));
  callee->unit.callee = callee.get();
  return called_.emplace_back(std::move(callee)).get();
}

void Compiler::CompileFunction(Callee& callee) {
  unit_ = &callee.unit;
  scopes_.clear();
  scopes_.emplace_back();
  const Function& function = *callee.function;
  for (size_t i = 0; i < function.params.size(); ++i)
    scopes_[0][function.params[i].name] =
        Symbol{Symbol::kLocal, 0, callee.params[i], {}};
  for (size_t i = 0; i < function.results.size(); ++i)
    scopes_[0][function.results[i].name] =
        Symbol{Symbol::kLocal, 0, callee.results[i], {}};
  Body(function);
}

void Compiler::Body(const Function& function) {
  const Text body = function.body;
  scopes_.emplace_back();
  int line = function.line;
  for (size_t i = 0; i < body.size();) {
    if (IsSpace(body[i])) {
      if (body[i] == '\n') ++line;
      ++i;
    } else if (body[i] == '{') {
      scopes_.emplace_back();
      ++i;
    } else if (body[i] == '}') {
      scopes_.pop_back();
      ++i;
    } else {
      size_t end = i;
      while (end < body.size() && body[end] != ';' && body[end] != ':') ++end;
      if (end < body.size() && body[end] == ':' &&
          (end + 1 >= body.size() || body[end + 1] != ':') &&
          body.substr(i, end - i).find_first_of(" \t\n") == Text::npos) {
        const Text label = body.substr(i, end - i);
        // A table of places to jump to is declared like a label.
        const size_t stop = body.find(';', end);
        const Text rest = Trimmed(body.substr(end + 1, stop - end - 1));
        if (StartsWith(rest, ".branchtargets")) {
          auto table = std::make_unique<std::vector<uint32_t>>();
          std::vector<std::string> labels;
          for (const Text target : Split(rest.substr(14), ','))
            labels.emplace_back(target);
          unit_->tables.emplace_back(table.get(), std::move(labels));
          Symbol symbol{Symbol::kGlobal, 0, kernel_->tables.size(), {}};
          scopes_.back()[std::string(label)] = symbol;
          kernel_->tables.push_back(std::move(table));
          i = stop + 1;
          continue;
        }
        unit_->labels[std::string(label)] =
            static_cast<uint32_t>(unit_->code.size());
        i = end + 1;
        continue;
      }
      end = body.find(';', i);
      if (end == Text::npos) end = body.size();
      const Text statement = Trimmed(body.substr(i, end - i));
      Statement(statement, line);
      line +=
          static_cast<int>(std::count(statement.begin(), statement.end(), '\n'));
      i = end + 1;
    }
  }
  scopes_.pop_back();
  // Where nothing says so, the end is one.
  Instr end;
  end.guard = Nowhere();
  if (unit_->callee != nullptr)
    end.how = kInFunction, end.ops[0] = unit_->callee->returns;
  end.run = Decode({"ret"}, end);
  Emit(end);
}

void Compiler::Declare(Text statement) {
  const std::vector<Text> words = Words(statement);
  if (words[0] == ".reg") {
    const Type type = TypeNamed(words[1].substr(1));
    int bits = type.bits;
    if (bits == 8) bits = 16;
    if (type.kind == 0 || bits > 64) throw Unknown(std::string(words[1]));
    const size_t after =
        static_cast<size_t>(words[1].data() + words[1].size() - statement.data());
    for (const Text name : Split(statement.substr(after), ',')) {
      const size_t angle = name.find('<');
      Symbol symbol{angle == Text::npos ? Symbol::kRegister : Symbol::kRegisters,
                    bits,
                    0,
                    {}};
      scopes_.back()[std::string(Trimmed(name.substr(0, angle)))] =
          std::move(symbol);
    }
    return;
  }
  const size_t after =
      static_cast<size_t>(words[0].data() + words[0].size() - statement.data());
  const Declared declared = Declaration(statement.substr(after));
  if (words[0] == ".local" || words[0] == ".param") {
    scopes_.back()[declared.name] =
        Symbol{Symbol::kLocal, 0, Allocate(kernel_->local_bytes, declared), {}};
  } else if (words[0] == ".shared") {
    scopes_.back()[declared.name] =
        Symbol{Symbol::kShared, 0, Allocate(kernel_->shared_bytes, declared), {}};
  } else {
    throw Unknown(std::string(words[0]));
  }
}

void Compiler::Statement(Text statement, int line) {
  if (statement.empty()) return;
  std::string name;
  try {
    if (statement[0] == '.') {
      name = std::string(Words(statement)[0]);
      if (name == ".loc" || name == ".pragma" || name == ".file" ||
          name == ".alias")
        return;
      return Declare(statement);
    }
    Operand guard = Nowhere();
    if (statement[0] == '@') {
      size_t end = 1;
      while (end < statement.size() && !IsSpace(statement[end])) ++end;
      guard = OperandOf(statement.substr(1, end - 1), 1, false, true);
      statement = Trimmed(statement.substr(end));
    }
    size_t end = 0;
    while (end < statement.size() && !IsSpace(statement[end])) ++end;
    const Text opcode = statement.substr(0, end);
    name = std::string(opcode);
    Instruction(opcode, Trimmed(statement.substr(end)), guard, line);
  } catch (const Unknown& unknown) {
    ++kernel_->unknown[name + (unit_ == nullptr
                                   ? ""
                                   : " (" + std::string(unknown.what()) + ")")];
  }
}

/// How many bits operand `index` of an instruction has, if it is a number or has to
/// fit.
int Wanted(const std::vector<Text>& parts, size_t index) {
  const Text op = parts[0];
  const auto has = [&](Text part) {
    return std::find(parts.begin(), parts.end(), part) != parts.end();
  };
  const Type type = TypeNamed(parts.back());
  const int bits = type.bits == 8 ? 16 : type.bits;
  if (op == "shl" || op == "shr") return index == 2 ? 32 : bits;
  if (op == "bfe") return index >= 2 ? 32 : bits;
  if (op == "bfi") return index >= 3 ? 32 : bits;
  if (op == "popc" || op == "clz" || op == "bfind") return index == 0 ? 32 : bits;
  if (has("wide")) return index == 0 || index == 3 ? 2 * bits : bits;
  if (op == "selp") return index == 3 ? 1 : bits;
  if (op == "setp") return index < 2 || index > 3 ? 1 : bits;
  if (op == "shfl") return index == 1 ? 1 : 32;
  if (op == "vote") return index == 2 || (index == 0 && has("ballot")) ? 32 : 1;
  if (op == "match") return index == 1 ? 1 : index == 2 ? bits : 32;
  if (op == "elect") return index == 1 ? 1 : 32;
  if (op == "isspacep") return index == 0 ? 1 : 64;
  if (op == "bar" || op == "barrier" || op == "redux" || op == "activemask" ||
      op == "nanosleep")
    return 32;
  if (bits == 0) return 32;
  return bits;
}

void Compiler::Instruction(Text opcode, Text rest, const Operand& guard, int line) {
  // "param::entry" is one part.
  std::vector<Text> parts;
  for (size_t begin = 0; begin <= opcode.size();) {
    size_t end = opcode.find('.', begin);
    if (end == Text::npos) end = opcode.size();
    parts.push_back(opcode.substr(begin, end - begin));
    begin = end + 1;
  }
  Instr in;
  in.guard = guard;
  in.line = line;
  for (Operand& operand : in.ops) operand = Nowhere();
  const Text op = parts[0];
  if (op == "call") return CallOf(rest, in);
  const std::vector<Text> args =
      rest.empty() ? std::vector<Text>{} : Split(rest, ',');
  std::string wait_for;
  if (op == "bra") {
    wait_for = std::string(args.at(0));
  } else if (op == "brx") {
    in.ops[0] = OperandOf(args.at(0), 32, false, true);
    size_t number;
    const Symbol* const table = Find(args.at(1), number);
    if (table == nullptr) throw Unknown("no table");
    in.targets = kernel_->tables[table->at].get();
  } else if (op == "ret" && unit_->callee != nullptr) {
    in.how = kInFunction;
    in.ops[0] = unit_->callee->returns;
  } else if (op == "ld" || op == "ldu" || op == "st" || op == "atom" ||
             op == "red" || op == "cp") {
    Memory(parts, args, in);
  } else {
    Operands(parts, args, in);
  }
  in.run = Decode(parts, in);
  if (in.run == nullptr) {
    ++kernel_->unknown[std::string(opcode)];
    return;
  }
  if ((op == "bar" || op == "barrier") && parts.size() > 1 && parts[1] != "warp")
    kernel_->has_barrier = true;
  if (!wait_for.empty()) unit_->jumps.emplace_back(unit_->code.size(), wait_for);
  Emit(in);
}

void Compiler::Operands(const std::vector<Text>& parts,
                        const std::vector<Text>& args, Instr& in) {
  const Text op = parts[0];
  const Type type = TypeNamed(parts.back());
  const bool is_float = type.kind == 'f';
  const bool exact = op != "cvt" && op != "mov" && op != "cvta";
  const auto elements = [&](Text vector) {
    return Split(vector.substr(1, vector.size() - 2), ',');
  };
  if (op == "mov" && args.at(0)[0] == '{') {
    in.how = kUnpacks;
    size_t i = 0;
    for (const Text element : elements(args[0]))
      in.ops[i++] = OperandOf(element, 32, false, false);
    in.count = static_cast<uint8_t>(i);
    in.ops[i] = OperandOf(args.at(1), type.bits, false, false);
    return;
  }
  if (op == "mov" && args.at(1)[0] == '{') {
    in.how = kPacks;
    in.ops[0] = OperandOf(args[0], type.bits, false, false);
    size_t i = 1;
    const std::vector<Text> values = elements(args[1]);
    for (const Text value : values)
      in.ops[i++] = OperandOf(value, type.bits / static_cast<int>(values.size()),
                              is_float, false);
    in.count = static_cast<uint8_t>(i - 1);
    return;
  }
  // Two results, where an instruction may have them: to|whether. Other operands
  // keep their numbers.
  size_t i = 0;
  in.count = static_cast<uint8_t>(args.size());
  const bool two = op == "setp" || op == "shfl" || op == "match" || op == "elect";
  for (size_t k = 0; k < args.size(); ++k) {
    if (k == 0 && two) {
      const size_t bar = args[0].find('|');
      in.ops[0] = OperandOf(Trimmed(args[0].substr(0, bar)), Wanted(parts, 0),
                            false, exact);
      if (bar != Text::npos)
        in.ops[1] = OperandOf(Trimmed(args[0].substr(bar + 1)), Wanted(parts, 1),
                              false, exact);
      i = 2;
      continue;
    }
    if (i >= std::size(in.ops)) throw Unknown("many operands");
    int wanted = Wanted(parts, i);
    bool of_float = is_float;
    if (op == "cvt" && k == 0) wanted = 64;
    in.ops[i] = OperandOf(args[k], wanted, of_float, exact);
    ++i;
  }
}

void Compiler::Address(Text text, Instr& in, Operand& base, int64_t& offset) {
  if (text.size() < 2 || text[0] != '[') throw Unknown("no address");
  text = Trimmed(text.substr(1, text.find(']') - 1));
  offset = 0;
  if (const size_t plus = text.find('+'); plus != Text::npos) {
    offset = std::strtoll(std::string(Trimmed(text.substr(plus + 1))).c_str(),
                          nullptr, 0);
    text = Trimmed(text.substr(0, plus));
  }
  size_t number;
  Symbol* const symbol = Find(text, number);
  if (symbol != nullptr &&
      (symbol->kind == Symbol::kRegister || symbol->kind == Symbol::kRegisters)) {
    base = RegisterOf(*symbol, number);
    return;
  }
  base = Nowhere();
  if (text[0] >= '0' && text[0] <= '9') {
    offset += std::strtoll(std::string(text).c_str(), nullptr, 0);
    return;
  }
  Space space = Space::kGlobal;
  offset += static_cast<int64_t>(AddressOf(text, space));
  in.space = space;
}

void Compiler::Memory(const std::vector<Text>& parts, const std::vector<Text>& args,
                      Instr& in) {
  const Text op = parts[0];
  const Type type = TypeNamed(parts.back());
  const bool is_float = type.kind == 'f';
  const int bits = type.bits == 8 ? 16 : type.bits;
  const auto elements = [&](Text text) {
    return text[0] == '{' ? Split(text.substr(1, text.size() - 2), ',')
                          : std::vector<Text>{text};
  };
  in.count = 1;
  if (op == "ld" || op == "ldu") {
    size_t i = 0;
    for (const Text to : elements(args.at(0)))
      in.ops[i++] = OperandOf(to, bits, is_float, false);
    in.count = static_cast<uint8_t>(i);
    Address(args.at(1), in, in.ops[i], in.offset);
    return;
  }
  if (op == "st" || op == "red") {
    Address(args.at(0), in, in.ops[0], in.offset);
    size_t i = 1;
    for (const Text from : elements(args.at(1)))
      in.ops[i++] = OperandOf(from, bits, is_float, false);
    in.count = static_cast<uint8_t>(i - 1);
    return;
  }
  if (op == "atom") {
    if (args.at(0)[0] == '{') throw Unknown("a vector");
    in.ops[0] = OperandOf(args[0], bits, is_float, true);
    Address(args.at(1), in, in.ops[1], in.offset);
    for (size_t i = 2; i < args.size(); ++i)
      in.ops[i] = OperandOf(args[i], bits, is_float, true);
    return;
  }
  if (args.size() < 3) return;  // cp.async's groups
  int64_t from;
  Address(args[1], in, in.ops[1], from);
  Address(args[0], in, in.ops[0], in.offset);
  if (from < 0 || from > INT32_MAX) throw Unknown("an offset");
  in.target = static_cast<uint32_t>(from);
  in.how = static_cast<int>(ValueOf(args[2], 32, false));
  if (args.size() > 3) in.ops[2] = OperandOf(args[3], 32, false, true);
}

void Compiler::CallOf(Text rest, Instr in) {
  std::vector<Text> args = Split(rest, ',');
  const auto names = [&](Text text) {
    const Text inner = Trimmed(text.substr(1, text.size() - 2));
    return inner.empty() ? std::vector<Text>{} : Split(inner, ',');
  };
  std::vector<Text> results, params;
  size_t i = 0;
  if (args.at(i)[0] == '(') results = names(args[i++]);
  const Text name = args.at(i++);
  if (i < args.size() && args[i][0] == '(') params = names(args[i++]);
  if (name == "__assertfail") {
    in.run = Decode({"trap"}, in);
    Emit(in);
    return;
  }
  Callee* const callee = CalleeOf(name);
  const auto copy = [&](uint64_t to, uint64_t from, size_t bytes) {
    Instr copies = in;
    copies.target = static_cast<uint32_t>(to);
    copies.offset = static_cast<int64_t>(from);
    copies.how = static_cast<int>(bytes);
    copies.run = CopyLocal();
    Emit(copies);
  };
  if (params.size() != callee->params.size() ||
      results.size() != callee->results.size())
    throw Unknown("a call with other parameters");
  Space space;
  for (size_t k = 0; k < params.size(); ++k)
    copy(callee->params[k], AddressOf(params[k], space),
         callee->function->params[k].bytes);
  in.ops[0] = callee->returns;
  in.run = Decode({"call"}, in);
  unit_->calls.emplace_back(unit_->code.size(), callee);
  Emit(in);
  for (size_t k = 0; k < results.size(); ++k)
    copy(AddressOf(results[k], space), callee->results[k],
         callee->function->results[k].bytes);
}

// --- Modules
// -----------------------------------------------------------------------

void ReadVariable(Text text, ModuleText& module) {
  Text values;
  if (const size_t equals = text.find('='); equals != Text::npos) {
    values = Trimmed(text.substr(equals + 1));
    text = text.substr(0, equals);
  }
  const Declared declared = Declaration(text);
  const std::vector<Text> words = Words(text);
  const auto has = [&](Text word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  if (has(".shared")) {
    module.shared[declared.name] = declared;
    module.shared_is_dynamic[declared.name] = declared.bytes == 0;
    return;
  }
  Variable& variable = module.module->globals[declared.name];
  variable.name = declared.name;
  if (!values.empty() && values[0] == '{')
    values = values.substr(1, values.rfind('}') - 1);
  size_t at = 0;
  variable.bytes.resize(declared.bytes);
  if (Trimmed(values).empty()) return;
  for (Text value : Split(values, ',')) {
    while (!value.empty() && (value[0] == '{' || value.back() == '}'))
      value = Trimmed(value[0] == '{' ? value.substr(1)
                                      : value.substr(0, value.size() - 1));
    if (StartsWith(value, "generic(")) value = value.substr(8, value.size() - 9);
    uint64_t number = 0;
    if (StartsWith(value, "0f") || StartsWith(value, "0d") ||
        StartsWith(value, "0F"))
      number = std::strtoull(std::string(value.substr(2)).c_str(), nullptr, 16);
    else if (!value.empty() &&
             (value[0] == '-' || (value[0] >= '0' && value[0] <= '9')))
      number = value[0] == '-'
                   ? static_cast<uint64_t>(
                         std::strtoll(std::string(value).c_str(), nullptr, 0))
                   : std::strtoull(std::string(value).c_str(), nullptr, 0);
    else
      variable.addresses.emplace_back(at, std::string(value));
    const auto size = static_cast<size_t>(declared.element);
    if (at + size > variable.bytes.size()) variable.bytes.resize(at + size);
    std::memcpy(variable.bytes.data() + at, &number, size);
    at += size;
  }
}

void ReadFunction(Text header, Text body, int line, ModuleText& module,
                  std::vector<std::string>& entries) {
  Function function;
  const auto params = [](Text list) {
    std::vector<Declared> found;
    for (Text param : Split(list, ',')) {
      if (param.empty()) continue;
      const size_t word = param.find(".param");
      found.push_back(Declaration(param.substr(word == Text::npos ? 0 : word + 6)));
    }
    return found;
  };
  const bool is_entry = header.find(".entry") != Text::npos;
  const size_t word = header.find(is_entry ? ".entry" : ".func");
  Text rest = Trimmed(header.substr(word + (is_entry ? 6 : 5)));
  if (!rest.empty() && rest[0] == '(') {
    const size_t close = rest.find(')');
    function.results = params(rest.substr(1, close - 1));
    rest = Trimmed(rest.substr(close + 1));
  }
  const size_t open = rest.find('(');
  Text name = Trimmed(rest.substr(0, open));
  if (open == Text::npos) name = Words(rest).at(0);
  function.name = std::string(name);
  if (open != Text::npos) {
    const size_t close = rest.find(')', open);
    function.params = params(rest.substr(open + 1, close - open - 1));
  }
  function.body = body;
  function.line = line;
  if (body.empty() && module.functions.count(function.name) != 0) return;
  if (is_entry) entries.push_back(function.name);
  module.functions[function.name] = std::move(function);
}

}  // namespace

bool IsText(const void* data) {
  const auto* const bytes = static_cast<const unsigned char*>(data);
  return bytes[0] == '/' || bytes[0] == '.' || bytes[0] == '\n' || bytes[0] == ' ';
}

std::unique_ptr<Module> Parse(const char* source, char* (*place)(size_t bytes)) {
  auto module = std::make_unique<Module>();
  const std::string whole = WithoutComments(source);
  const Text text(whole);
  ModuleText read;
  read.module = module.get();
  std::vector<std::string> entries;
  for (size_t i = 0; i < text.size();) {
    if (IsSpace(text[i])) {
      ++i;
      continue;
    }
    const Text rest = text.substr(i);
    if (StartsWith(rest, ".version") || StartsWith(rest, ".target") ||
        StartsWith(rest, ".address_size") || StartsWith(rest, ".file")) {
      i = std::min(text.size(), text.find('\n', i));
      continue;
    }
    const size_t brace = text.find('{', i), stop = text.find(';', i);
    const bool is_code =
        rest.substr(0, std::min(brace, stop) - i).find(".entry") != Text::npos ||
        rest.substr(0, std::min(brace, stop) - i).find(".func") != Text::npos;
    if (StartsWith(rest, ".section") || (is_code && brace < stop)) {
      size_t end = brace + 1;
      for (int depth = 1; end < text.size() && depth != 0; ++end)
        depth += text[end] == '{' ? 1 : text[end] == '}' ? -1 : 0;
      if (is_code)
        ReadFunction(text.substr(i, brace - i),
                     text.substr(brace + 1, end - brace - 2),
                     1 + static_cast<int>(
                             std::count(text.begin(), text.begin() + brace, '\n')),
                     read, entries);
      i = end;
      continue;
    }
    if (stop == Text::npos) break;
    const Text statement = Trimmed(text.substr(i, stop - i));
    if (is_code)
      ReadFunction(statement, {}, 0, read, entries);
    else if (!statement.empty() && statement.find_first_of("[=") != Text::npos)
      ReadVariable(statement, read);
    else if (StartsWith(statement, ".global") ||
             statement.find(" .global ") != Text::npos ||
             statement.find(".shared") != Text::npos)
      ReadVariable(statement, read);
    i = stop + 1;
  }
  for (auto& [name, variable] : module->globals) {
    variable.at = place(variable.bytes.size());
    std::memcpy(variable.at, variable.bytes.data(), variable.bytes.size());
  }
  for (auto& [name, variable] : module->globals) {
    for (const auto& [at, other] : variable.addresses) {
      const auto found = module->globals.find(other);
      if (found != module->globals.end())
        std::memcpy(variable.at + at, &found->second.at, sizeof(char*));
    }
  }
  for (const std::string& name : entries) {
    auto kernel = std::make_unique<Kernel>();
    kernel->name = name;
    Compiler(read, kernel.get()).Compile(read.functions.at(name));
    module->kernels[name] = std::move(kernel);
  }
  return module;
}

}  // namespace ptx
