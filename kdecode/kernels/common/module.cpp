// The Python module `kdecode.kernels.common._native`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "bind.h"
#include "kernel_table.h"
#include "packed12.h"
#include "probe.h"
#include "steps.h"

namespace kdecode {

// Each is in its op's bind.cpp.
#define KD_STEP(name, Args) void bind_##name(nb::module_&);
KD_STEPS(KD_STEP)
#undef KD_STEP
void bind_linear(nb::module_&);
void bind_gated(nb::module_&);
void bind_convolve(nb::module_&);
void bind_delta_rule_chunks(nb::module_&);
void bind_prompt_attention(nb::module_&);
void bind_mix_rows(nb::module_&);
void bind_shared_exchange(nb::module_&);

namespace {

std::vector<std::string> step_names() {
#define KD_STEP(name, Args) #name,
  return {KD_STEPS(KD_STEP)};
#undef KD_STEP
}

// The address of a step's arguments inside their Python object; a type error names what is expected.
template <class Args>
const void* args_of(const char* step, const char* type, nb::handle args) {
  const Args* pointer = nullptr;
  if (!nb::try_cast(args, pointer) || pointer == nullptr) {
    throw nb::type_error((std::string("Step \"") + step + "\" takes a " + type + ".").c_str());
  }
  return pointer;
}

const void* step_args(const std::string& step, nb::handle args) {
#define KD_STEP(name, Args) \
  if (step == #name) return args_of<Args>(#name, #Args, args);
  KD_STEPS(KD_STEP)
#undef KD_STEP
  throw std::invalid_argument("There is no native step named \"" + step + "\".");
}

class BoundProgram {
 public:
  BoundProgram(Pool& pool, const std::string& isa) : program_(pool), table_(kernel_table(isa)) {}

  void add(const std::string& name, nb::handle args) { program_.add(table_.step(name), step_args(name, args)); }
  int size() const { return program_.size(); }
  void run(int first, int last) { program_.run(first, last); }

 private:
  Program program_;
  const KernelTable& table_;
};

int columns_multiple(TileFormat format) {
  if (format == TileFormat::kPacked12) return kPacked12Columns;
  return format == TileFormat::kBf16 ? 2 : 32;
}

// corrections: of kPacked12, null if no tile has one.
Tiles make_tiles(std::uintptr_t data, std::uintptr_t scales, std::int64_t rows, std::int64_t cols, TileFormat format,
                 std::uintptr_t corrections) {
  const int multiple = columns_multiple(format);
  const bool has_scales = columns_multiple(format) == 32;
  if (data == 0 || rows < 1 || cols < multiple || cols % multiple != 0 || has_scales == (scales == 0)) {
    throw std::invalid_argument("Tiles of " + std::to_string(rows) + " rows and " + std::to_string(cols) +
                                " columns: both have to be positive, the columns a multiple of " + std::to_string(multiple) +
                                " in this format, and scales are there if and only if a group of 32 columns has one.");
  }
  Tiles tiles;
  tiles.data = reinterpret_cast<const void*>(data);
  tiles.scales = reinterpret_cast<const std::uint8_t*>(scales);
  tiles.rows = rows;
  tiles.cols = cols;
  tiles.format = format;
  tiles.corrections = reinterpret_cast<const std::uint32_t*>(corrections);
  return tiles;
}

void check_num_rows(int num_rows) {
  if (num_rows < 1 || num_rows > kMaxRows) {
    throw std::invalid_argument(std::to_string(num_rows) + " rows; a tile kernel takes 1 to " + std::to_string(kMaxRows) + ".");
  }
}

// The corrections, or None if there would be more than max_corrections.
std::optional<std::vector<std::uint32_t>> run_pack12(const Tiles& source, std::uintptr_t out, std::int64_t max_corrections) {
  if (source.format != TileFormat::kBf16 || source.cols % kPacked12Columns != 0 || source.cols > kPacked12MaxCols) {
    throw std::invalid_argument("Only bf16 tiles are packed, with a multiple of " + std::to_string(kPacked12Columns) +
                                " columns up to " + std::to_string(kPacked12MaxCols) + "; these have " +
                                std::to_string(source.cols) + ".");
  }
  std::vector<std::uint32_t> corrections;
  if (!pack12(source, reinterpret_cast<std::uint8_t*>(out), max_corrections, corrections)) return std::nullopt;
  return corrections;
}

std::int64_t run_differing_tiles(const std::string& isa, const Tiles& w, const Tiles& other) {
  if (w.rows != other.rows || w.cols != other.cols) throw std::invalid_argument("Two matrices of one shape can be compared.");
  return differing_tiles(isa, w, other);
}

void run_tile_products(const std::string& isa, const Tiles& w, int num_rows, std::uintptr_t x, std::uintptr_t y) {
  check_num_rows(num_rows);
  tile_products(isa, w, num_rows, reinterpret_cast<const bf16*>(x), reinterpret_cast<float*>(y));
}

std::vector<double> run_time_tile_dot(Pool& pool, const std::string& isa, const Tiles& w, int num_rows, std::uintptr_t x,
                                      std::uintptr_t y, int repeats) {
  check_num_rows(num_rows);
  return time_tile_dot(pool, isa, w, num_rows, reinterpret_cast<const bf16*>(x), reinterpret_cast<float*>(y), repeats);
}

std::vector<double> run_time_stream(Pool& pool, std::uintptr_t memory, std::int64_t num_bytes, int repeats) {
  if (memory == 0 || num_bytes < 256 || num_bytes % 256 != 0) {
    throw std::invalid_argument(std::to_string(num_bytes) + " bytes to read; it has to be a positive multiple of 256.");
  }
  return time_stream(pool, reinterpret_cast<const std::uint64_t*>(memory), num_bytes, repeats);
}

void run_vmath(const std::string& isa, const std::string& function, std::uintptr_t x, std::uintptr_t second, std::int64_t count,
               std::uintptr_t out) {
  const auto floats = [](std::uintptr_t address) { return reinterpret_cast<float*>(address); };
  if (!kernel_table(isa).vmath_probe(function.c_str(), floats(x), floats(second), count, floats(out))) {
    throw std::invalid_argument("vmath.h has no function \"" + function + "\".");
  }
}

void bind_types(nb::module_& m) {
  nb::enum_<TileFormat>(m, "TileFormat").value("bf16", TileFormat::kBf16).value("mxfp4", TileFormat::kMxfp4)
      .value("packed12", TileFormat::kPacked12).value("int4", TileFormat::kInt4).value("int8", TileFormat::kInt8);
  nb::class_<Tiles>(m, "Tiles", "A packed matrix at given addresses; its memory is the caller's.")
      .def(nb::new_(&make_tiles), nb::arg("data"), nb::arg("scales"), nb::arg("rows"), nb::arg("cols"), nb::arg("format"),
           nb::arg("corrections") = 0)
      .def_ro("rows", &Tiles::rows)
      .def_ro("cols", &Tiles::cols)
      .def_ro("format", &Tiles::format);
  nb::class_<TileList>(m, "TileList", "The same matrix of every expert of a layer.")
      .def(nb::init<std::vector<Tiles>>(), nb::arg("tiles"))
      .def("__len__", [](const TileList& list) { return list.at.size(); });
}

void bind_running(nb::module_& m) {
  nb::class_<Pool>(m, "Pool", "Threads that run native programs, the caller among them. Threads do not survive a fork.")
      .def(nb::init<int, bool>(), nb::arg("num_threads"), nb::arg("can_oversubscribe") = false)
      .def_prop_ro("num_threads", &Pool::num_threads);
  nb::class_<BoundProgram>(m, "Program", "Native steps in order, run by one call.")
      .def(nb::init<Pool&, const std::string&>(), nb::arg("pool"), nb::arg("isa"), nb::keep_alive<1, 2>())
      // The program reads the arguments on every run.
      .def("add", &BoundProgram::add, nb::arg("name"), nb::arg("args"), nb::keep_alive<1, 3>())
      .def("__len__", &BoundProgram::size)
      .def("run", &BoundProgram::run, nb::arg("first"), nb::arg("last"), nb::call_guard<nb::gil_scoped_release>(),
           "Runs steps [first, last), each complete before the next begins.");
}

void bind_probes(nb::module_& m) {
  const auto released = nb::call_guard<nb::gil_scoped_release>();
  m.def("tile_dot", run_tile_products, released, nb::arg("isa"), nb::arg("w"), nb::arg("num_rows"), nb::arg("x"), nb::arg("y"),
        "y [tiles, num_rows, 16] fp32 = W x for x [num_rows, cols] bf16, on this thread.");
  m.def("time_tile_dot", run_time_tile_dot, released, nb::arg("pool"), nb::arg("isa"), nb::arg("w"), nb::arg("num_rows"),
        nb::arg("x"), nb::arg("y"), nb::arg("repeats"), "Seconds of each of `repeats` products, as tile_dot but on all threads.");
  m.def("pack12", run_pack12, released, nb::arg("source"), nb::arg("out"), nb::arg("max_corrections"),
        "Packs bf16 tiles at 12 bits a weight; their corrections, or None if there are more than that.");
  m.def("differing_tiles", run_differing_tiles, released, nb::arg("isa"), nb::arg("w"), nb::arg("other"),
        "Number of tiles that are not equal, bit by bit, once unpacked.");
  m.def("time_stream", run_time_stream, released, nb::arg("pool"), nb::arg("memory"), nb::arg("num_bytes"), nb::arg("repeats"),
        "Seconds of each of `repeats` passes in which all threads together read num_bytes (a multiple of 256) at memory.");
  m.def("vmath", run_vmath, released, nb::arg("isa"), nb::arg("function"), nb::arg("x"), nb::arg("second"), nb::arg("count"),
        nb::arg("out"), "out [count] fp32 = function(x), or function(x, second): the elementwise maths, for tests.");
  m.def("pool_self_test", pool_self_test, released, nb::arg("pool"), nb::arg("jobs"), nb::arg("phases"), nb::arg("splits"),
        nb::arg("items"), "Number of work items that a pool handed out wrongly; 0 if it is sound.");
}

}  // namespace
}  // namespace kdecode

NB_MODULE(_native, m) {
  using namespace kdecode;
  m.doc() = "Native kernels: thread pool, programs, tile kernels and one argument class a step.";
  m.def("supported_isas", supported_isas, "Instruction sets that this processor and build have, the best first.");
  m.def("detect_isa", [] { return supported_isas().front(); }, "The best supported instruction set.");
  m.def("available_cores", available_cores, "Cores that this process may use.");
  m.def("step_names", step_names, "The native steps.");
  bind_types(m);
  bind_running(m);
  bind_probes(m);
  bind_linear(m);
  bind_gated(m);
  bind_convolve(m);
  bind_delta_rule_chunks(m);
  bind_prompt_attention(m);
  bind_mix_rows(m);
  bind_shared_exchange(m);
#define KD_STEP(name, Args) bind_##name(m);
  KD_STEPS(KD_STEP)
#undef KD_STEP
}
