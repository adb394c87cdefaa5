// Binding helpers: native argument structs are filled from Python by field name, pointers as integers.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace kdecode {

namespace nb = nanobind;

// Exposes a pointer member as an integer property (a tensor's data_ptr(); 0 is null).
template <class Args, class T>
void bind_pointer(nb::class_<Args>& cls, const char* name, T* Args::*member) {
  cls.def_prop_rw(
      name, [member](const Args& args) { return reinterpret_cast<std::uintptr_t>(args.*member); },
      [member](Args& args, std::uintptr_t address) { args.*member = reinterpret_cast<T*>(address); });
}

}  // namespace kdecode
