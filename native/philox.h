// Random numbers of a piece of a tensor, by Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011).
//
// A stream is a sequence of 32-bit words: word q is output q % 4 of the block whose counter is (q / 4 as 64 bits, step as
// 64 bits), under a 64-bit key. Element i (row-major, of the whole tensor) of a draw of w words an element has the words
// i * w .. i * w + w - 1. autopar/runtime/philox.py says the same in PyTorch; both give the same bits.
//
// A piece is an index space: element (i0, i1, ...) of it is number base + sum of i_d * stride_d of the whole. Kernels take
// it as int64 {base, dims, sizes..., strides...}; the last stride is 1.
#pragma once

#include <cstring>

#include "kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

// Lanes of 64 bits, each with a 32-bit word in its lower half; the upper half may hold anything, but for a product.
//   low(a, m): the 64-bit product of the lower half of a and m     high(p): upper half of a product, as a lane
//   store: words 0..3 of each block, block after block

#if defined(AUTOPAR_avx512)

constexpr int kLanes = 8, kGroups = 4;
using Lane = __m512i;
inline Lane fill(uint64_t a) { return _mm512_set1_epi64(static_cast<long long>(a)); }
inline Lane count_from(uint64_t a) { return _mm512_add_epi64(fill(a), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7)); }
inline Lane load(const uint64_t* a) { return _mm512_loadu_si512(a); }
inline Lane low(Lane a, Lane m) { return _mm512_mul_epu32(a, m); }
inline Lane high(Lane a) { return _mm512_srli_epi64(a, 32); }
inline Lane mix(Lane a, Lane b, Lane c) { return _mm512_xor_si512(_mm512_xor_si512(a, b), c); }
inline void store_half(uint32_t* out, __m256i first, __m256i second) {
    const __m256i a = _mm256_unpacklo_epi64(first, second), b = _mm256_unpackhi_epi64(first, second);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8), _mm256_permute2x128_si256(a, b, 0x31));
}
inline void store(uint32_t* out, const Lane (&w)[4]) {
    const Lane lower = fill(0xFFFFFFFF);
    const Lane a = _mm512_or_si512(_mm512_and_si512(w[0], lower), _mm512_slli_epi64(w[1], 32));
    const Lane b = _mm512_or_si512(_mm512_and_si512(w[2], lower), _mm512_slli_epi64(w[3], 32));
    store_half(out, _mm512_castsi512_si256(a), _mm512_castsi512_si256(b));
    store_half(out + 16, _mm512_extracti64x4_epi64(a, 1), _mm512_extracti64x4_epi64(b, 1));
}

#elif defined(AUTOPAR_avx2)

constexpr int kLanes = 4, kGroups = 2;
using Lane = __m256i;
inline Lane fill(uint64_t a) { return _mm256_set1_epi64x(static_cast<long long>(a)); }
inline Lane count_from(uint64_t a) { return _mm256_add_epi64(fill(a), _mm256_setr_epi64x(0, 1, 2, 3)); }
inline Lane load(const uint64_t* a) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)); }
inline Lane low(Lane a, Lane m) { return _mm256_mul_epu32(a, m); }
inline Lane high(Lane a) { return _mm256_srli_epi64(a, 32); }
inline Lane mix(Lane a, Lane b, Lane c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
inline void store(uint32_t* out, const Lane (&w)[4]) {
    const Lane lower = fill(0xFFFFFFFF);
    const Lane first = _mm256_or_si256(_mm256_and_si256(w[0], lower), _mm256_slli_epi64(w[1], 32));
    const Lane second = _mm256_or_si256(_mm256_and_si256(w[2], lower), _mm256_slli_epi64(w[3], 32));
    const Lane a = _mm256_unpacklo_epi64(first, second), b = _mm256_unpackhi_epi64(first, second);
    _mm256_storeu_si256(reinterpret_cast<Lane*>(out), _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256(reinterpret_cast<Lane*>(out + 8), _mm256_permute2x128_si256(a, b, 0x31));
}

#else

constexpr int kLanes = 1, kGroups = 2;
using Lane = uint64_t;
inline Lane fill(uint64_t a) { return a; }
inline Lane count_from(uint64_t a) { return a; }
inline Lane load(const uint64_t* a) { return *a; }
inline Lane low(Lane a, Lane m) { return (a & 0xFFFFFFFF) * m; }
inline Lane high(Lane a) { return a >> 32; }
inline Lane mix(Lane a, Lane b, Lane c) { return a ^ b ^ c; }
inline void store(uint32_t* out, const Lane (&w)[4]) {
    for (int j = 0; j < 4; ++j) out[j] = static_cast<uint32_t>(w[j]);
}

#endif

constexpr int kBlocks = kLanes * kGroups;  // made at once
constexpr int64_t kWords = 4 * kBlocks;

struct Stream {
    uint64_t key, step;
};

// The kGroups lanes of counters in `at` -> kWords words.
inline void blocks(uint32_t* out, const Lane (&at)[kGroups], Stream stream) {
    const Lane m0 = fill(kMultiplier0), m1 = fill(kMultiplier1);
    Lane w[kGroups][4];
    for (int g = 0; g < kGroups; ++g) {
        w[g][0] = at[g];
        w[g][1] = high(at[g]);
        w[g][2] = fill(stream.step & 0xFFFFFFFF);
        w[g][3] = fill(stream.step >> 32);
    }
    uint32_t k0 = static_cast<uint32_t>(stream.key), k1 = static_cast<uint32_t>(stream.key >> 32);
    for (int r = 0; r < kRounds; ++r) {
        const Lane key0 = fill(k0), key1 = fill(k1);
        for (int g = 0; g < kGroups; ++g) {
            const Lane p0 = low(w[g][0], m0), p1 = low(w[g][2], m1);
            w[g][0] = mix(high(p1), w[g][1], key0);
            w[g][2] = mix(high(p0), w[g][3], key1);
            w[g][1] = p1;
            w[g][3] = p0;
        }
        k0 += kWeyl0;
        k1 += kWeyl1;
    }
    for (int g = 0; g < kGroups; ++g) store(out + 4 * kLanes * g, w[g]);
}

// Blocks counter, counter + 1, ...
inline void blocks_from(uint32_t* out, uint64_t counter, Stream stream) {
    Lane at[kGroups];
    for (int g = 0; g < kGroups; ++g) at[g] = count_from(counter + kLanes * g);
    blocks(out, at, stream);
}

// n words from word q.
void words_from(uint32_t* out, uint64_t q, int64_t n, Stream stream) {
    uint32_t made[kWords];
    const int64_t before = static_cast<int64_t>(q & 3);
    uint64_t counter = q >> 2;
    if (before != 0 && n > 0) {
        blocks_from(made, counter, stream);
        const int64_t taken = kWords - before < n ? kWords - before : n;
        std::memcpy(out, made + before, taken * sizeof(uint32_t));
        out += taken, n -= taken, counter += kBlocks;
    }
    for (; n >= kWords; out += kWords, n -= kWords, counter += kBlocks) blocks_from(out, counter, stream);
    if (n > 0) {
        blocks_from(made, counter, stream);
        std::memcpy(out, made, n * sizeof(uint32_t));
    }
}

// Many short runs of words: their blocks are made together, then what belongs to the piece is copied out.
class ShortRuns {
public:
    ShortRuns(uint32_t* out, Stream stream) : out_(out), stream_(stream) {}

    // Up to kLong words from word q.
    void add(uint64_t q, int64_t n) {
        if (runs_ == kRuns) flush();
        first_[runs_] = 4 * blocks_ + static_cast<int>(q & 3);
        length_[runs_++] = static_cast<int>(n);
        for (uint64_t c = q >> 2; c <= (q + n - 1) >> 2; ++c) counters_[blocks_++] = c;
    }

    void flush() {
        for (int b = 0; b < blocks_; b += kBlocks) {
            Lane at[kGroups];
            for (int g = 0; g < kGroups; ++g) at[g] = load(counters_ + b + kLanes * g);
            blocks(made_ + 4 * b, at, stream_);
        }
        for (int r = 0; r < runs_; ++r) {
            for (int j = 0; j < length_[r]; ++j) out_[j] = made_[first_[r] + j];
            out_ += length_[r];
        }
        runs_ = blocks_ = 0;
    }

    static constexpr int64_t kLong = 64;

private:
    static constexpr int kRuns = 64, kMost = kRuns * (kLong / 4 + 1) + kBlocks;
    uint32_t* out_;
    Stream stream_;
    int runs_ = 0, blocks_ = 0;
    int first_[kRuns], length_[kRuns];
    uint64_t counters_[kMost] = {};
    uint32_t made_[4 * kMost];
};

constexpr int kMostDims = 24;

struct Space {
    uint64_t base;
    int dims;
    const int64_t *sizes, *strides;

    explicit Space(const int64_t* given)
        : base(static_cast<uint64_t>(given[0])),
          dims(static_cast<int>(given[1])),
          sizes(given + 2),
          strides(given + 2 + given[1]) {}

    // Calls run(index in the whole, n) for each run of consecutive elements in elements first .. first + count of the piece.
    template <class F>
    void each_run(int64_t first, int64_t count, F run) const {
        int64_t at[kMostDims];
        uint64_t index = base;
        for (int d = dims - 1; d >= 0; --d) {
            at[d] = first % sizes[d];
            first /= sizes[d];
            index += static_cast<uint64_t>(at[d] * strides[d]);
        }
        const int inner = dims - 1;
        while (count > 0) {
            const int64_t rest = sizes[inner] - at[inner], n = rest < count ? rest : count;
            run(index, n);
            count -= n;
            index -= static_cast<uint64_t>(at[inner]);
            at[inner] = 0;
            int d = inner - 1;
            for (; d >= 0; --d) {
                index += static_cast<uint64_t>(strides[d]);
                if (++at[d] < sizes[d]) break;
                index -= static_cast<uint64_t>(sizes[d] * strides[d]);
                at[d] = 0;
            }
            if (d < 0) break;
        }
    }
};

// The words of elements first .. first + count of a piece, `width` an element. One copy for all kernels.
__attribute__((noinline)) void words_of(uint32_t* out, const Space& space, int64_t first, int64_t count, int width, Stream stream) {
    if (space.sizes[space.dims - 1] * width >= ShortRuns::kLong) {
        space.each_run(first, count, [&](uint64_t index, int64_t n) {
            words_from(out, index * width, n * width, stream);
            out += n * width;
        });
        return;
    }
    ShortRuns runs(out, stream);
    space.each_run(first, count, [&](uint64_t index, int64_t n) { runs.add(index * width, n * width); });
    runs.flush();
}

constexpr int64_t kChunk = 2048;             // words at a time: they stay in the first cache
constexpr int64_t kGrain = 32 * kChunk;      // elements that are worth a thread

// Calls use(first element, count, words) over a piece, a chunk at a time, on several threads.
template <int kWidth, class F>
void in_chunks(const int64_t* given, int64_t count, Stream stream, int32_t threads, F use) {
    const Space space(given);
    auto part = [&](int64_t first, int64_t last) {
        alignas(64) uint32_t words[kChunk];
        for (int64_t at = first; at < last; at += kChunk / kWidth) {
            const int64_t n = last - at < kChunk / kWidth ? last - at : kChunk / kWidth;
            words_of(words, space, at, n, kWidth, stream);
            use(at, n, words);
        }
    };
    if (count > 0) autopar::parallel(count, kGrain, threads, part);
}

inline bool fits(const int64_t* space) { return space[1] <= kMostDims; }

}  // namespace
