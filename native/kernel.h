// What a kernel file needs. A kernel is a C function of raw pointers and numbers that returns a Status; nothing of it
// throws. Each file is compiled once for each target with AUTOPAR_TARGET set, so what isn't exported stays in an
// anonymous namespace, and no template of the standard library is instantiated (the linker would keep one copy of it for
// all targets, perhaps one that this machine cannot run).
#pragma once

#include <cstdint>

#define AUTOPAR_JOIN_(name, target) autopar_##name##_##target
#define AUTOPAR_JOIN(name, target) AUTOPAR_JOIN_(name, target)

// AUTOPAR_KERNEL(dropout)(...) { ... } exports autopar_dropout_avx2, autopar_dropout_generic, ...
#define AUTOPAR_KERNEL(name) \
    extern "C" __attribute__((visibility("default"))) std::int32_t AUTOPAR_JOIN(name, AUTOPAR_TARGET)

namespace autopar {

// As in native.py.
enum Status : std::int32_t { kDone = 0, kUnknownDtype = 1, kTooManyDims = 2 };
enum Dtype : std::int32_t {
    kNone = 0,
    kFloat32 = 1,
    kFloat64 = 2,
    kBFloat16 = 3,
    kFloat16 = 4,
    kInt64 = 5,
    kInt32 = 6,
    kInt16 = 7,
    kInt8 = 8,
    kUInt8 = 9,
    kBool = 10
};

using Part = void (*)(void* context, std::int64_t first, std::int64_t last);

// Calls run(context, first, last) on parts that cover 0 .. count: at most `threads` at a time, each but the last a
// multiple of `grain`. Runs on the calling thread where threads cannot be had.
void parallel(std::int64_t count, std::int64_t grain, std::int32_t threads, Part run, void* context);

// parallel with a callable.
template <class F>
inline void parallel(std::int64_t count, std::int64_t grain, std::int32_t threads, F& part) {
    parallel(
        count, grain, threads,
        [](void* f, std::int64_t first, std::int64_t last) { (*static_cast<F*>(f))(first, last); }, &part);
}

}  // namespace autopar
