// Which targets this machine can run, and which sources the library was made of.
#include <cstdint>

namespace {

bool runs(const char* target) {
#if defined(__x86_64__)
    switch (target[3]) {  // generic, avx2, avx512
        case '5':
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
        case '2':
            return __builtin_cpu_supports("avx2");
        default:
            break;
    }
#endif
    return target[0] == 'g';
}

}  // namespace

// The names that were compiled, spaces between them, plainest first.
extern "C" __attribute__((visibility("default"))) const char* autopar_compiled() { return AUTOPAR_TARGETS; }

// 1 if this machine runs a compiled target.
extern "C" __attribute__((visibility("default"))) std::int32_t autopar_runs(const char* target) {
    return runs(target) ? 1 : 0;
}

// SHA-256 over the names and digests of the sources.
extern "C" __attribute__((visibility("default"))) const char* autopar_sources() { return AUTOPAR_SOURCES; }
