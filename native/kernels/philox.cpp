// Random numbers and dropout, from the generator of philox.h.
#include <cmath>

#include "../half.h"
#include "../philox.h"

namespace {

inline double as_double(uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint64_t as_bits(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline uint64_t wide(const uint32_t* w) { return w[0] | static_cast<uint64_t>(w[1]) << 32; }

constexpr uint64_t kOne = 0x3FF0000000000000, kMantissa = 0x000FFFFFFFFFFFFF;

// In [1, 2), from the upper 52 bits.
inline double unit(uint64_t bits) { return as_double(kOne | bits >> 12); }

// Coefficients as in philox.py: 1/3, 1/5, ... of the series of log((1 + z) / (1 - z)) / 2, and those of the sine.
constexpr double kLog[] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11, 1.0 / 13,
                           1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23};
constexpr double kSine[] = {-1.0 / 6,
                            1.0 / 120,
                            -1.0 / 5040,
                            1.0 / 362880,
                            -1.0 / 39916800,
                            1.0 / 6227020800,
                            -1.0 / 1307674368000,
                            1.0 / 355687428096000,
                            -1.0 / 121645100408832000,
                            1.0 / 51090942171709440000.0,
                            -1.0 / 25852016738884976640000.0};
constexpr double kLog2 = 0.6931471805599453, kRoot2 = 1.4142135623730951, kTurn = 6.283185307179586;

template <int k, int n>
inline double polynomial(const double (&c)[n], double x) {
    if constexpr (k + 1 == n) {
        return c[k];
    } else {
        return polynomial<k + 1>(c, x) * x + c[k];
    }
}

// Natural logarithm of a normal number, by sums, products and one quotient only: the same bits wherever those are IEEE's.
inline double logarithm(double x) {
    const uint64_t bits = as_bits(x);
    const double exponent = as_double(0x4330000000000000 | bits >> 52) - (4503599627370496.0 + 1023.0);
    const double m = as_double(kOne | (bits & kMantissa));
    const bool large = m > kRoot2;
    const double reduced = large ? m * 0.5 : m, power = large ? exponent + 1.0 : exponent;
    const double z = (reduced - 1.0) / (reduced + 1.0), s = z * z, t = 2.0 * z;
    return power * kLog2 + (t + t * (s * polynomial<0>(kLog, s)));
}

// n standard normal numbers, by Box and Muller, from four words each. Simple loops, which compilers make vectors of.
template <class T>
void normals(T* __restrict out, const uint32_t* words, int64_t n) {
    constexpr int64_t kAtOnce = 128;
    uint64_t first[kAtOnce], second[kAtOnce];
    for (; n > 0; n -= kAtOnce, out += kAtOnce, words += 4 * kAtOnce) {
        const int64_t here = n < kAtOnce ? n : kAtOnce;
        for (int64_t j = 0; j < here; ++j) {
            first[j] = wide(words + 4 * j);
            second[j] = wide(words + 4 * j + 2);
        }
        for (int64_t j = 0; j < here; ++j) {
            const double radius = std::sqrt(-2.0 * logarithm((unit(first[j]) - 1.0) + 0x1p-53));
            const double y = (0.25 - std::fabs(unit(second[j]) - 1.5)) * kTurn, s = y * y;
            out[j] = static_cast<T>(radius * (y + y * (s * polynomial<0>(kSine, s))));
        }
    }
}

inline float scaled(float x, float factor) { return x * factor; }
inline double scaled(double x, double factor) { return x * factor; }
inline uint16_t scaled(uint16_t x, float factor) { return to_bf16(from_bf16(x) * factor); }

void keep_above(uint8_t* __restrict mask, const uint32_t* __restrict words, uint32_t least, uint8_t some, int64_t n) {
    for (int64_t j = 0; j < n; ++j) mask[j] = static_cast<uint8_t>(words[j] >= least) & some;
}

template <class T, class Factor>
void keep(T* __restrict out, const T* __restrict x, const uint8_t* __restrict mask, Factor scale, int64_t n) {
    for (int64_t j = 0; j < n; ++j) out[j] = scaled(x[j], mask[j] ? scale : Factor(0));
}

bool keep_typed(int32_t dtype, void* out, const void* x, const uint8_t* mask, double scale, int64_t at, int64_t n) {
    switch (dtype) {
        case autopar::kNone:
            return true;
        case autopar::kFloat32:
            keep(static_cast<float*>(out) + at, static_cast<const float*>(x) + at, mask + at,
                 static_cast<float>(scale), n);
            return true;
        case autopar::kFloat64:
            keep(static_cast<double*>(out) + at, static_cast<const double*>(x) + at, mask + at, scale, n);
            return true;
        case autopar::kBFloat16:
            keep(static_cast<uint16_t*>(out) + at, static_cast<const uint16_t*>(x) + at, mask + at,
                 static_cast<float>(scale), n);
            return true;
        default:
            return false;
    }
}

}  // namespace

// out: count * width words, as int32; width 1, 2 or 4.
AUTOPAR_KERNEL(words)
(void* out, int32_t width, const int64_t* space, int64_t count, uint64_t key, uint64_t step, int32_t threads) {
    if (!fits(space)) return autopar::kTooManyDims;
    uint32_t* to = static_cast<uint32_t*>(out);
    auto copy = [&](int64_t at, int64_t n, const uint32_t* words) {
        std::memcpy(to + at * width, words, n * width * sizeof(uint32_t));
    };
    const Stream stream{key, step};
    if (width == 4) in_chunks<4>(space, count, stream, threads, copy);
    if (width == 2) in_chunks<2>(space, count, stream, threads, copy);
    if (width == 1) in_chunks<1>(space, count, stream, threads, copy);
    return autopar::kDone;
}

// out: numbers in [0, 1): 24 bits of one word as float32, or 53 bits of two as float64.
AUTOPAR_KERNEL(uniform)
(void* out, int32_t dtype, const int64_t* space, int64_t count, uint64_t key, uint64_t step, int32_t threads) {
    if (!fits(space)) return autopar::kTooManyDims;
    const Stream stream{key, step};
    if (dtype == autopar::kFloat32) {
        in_chunks<1>(space, count, stream, threads, [&](int64_t at, int64_t n, const uint32_t* words) {
            float* to = static_cast<float*>(out) + at;
            for (int64_t j = 0; j < n; ++j) to[j] = static_cast<float>(static_cast<int32_t>(words[j] >> 8)) * 0x1p-24f;
        });
        return autopar::kDone;
    }
    if (dtype == autopar::kFloat64) {
        in_chunks<2>(space, count, stream, threads, [&](int64_t at, int64_t n, const uint32_t* words) {
            double* to = static_cast<double*>(out) + at;
            for (int64_t j = 0; j < n; ++j) {
                to[j] = static_cast<double>(static_cast<int64_t>(wide(words + 2 * j) >> 11)) * 0x1p-53;
            }
        });
        return autopar::kDone;
    }
    return autopar::kUnknownDtype;
}

// out: standard normal numbers from four words each, computed in double precision.
AUTOPAR_KERNEL(normal)
(void* out, int32_t dtype, const int64_t* space, int64_t count, uint64_t key, uint64_t step, int32_t threads) {
    if (!fits(space)) return autopar::kTooManyDims;
    const Stream stream{key, step};
    if (dtype == autopar::kFloat32) {
        in_chunks<4>(space, count, stream, threads, [&](int64_t at, int64_t n, const uint32_t* words) {
            normals(static_cast<float*>(out) + at, words, n);
        });
        return autopar::kDone;
    }
    if (dtype == autopar::kFloat64) {
        in_chunks<4>(space, count, stream, threads, [&](int64_t at, int64_t n, const uint32_t* words) {
            normals(static_cast<double*>(out) + at, words, n);
        });
        return autopar::kDone;
    }
    return autopar::kUnknownDtype;
}

// mask: 1 where the element's word is at least `threshold` (0 .. 2**32), one byte each; out: x * mask * scale. x and out
// are null under dtype 0.
AUTOPAR_KERNEL(dropout)
(void* out, void* mask, const void* x, int32_t dtype, uint64_t threshold, double scale, const int64_t* space,
 int64_t count, uint64_t key, uint64_t step, int32_t threads) {
    if (!fits(space)) return autopar::kTooManyDims;
    if (!keep_typed(dtype, out, x, static_cast<uint8_t*>(mask), scale, 0, 0)) return autopar::kUnknownDtype;
    const uint32_t least = threshold > 0xFFFFFFFF ? 0xFFFFFFFF : static_cast<uint32_t>(threshold);
    const uint8_t some = threshold > 0xFFFFFFFF ? 0 : 1;
    in_chunks<1>(space, count, Stream{key, step}, threads, [&](int64_t at, int64_t n, const uint32_t* words) {
        keep_above(static_cast<uint8_t*>(mask) + at, words, least, some, n);
        keep_typed(dtype, out, x, static_cast<uint8_t*>(mask), scale, at, n);
    });
    return autopar::kDone;
}

// out: gradient * mask * scale, `count` of them.
AUTOPAR_KERNEL(dropout_backward)
(void* out, const void* gradient, const void* mask, int32_t dtype, double scale, int64_t count, int32_t threads) {
    const uint8_t* kept = static_cast<const uint8_t*>(mask);
    if (!keep_typed(dtype, out, gradient, kept, scale, 0, 0)) return autopar::kUnknownDtype;
    auto part = [&](int64_t first, int64_t last) {
        keep_typed(dtype, out, gradient, kept, scale, first, last - first);
    };
    if (count > 0) autopar::parallel(count, kGrain, threads, part);
    return autopar::kDone;
}
