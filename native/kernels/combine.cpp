// Sums and maxima of the parts of several ranks, in the order of ranks; bfloat16 and float16 are added up in float32 and
// rounded once. Maxima keep NaN. For the collectives of native/shared.
#include "../half.h"
#include "../kernel.h"

namespace {

using std::int32_t;
using std::int64_t;
using std::uint16_t;

constexpr int64_t kBlock = 1024;  // elements that are added up in the first cache

template <class Stored, class Wide>
struct Plain {
    using S = Stored;
    using W = Wide;
    static W widen(S x) { return static_cast<W>(x); }
    static S narrow(W x) { return static_cast<S>(x); }
    static W sum(W a, W b) { return static_cast<W>(a + b); }
    static W larger(W a, W b) { return b > a || b != b ? b : a; }
};
// Sums of integers wrap: they are made without a sign.
template <class Stored, class Unsigned>
struct Whole : Plain<Stored, Stored> {
    static Stored sum(Stored a, Stored b) {
        return static_cast<Stored>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
    }
};
struct Truth : Plain<std::uint8_t, std::uint8_t> {
    static std::uint8_t sum(std::uint8_t a, std::uint8_t b) { return (a | b) != 0; }
};
struct BFloat16 : Plain<uint16_t, float> {
    static float widen(uint16_t x) { return from_bf16(x); }
    static uint16_t narrow(float x) { return to_bf16(x); }
};
struct Float16 : Plain<uint16_t, float> {
    static float widen(uint16_t x) { return from_f16(x); }
    static uint16_t narrow(float x) { return to_f16(x); }
};

template <class T, bool kLargest>
inline typename T::W both(typename T::W a, typename T::W b) {
    return kLargest ? T::larger(a, b) : T::sum(a, b);
}

template <class T, bool kLargest>
inline void add(typename T::W* __restrict total, const typename T::S* __restrict part, int64_t n) {
    for (int64_t j = 0; j < n; ++j) total[j] = both<T, kLargest>(total[j], T::widen(part[j]));
}

// Two parts need no total in between.
template <class T, bool kLargest>
void combine_two(typename T::S* out, const typename T::S* a, const typename T::S* b, int64_t count) {
#pragma GCC ivdep  // out may be a or b, but then element by element
    for (int64_t j = 0; j < count; ++j) out[j] = T::narrow(both<T, kLargest>(T::widen(a[j]), T::widen(b[j])));
}

// out may be one of the parts.
template <class T, bool kLargest>
void combine(void* out, const void* const* parts, int32_t n, int64_t count) {
    using S = typename T::S;
    if (n == 2) {
        combine_two<T, kLargest>(static_cast<S*>(out), static_cast<const S*>(parts[0]), static_cast<const S*>(parts[1]), count);
        return;
    }
    alignas(64) typename T::W total[kBlock];
    for (int64_t at = 0; at < count; at += kBlock) {
        const int64_t here = count - at < kBlock ? count - at : kBlock;
        const S* first = static_cast<const S*>(parts[0]) + at;
        for (int64_t j = 0; j < here; ++j) total[j] = T::widen(first[j]);
        for (int32_t q = 1; q < n; ++q) add<T, kLargest>(total, static_cast<const S*>(parts[q]) + at, here);
        S* __restrict to = static_cast<S*>(out) + at;
        for (int64_t j = 0; j < here; ++j) to[j] = T::narrow(total[j]);
    }
}

template <class T>
int32_t run(void* out, const void* const* parts, int32_t n, int64_t count, int32_t largest) {
    if (largest != 0) {
        combine<T, true>(out, parts, n, count);
    } else {
        combine<T, false>(out, parts, n, count);
    }
    return autopar::kDone;
}

}  // namespace

AUTOPAR_KERNEL(combine)
(void* out, const void* const* parts, int32_t n, int64_t count, int32_t dtype, int32_t largest) {
    switch (dtype) {
        case autopar::kFloat32:
            return run<Plain<float, float>>(out, parts, n, count, largest);
        case autopar::kFloat64:
            return run<Plain<double, double>>(out, parts, n, count, largest);
        case autopar::kBFloat16:
            return run<BFloat16>(out, parts, n, count, largest);
        case autopar::kFloat16:
            return run<Float16>(out, parts, n, count, largest);
        case autopar::kInt64:
            return run<Whole<int64_t, std::uint64_t>>(out, parts, n, count, largest);
        case autopar::kInt32:
            return run<Whole<int32_t, std::uint32_t>>(out, parts, n, count, largest);
        case autopar::kInt16:
            return run<Whole<std::int16_t, std::uint16_t>>(out, parts, n, count, largest);
        case autopar::kInt8:
            return run<Whole<std::int8_t, std::uint8_t>>(out, parts, n, count, largest);
        case autopar::kUInt8:
            return run<Whole<std::uint8_t, std::uint8_t>>(out, parts, n, count, largest);
        case autopar::kBool:
            return run<Truth>(out, parts, n, count, largest);
        default:
            return autopar::kUnknownDtype;
    }
}
