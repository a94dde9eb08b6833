// Normals of words of two keystreams: the rule of `step_noise.tails`, and Φ⁻¹ by two quotients of polynomials.
//
// The loop has no branch and no address that depends on a word, so its time says nothing about the noise, and compilers vectorise it.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// Coefficients, the highest power first, interpolate in nodes that `tests/unit/engine/test_native_noise.py` has; errors are relative.
constexpr double CENTRE = 0.1225, BOUND = 0.15, FIRST = 1.375;
constexpr double CENTRAL_ABOVE[] = {  // |normal| / (1/2 − u) for u ≥ BOUND, by CENTRE − (1/2 − u)²: 6e-17
    63.568143373375314, 863.3244168460627, 1830.7807426154409, 1335.871991072109, 419.3972362838174, 58.41030281580306, 2.9612382556965415};
constexpr double CENTRAL_BELOW[] = {
    132.84442075982466, 756.9938414987579, 1106.5967602929222, 645.0016826478562, 173.50894582907344, 21.55497738352669, 1.0};
constexpr double TAIL_ABOVE[] = {  // |normal| for 2^-117 ≤ u ≤ BOUND, by √(−log u) − FIRST: 1.3e-16
    1.3908197756316867e-05, 0.0007930441100222598, 0.015665312401624665, 0.1511999262080565, 0.8301111725447539,
    2.7780736701297486, 5.7191168523049, 6.915782295946861, 4.349815822456946, 1.0322503855271405};
constexpr double TAIL_BELOW[] = {
    1.8570924760579817e-12, 9.834224255216052e-06, 0.0005473009911947583, 0.010354316268956382, 0.0939179835428662,
    0.4762252995328217, 1.4405244412986007, 2.5773652571666408, 2.496288549490726, 1.0};
constexpr double LOGARITHM[] = {  // (2 artanh(s)/s − 2)/s² for |s| ≤ (√2 − 1)/(√2 + 1), by s²: 5e-18
    0.14616449685043406, 0.15331721600556042, 0.18182889125261723, 0.2222221113479508, 0.28571428625975487, 0.39999999999899505,
    0.666666666666667};

template <size_t COUNT> inline double polynomial(const double (&coefficients)[COUNT], double x) {
    double sum = coefficients[0];
    for (size_t k = 1; k < COUNT; k++) sum = sum * x + coefficients[k];
    return sum;
}

inline double as_double(uint64_t bits) {
    double number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}

inline uint64_t as_bits(double number) {
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}

inline double small_whole(uint64_t bits) { return as_double(bits | 0x4330000000000000) - 4503599627370496.0; }  // of 52 bits

inline double whole(uint64_t bits) {  // rounded once; AVX2 converts no words of 64 bits
    const double high = as_double(bits >> 32 | 0x4530000000000000) - 19342813118337666422669312.0;  // 2^84 + 2^52
    return high + as_double((bits & 0xffffffff) | 0x4330000000000000);
}

// Without a branch, which compilers make of `?:` where they can leave out a computation.
inline double chosen(bool first, double one, double other) {
    const uint64_t mask = -uint64_t(first);
    return as_double((as_bits(one) & mask) | (as_bits(other) & ~mask));
}

inline double tail(uint64_t word, uint64_t more) {  // u in (0, 1/2], bit for bit that of `step_noise.tails`
    const double digits = whole(word & 0x7fffffffffffffff), rest = (small_whole(more >> 12) + 0.5) * 0x1p-52;
    return (digits + chosen(digits < 0x1p52, rest, 0.5)) * 0x1p-64;
}

inline double minus_logarithm(double u) {  // of 2^e·m with m from √½ to √2: −(e·ln 2 + 2 artanh((m − 1)/(m + 1)))
    const uint64_t shifted = as_bits(u) + 0x0009'5f62'0000'0000, exponent = shifted >> 52;
    const double m = as_double((shifted & 0x000f'ffff'ffff'ffff) + 0x3fe6'a09e'0000'0000), e = small_whole(exponent) - 1023.0;
    const double s = (m - 1.0) / (m + 1.0), square = s * s;
    const double rest = std::fma(e, 1.90821492927058770002e-10, s * square * polynomial(LOGARITHM, square));  // one of two sums is fused
    return -(e * 6.93147180369123816490e-01 + (2.0 * s + rest));
}

inline double absolute_normal(double u) {  // −Φ⁻¹(u)
    const double q = 0.5 - u, centre = CENTRE - q * q, far = std::sqrt(minus_logarithm(u)) - FIRST;
    const bool central = u >= BOUND;
    const double above = chosen(central, q * polynomial(CENTRAL_ABOVE, centre), polynomial(TAIL_ABOVE, far));
    const double below = chosen(central, polynomial(CENTRAL_BELOW, centre), polynomial(TAIL_BELOW, far));
    return above / below;
}

// Writes `count` normals of this deviation and wipes the words. The first bit of a word is the sign, set for a normal above zero.
void row_of_normals(uint64_t* __restrict words, uint64_t* __restrict more, int64_t count, double deviation, double* __restrict to) {
    for (int64_t i = 0; i < count; i++) {
        const uint64_t word = words[i];
        to[i] = as_double(as_bits(absolute_normal(tail(word, more[i])) * deviation) ^ (~word & 0x8000000000000000));
        words[i] = more[i] = 0;
    }
}

}  // namespace
