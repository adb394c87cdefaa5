#include <stdexcept>

#include "kernel_table.h"

namespace kdecode {

// Defined by kernel_table.cpp, once an instruction set.
namespace portable {
const KernelTable& table();
}
#ifdef KD_HAS_X86
namespace avx2 {
const KernelTable& table();
}
namespace avx512 {
const KernelTable& table();
}
#endif

namespace {

// The best first. The features are those that CMakeLists.txt lets the compiler use.
std::vector<const KernelTable*> supported_tables() {
  std::vector<const KernelTable*> tables;
#ifdef KD_HAS_X86
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
                          __builtin_cpu_supports("avx512vnni");
  if (has_avx512) tables.push_back(&avx512::table());
  if (has_avx2) tables.push_back(&avx2::table());
#endif
  tables.push_back(&portable::table());
  return tables;
}

}  // namespace

StepFunction KernelTable::step(const std::string& name) const {
  for (const Step& step : steps) {
    if (name == step.name) return step.function;
  }
  throw std::invalid_argument("There is no native step named \"" + name + "\".");
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : supported_tables()) names.emplace_back(table->isa);
  return names;
}

const KernelTable& kernel_table(const std::string& isa) {
  std::string known;
  for (const KernelTable* table : supported_tables()) {
    if (isa == table->isa) return *table;
    known += known.empty() ? table->isa : std::string(", ") + table->isa;
  }
  throw std::invalid_argument("Instruction set \"" + isa + "\" is not supported here; this processor and build have: " + known + ".");
}

}  // namespace kdecode
