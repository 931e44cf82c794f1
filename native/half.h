// bfloat16 and float16 as their 16 bits.
#pragma once

#include <cstring>

#include "kernel.h"

namespace {

inline std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float of_bits(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float from_bf16(std::uint16_t x) { return of_bits(static_cast<std::uint32_t>(x) << 16); }
// To the nearest, ties to even.
inline std::uint16_t to_bf16(float x) {
    const std::uint32_t bits = bits_of(x);
    const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// Without branches, so that compilers make vectors of it. 2^112 moves the exponent from float16's bias to float32's.
inline float from_f16(std::uint16_t x) {
    const std::uint32_t sign = static_cast<std::uint32_t>(x & 0x8000) << 16;
    const std::uint32_t size = static_cast<std::uint32_t>(x & 0x7FFF) << 13;
    const std::uint32_t moved = bits_of(of_bits(size) * 0x1p112f);
    return of_bits(sign | ((x & 0x7C00) == 0x7C00 ? size | 0x7F800000 : moved));
}
// To the nearest, ties to even. Below float16's normal numbers the sum with 0.5 rounds: its last place is 2^-24.
inline std::uint16_t to_f16(float x) {
    const std::uint32_t bits = bits_of(x), size = bits & 0x7FFFFFFF;
    const std::uint32_t normal = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
    const std::uint32_t small = bits_of(of_bits(size) + 0.5f) - 0x3F000000;
    std::uint32_t found = size < 0x38800000 ? small : normal;
    found = size >= 0x477FF000 ? 0x7C00 : found;
    found = size > 0x7F800000 ? 0x7E00 : found;
    return static_cast<std::uint16_t>(bits >> 16 & 0x8000) | static_cast<std::uint16_t>(found);
}

}  // namespace
