// AdamW and SGD: one pass over parameter, gradient and state that also unscales and clips (one factor on the gradient) and
// writes a bfloat16 copy of the parameter. autopar/optim/update.py says the same in PyTorch; both give the same bits, since
// each step is one IEEE sum, product, quotient or root, in float32 (float64 for float64 parameters), rounded when stored.
//
// A call takes many tensors, so that threads start once. Each tensor is `count` elements in a row of memory.
// Stochastic rounding to bfloat16: element i of the whole tensor has word i of its stream; the parameter and the second
// moment add the word's lower 16 bits below their last place, the first moment its upper 16.
#include <cmath>

#include "../half.h"
#include "../philox.h"

namespace {

// As native.py's OptimizerItem.
struct Item {
    void* parameter;
    const void* gradient;
    void* first;    // moment, or momentum; null for SGD without momentum
    void* second;   // moment; null for SGD
    void* copy;     // of the parameter in bfloat16, or null
    int64_t count;
    double rate;    // AdamW: lr / (1 - beta1^t); SGD: lr
    double root;    // AdamW: 1 / sqrt(1 - beta2^t); SGD: 0 where there is no momentum yet
    const int64_t* space;  // of the piece, for stochastic rounding; null: to the nearest
    uint64_t key, step;
};

// As native.py's OptimizerRule. AdamW: keep = 1 - lr * decay, a = 1 - beta1, b = beta2, c = 1 - beta2, eps.
// SGD: keep = decay, a = 1 - dampening, b = momentum, c = 1 if nesterov.
struct Rule {
    double factor, keep, a, b, c, eps;
};

struct Bf16 {
    uint16_t bits;
};

inline float widen(Bf16 x) { return from_bf16(x.bits); }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

inline void narrow(float* to, float x, uint32_t) { *to = x; }
inline void narrow(double* to, double x, uint32_t) { *to = x; }
inline void narrow(Bf16* to, float x, uint32_t) { to->bits = to_bf16(x); }

// Rounds up with the probability that keeps the mean.
template <class T, class C>
inline void spread(T* to, C x, uint32_t noise) {
    narrow(to, x, noise);
}
inline void spread(Bf16* to, float x, uint32_t noise) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const bool finite = (bits & 0x7F800000) != 0x7F800000;
    to->bits = finite ? static_cast<uint16_t>((bits + (noise & 0xFFFF)) >> 16) : to_bf16(x);
}

template <bool kRandom, class T, class C>
inline void put(T* to, C x, uint32_t noise) {
    if constexpr (kRandom) {
        spread(to, x, noise);
    } else {
        narrow(to, x, noise);
    }
}

inline float root_of(float x) { return std::sqrt(x); }
inline double root_of(double x) { return std::sqrt(x); }

template <class P, class S, bool kRandom>
void adamw(const Item& item, const Rule& rule, int64_t at, int64_t n, const uint32_t* __restrict words) {
    using C = decltype(widen(P{}));
    P* __restrict p = static_cast<P*>(item.parameter) + at;
    const P* __restrict g = static_cast<const P*>(item.gradient) + at;
    S* __restrict m = static_cast<S*>(item.first) + at;
    S* __restrict v = static_cast<S*>(item.second) + at;
    const C factor = static_cast<C>(rule.factor), keep = static_cast<C>(rule.keep), a = static_cast<C>(rule.a);
    const C b = static_cast<C>(rule.b), c = static_cast<C>(rule.c), eps = static_cast<C>(rule.eps);
    const C rate = static_cast<C>(item.rate), root = static_cast<C>(item.root);
    for (int64_t j = 0; j < n; ++j) {
        const uint32_t noise = kRandom ? words[j] : 0;
        const C gradient = widen(g[j]) * factor;
        const C first = widen(m[j]) + (gradient - widen(m[j])) * a;
        const C second = widen(v[j]) * b + gradient * gradient * c;
        const C step = first / (root_of(second) * root + eps);
        put<kRandom>(p + j, widen(p[j]) * keep - step * rate, noise);
        put<kRandom>(m + j, first, noise >> 16);
        put<kRandom>(v + j, second, noise);
    }
}

template <class P, class S, bool kRandom>
void sgd(const Item& item, const Rule& rule, int64_t at, int64_t n, const uint32_t* __restrict words) {
    using C = decltype(widen(P{}));
    P* __restrict p = static_cast<P*>(item.parameter) + at;
    const P* __restrict g = static_cast<const P*>(item.gradient) + at;
    S* __restrict m = item.first == nullptr ? nullptr : static_cast<S*>(item.first) + at;
    const C factor = static_cast<C>(rule.factor), decay = static_cast<C>(rule.keep), a = static_cast<C>(rule.a);
    const C b = static_cast<C>(rule.b), rate = static_cast<C>(item.rate);
    const bool begun = item.root != 0, nesterov = rule.c != 0;
    for (int64_t j = 0; j < n; ++j) {
        const uint32_t noise = kRandom ? words[j] : 0;
        const C gradient = widen(g[j]) * factor + widen(p[j]) * decay;
        C step = gradient;
        if (m != nullptr) {
            const C momentum = begun ? widen(m[j]) * b + gradient * a : gradient;
            step = nesterov ? gradient + momentum * b : momentum;
            put<kRandom>(m + j, momentum, noise >> 16);
        }
        put<kRandom>(p + j, widen(p[j]) - step * rate, noise);
    }
}

void copy_of(const Item& item, int64_t at, int64_t n) {
    const float* __restrict p = static_cast<const float*>(item.parameter) + at;
    uint16_t* __restrict to = static_cast<uint16_t*>(item.copy) + at;
    for (int64_t j = 0; j < n; ++j) to[j] = to_bf16(p[j]);
}

using Update = void (*)(const Item&, const Rule&, int64_t at, int64_t n, const uint32_t* words);

struct Pair {
    Update nearest, random;
};

// Runs over the elements of all items, numbered through, a chunk at a time.
void over(const Item* items, int64_t count, const Rule& rule, Pair update, int32_t threads) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) total += items[i].count;
    auto part = [&](int64_t first, int64_t last) {
        alignas(64) uint32_t words[kChunk];
        for (const Item* item = items; first < last; last -= item->count, first -= item->count, ++item) {
            if (first >= item->count) continue;
            const int64_t end = last < item->count ? last : item->count;
            for (int64_t at = first; at < end; at += kChunk) {
                const int64_t n = end - at < kChunk ? end - at : kChunk;
                if (item->space != nullptr) {
                    words_of(words, Space(item->space), at, n, 1, Stream{item->key, item->step});
                    update.random(*item, rule, at, n, words);
                } else {
                    update.nearest(*item, rule, at, n, nullptr);
                }
                if (item->copy != nullptr) copy_of(*item, at, n);
            }
            first = end;
        }
    };
    if (total > 0) autopar::parallel(total, kGrain, threads, part);
}

// The update for these dtypes; null where there is none.
#define AUTOPAR_UPDATE(name)                                                                  \
    Pair name##_for(int32_t parameter, int32_t state) {                                       \
        using namespace autopar;                                                              \
        const bool half = state == kBFloat16;                                                 \
        if (parameter == kFloat64 && state == kFloat64)                                       \
            return {name<double, double, false>, name<double, double, false>};                \
        if (parameter == kFloat32 && state == kFloat32)                                       \
            return {name<float, float, false>, name<float, float, false>};                    \
        if (parameter == kFloat32 && half) return {name<float, Bf16, false>, name<float, Bf16, true>}; \
        if (parameter == kBFloat16 && half) return {name<Bf16, Bf16, false>, name<Bf16, Bf16, true>};  \
        if (parameter == kBFloat16 && state == kFloat32)                                      \
            return {name<Bf16, float, false>, name<Bf16, float, true>};                       \
        return {nullptr, nullptr};                                                            \
    }

AUTOPAR_UPDATE(adamw)
AUTOPAR_UPDATE(sgd)

int32_t run(const Item* items, int64_t count, const Rule* rule, Pair update, int32_t threads) {
    if (update.nearest == nullptr) return autopar::kUnknownDtype;
    for (int64_t i = 0; i < count; ++i) {
        if (items[i].space != nullptr && !fits(items[i].space)) return autopar::kTooManyDims;
    }
    over(items, count, *rule, update, threads);
    return autopar::kDone;
}

}  // namespace

// Copies are of float32 parameters only.
AUTOPAR_KERNEL(adamw)
(const void* items, int64_t count, const void* rule, int32_t parameter, int32_t state, int32_t threads) {
    return run(static_cast<const Item*>(items), count, static_cast<const Rule*>(rule), adamw_for(parameter, state), threads);
}

AUTOPAR_KERNEL(sgd)
(const void* items, int64_t count, const void* rule, int32_t parameter, int32_t state, int32_t threads) {
    return run(static_cast<const Item*>(items), count, static_cast<const Rule*>(rule), sgd_for(parameter, state), threads);
}
