// For `native.cpp`: vectors, descriptions of layers, parameters and their update, linear layers, activations. `native_images.h` has the rest.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

using std::size_t;
constexpr size_t WIDTH = 32;  // bytes of a vector: one register of AVX2, two of NEON

template <class T> struct Vectors;
template <> struct Vectors<float> {
    typedef float Vec __attribute__((vector_size(WIDTH), aligned(4), may_alias));
    typedef int32_t Integer;
    typedef Integer Index __attribute__((vector_size(WIDTH), aligned(4), may_alias));
};
template <> struct Vectors<double> {
    typedef double Vec __attribute__((vector_size(WIDTH), aligned(8), may_alias));
    typedef int64_t Integer;
    typedef Integer Index __attribute__((vector_size(WIDTH), aligned(8), may_alias));
};
template <class T> using Vec = typename Vectors<T>::Vec;
template <class T> using Index = typename Vectors<T>::Index;
template <class T> using Integer = typename Vectors<T>::Integer;
template <class T> constexpr size_t LANES = WIDTH / sizeof(T);

template <class T> inline Vec<T> load(const T* from) { return *reinterpret_cast<const Vec<T>*>(from); }
template <class T> inline void store(T* to, Vec<T> values) { *reinterpret_cast<Vec<T>*>(to) = values; }

inline float total(Vec<float> v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }
inline double total(Vec<double> v) { return (v[0] + v[2]) + (v[1] + v[3]); }

size_t rounded(size_t count, size_t unit) { return (count + unit - 1) / unit * unit; }

template <class T> struct Aligned {  // memory that begins with a cache line
    using value_type = T;
    Aligned() = default;
    template <class U> Aligned(const Aligned<U>&) {}
    T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})); }
    void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t{64}); }
    template <class U> bool operator==(const Aligned<U>&) const { return true; }
    template <class U> bool operator!=(const Aligned<U>&) const { return false; }
};
template <class T> using Buffer = std::vector<T, Aligned<T>>;

// Loops over these have no branches, so that compilers vectorise them; libm's functions they do not.
template <class T> inline T power_of_two(T shifted) {  // 2^n of 1.5·2^23 + n, or of 1.5·2^52 + n
    constexpr int digits = sizeof(T) == 4 ? 23 : 52, bias = sizeof(T) == 4 ? 127 : 1023;
    using Bits = std::make_unsigned_t<Integer<T>>;
    Bits bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + Bits(bias)) << digits;
    std::memcpy(&shifted, &bits, sizeof bits);
    return shifted;
}
template <class T> inline T exponential(T x) {  // within 2 units in the last place between the bounds; 0 below, and above as at the bound
    constexpr bool single = sizeof(T) == 4;
    constexpr T low = single ? T(-87) : T(-708), high = single ? T(88) : T(709), shift = single ? T(12582912) : T(6755399441055744.0);
    constexpr T upper = single ? T(0.693359375) : T(0.6931471803691238), lower = single ? T(-2.12194440e-4) : T(1.9082149292705877e-10);
    const bool below = x < low;
    x = below ? low : x;  // comparisons leave a NaN as it is
    x = x > high ? high : x;
    const T shifted = x * T(1.4426950408889634) + shift, n = shifted - shift;
    const T r = (x - n * upper) - n * lower;  // |r| ≤ ln 2 / 2
    T sum = single ? T(1.0 / 5040) : T(1.0 / 6227020800.0);
    if (!single) {
        for (T k : {T(1.0 / 479001600), T(1.0 / 39916800), T(1.0 / 3628800), T(1.0 / 362880), T(1.0 / 40320), T(1.0 / 5040)}) sum = sum * r + k;
    }
    for (T k : {T(1.0 / 720), T(1.0 / 120), T(1.0 / 24), T(1.0 / 6), T(0.5), T(1), T(1)}) sum = sum * r + k;
    return below ? T(0) : sum * power_of_two(shifted);
}

template <class T> inline T hyperbolic(T x) {  // Cephes' tanh: a polynomial, or a quotient of two, near zero
    constexpr bool single = sizeof(T) == 4;
    const T size = x < 0 ? -x : x, z = x * x, far = 1 - 2 / (exponential(2 * size) + 1);
    T near;
    if (single) {
        near = T(-5.70498872745e-3);
        for (T k : {T(2.06390887954e-2), T(-5.37397155531e-2), T(1.33314422036e-1), T(-3.33332819422e-1)}) near = near * z + k;
    } else {
        const T above = (T(-9.64399179425052238628e-1) * z - T(9.92877231001918586564e1)) * z - T(1.61468768441708447952e3);
        near = above / (((z + T(1.12811678491632931402e2)) * z + T(2.23548839060100448583e3)) * z + T(4.84406305325125486048e3));
    }
    return size > T(0.625) ? (x < 0 ? -far : far) : x + x * z * near;
}

enum Kind : int64_t { LINEAR, CONVOLUTION, MAX_POOL, RELU, TANH, SIGMOID, FLATTEN, GROUP_NORM, AVERAGE_POOL, ADD, PIXELS };

struct Shape {  // a row of the description of a network
    int64_t kind, in, height, width, out, out_height, out_width, kernel_height, kernel_width, stride_height, stride_width, pad_height,
        pad_width, bias;
    int64_t relu;                  // a max-pool that a ReLU follows
    int64_t first, second;         // values: 0 is the network's input, k the output of layer k - 1; -1: there is no second one
    int64_t weight_at, offset_at;  // the place of the parameters in the vector, their first numbers
    int64_t groups;
    double eps;
};

struct Settings {  // v ← momentum·v + g + decay·w + prox·(w − anchor) + correction;  w ← w − rate·v
    double rate, momentum, decay, prox, clip, grid;
    int64_t anchored, corrected;
};

template <class T> struct Rule {
    T rate, momentum, decay, prox;
    bool pulled;  // whether decay, anchor or correction add to the gradient
};

template <class T> struct Parameter {
    size_t count = 0;  // with padding
    bool moves = true;
    Buffer<T> value, velocity, anchor, correction, gradient;
    Buffer<double> sum;  // of clipped gradients

    void reserve(size_t size, const Settings& settings, bool stored) {
        count = rounded(size, LANES<T>);
        if (settings.clip != 0) sum.assign(count, 0);
        value.assign(count, 0);
        if (settings.momentum != 0) velocity.assign(count, 0);
        if (settings.anchored || settings.corrected || settings.decay != 0) anchor.assign(count, 0), correction.assign(count, 0);
        if (stored) gradient.assign(count, 0);
    }
    void update(const Rule<T>& rule);
    void update_by_sum(const Rule<T>& rule);
};

template <class T> struct Update {  // of a parameter, with pointers of its own: compilers keep these in registers
    T *value, *velocity, *anchor, *correction;
    Rule<T> rule;

    Update(Parameter<T>& of, const Rule<T>& by)
        : value(of.value.data()), velocity(of.velocity.data()), anchor(of.anchor.data()), correction(of.correction.data()), rule(by) {}
    inline void operator()(size_t at, Vec<T> g) const {
        const Vec<T> w = load(value + at);
        if (rule.pulled) g += w * rule.decay + (w - load(anchor + at)) * rule.prox + load(correction + at);
        if (rule.momentum != 0) {
            g += load(velocity + at) * rule.momentum;
            store(velocity + at, g);
        }
        store(value + at, w - g * rule.rate);
    }
};

template <class T> void Parameter<T>::update(const Rule<T>& rule) {
    if (!moves) return;
    const Update<T> update(*this, rule);
    const T* from = gradient.data();
    for (size_t at = 0; at < count; at += LANES<T>) update(at, load(from + at));
}

template <class T> void Parameter<T>::update_by_sum(const Rule<T>& rule) {
    const Update<T> update(*this, rule);
    for (size_t at = 0; at < count; at += LANES<T>) {
        T rounded_sum[LANES<T>];
        for (size_t l = 0; l < LANES<T>; l++) rounded_sum[l] = T(sum[at + l]);
        update(at, load(rounded_sum));
    }
}

template <class T> struct Layer : Shape {
    size_t in_step = 0, out_step = 0;     // numbers of a pixel, with padding
    size_t row = 0, row_step = 0;         // numbers of a row of a convolution's kernel, without and with padding
    size_t image_row = 0;                 // numbers of a row of a convolution's padded input
    size_t input_size = 0, output_size = 0;  // numbers of a sample, with padding
    size_t kept = 0;                      // how far the outputs of two samples are apart; 0: those of one sample are kept
    int64_t pool = -1;                    // of a convolution whose output only a max-pool takes: that layer, else -1
    bool learns = false;                  // whether this layer or one before has parameters
    bool adds[2] = {false, false};        // whether a later layer has handed a gradient back to the same input
    Parameter<T> weight, offset;
    Buffer<T> turned, turned_gradient;    // a convolution's weights with the output channels last, and their gradient
    Buffer<T> input, output, slope;       // `slope`: the gradient of the output
    Buffer<T> input_slope;                // the gradient of a convolution's padded input
    Buffer<T> normal, root, lanes;        // of GroupNorm: the normalised input, 1 / deviation by channel, sums by channel
    Buffer<double> clipped_inputs, clipped_slopes;  // of a linear layer, for each sample, the slopes scaled down
    std::vector<int32_t> corners;         // of each pixel of a convolution's output, the first number of the input under the kernel
    Buffer<Integer<T>> largest;           // the pixel that each output of a max-pool has its value from, -1: none

    bool is_dense() const { return kind == CONVOLUTION && pool < 0; }
    bool stores_gradient() const { return kind == CONVOLUTION || kind == GROUP_NORM; }
    void turn() {
        for (int64_t c = 0; c < out; c++)
            for (int64_t y = 0; y < kernel_height; y++)
                for (size_t j = 0; j < row; j++)
                    turned[(y * row + j) * out_step + c] = weight.value[(c * kernel_height + y) * row_step + j];
    }
    void turn_back() {  // the gradient of a dense convolution
        for (int64_t c = 0; c < out; c++)
            for (int64_t y = 0; y < kernel_height; y++)
                for (size_t j = 0; j < row; j++)
                    weight.gradient[(c * kernel_height + y) * row_step + j] = turned_gradient[(y * row + j) * out_step + c];
    }
    void clear_padding() {  // of a convolution's gradient
        for (size_t line = 0; line < size_t(out * kernel_height); line++)
            std::fill_n(weight.gradient.data() + line * row_step + row, row_step - row, T(0));
    }
};

// ---- linear layers: weights as panels of LANES outputs, [panel][input][lane] ----------------------------------------------------------

template <class T, int ROWS, int PANELS>
inline void product_tile(const T* x, size_t x_step, size_t inputs, const T* weight, const T* offset, T* y, size_t y_step) {
    Vec<T> sums[ROWS][PANELS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int p = 0; p < PANELS; p++) sums[r][p] = load(offset + p * LANES<T>);
    for (size_t i = 0; i < inputs; i++) {
        Vec<T> w[PANELS];
        UNROLL for (int p = 0; p < PANELS; p++) w[p] = load(weight + (p * inputs + i) * LANES<T>);
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int p = 0; p < PANELS; p++) sums[r][p] += w[p] * x[r * x_step + i];
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int p = 0; p < PANELS; p++) store(y + r * y_step + p * LANES<T>, sums[r][p]);
}

constexpr int TILE_ROWS = 6;  // 6 rows × 2 panels of sums fill the registers

template <class T, int ROWS, class... More> inline void product_rows(size_t rows, size_t panels, More... more) {
    if (rows == ROWS) {
        panels == 2 ? product_tile<T, ROWS, 2>(more...) : product_tile<T, ROWS, 1>(more...);
    } else if constexpr (ROWS > 1) {
        product_rows<T, ROWS - 1>(rows, panels, more...);
    }
}

template <class T> void linear_forward(Layer<T>& layer, size_t batch, const T* x, size_t x_step) {
    const size_t inputs = layer.in, step = layer.output_size;
    size_t done = 0;
    for (constexpr int MANY = 8; batch == 1 && done + MANY * LANES<T> <= step; done += MANY * LANES<T>)  // enough sums for one row
        product_tile<T, 1, MANY>(
            x, x_step, inputs, &layer.weight.value[done * inputs], &layer.offset.value[done], &layer.output[done], step);
    for (size_t at = done; at < step; at += 2 * LANES<T>) {
        const size_t panels = step - at > LANES<T> ? 2 : 1;
        for (size_t b = 0; b < batch;) {
            const size_t left = batch - b, tiles = (left + TILE_ROWS - 1) / TILE_ROWS, rows = (left + tiles - 1) / tiles;
            product_rows<T, TILE_ROWS>(
                rows, panels, x + b * x_step, x_step, inputs, &layer.weight.value[at * inputs], &layer.offset.value[at],
                &layer.output[b * step + at], step);
            b += rows;
        }
    }
}

// Adds the gradient of the inputs from `first` to `end`.
template <class T, int ROWS>
inline void input_slopes(Layer<T>& layer, size_t first, size_t end, size_t rows, const T* slope, T* to, size_t to_step) {
    if constexpr (ROWS > 1) {
        if (rows != ROWS) return input_slopes<T, ROWS - 1>(layer, first, end, rows, slope, to, to_step);
    }
    const size_t inputs = layer.in, step = layer.output_size;
    const T* weight = layer.weight.value.data() + first * LANES<T>;
    for (size_t i = first; i < end; i++, weight += LANES<T>) {
        Vec<T> sums[ROWS] = {};
        for (size_t at = 0; at < step; at += LANES<T>) {
            const Vec<T> w = load(weight + at * inputs);
            UNROLL for (int r = 0; r < ROWS; r++) sums[r] += w * load(slope + r * step + at);
        }
        UNROLL for (int r = 0; r < ROWS; r++) to[r * to_step + i] += total(sums[r]);
    }
}

template <class T> void linear_backward(Layer<T>& layer, size_t batch, T* to, size_t to_step) {
    constexpr size_t BLOCK = 16;  // inputs, whose weights stay in the cache for all rows
    for (size_t i = 0; i < size_t(layer.in); i += BLOCK)
        for (size_t b = 0; b < batch;) {
            const size_t rows = std::min<size_t>(8, batch - b), end = std::min<size_t>(layer.in, i + BLOCK);
            input_slopes<T, 8>(layer, i, end, rows, &layer.slope[b * layer.output_size], to + b * to_step, to_step);
            b += rows;
        }
}

// Hands `each(panel, input, sum)` the sums over the batch of slopes times inputs.
template <class T, int INPUTS, int PANELS, class Each>
inline void gradient_tile(const T* slope, size_t step, const T* x, size_t x_step, size_t batch, Each each) {
    Vec<T> sums[PANELS][INPUTS] = {};
    for (size_t b = 0; b < batch; b++, slope += step, x += x_step) {
        Vec<T> d[PANELS];
        UNROLL for (int p = 0; p < PANELS; p++) d[p] = load(slope + p * LANES<T>);
        UNROLL for (int i = 0; i < INPUTS; i++)
            UNROLL for (int p = 0; p < PANELS; p++) sums[p][i] += d[p] * x[i];
    }
    UNROLL for (int p = 0; p < PANELS; p++)
        UNROLL for (int i = 0; i < INPUTS; i++) each(p, i, sums[p][i]);
}

template <class T, int PANELS>
void update_panels(Layer<T>& layer, size_t at, size_t batch, const T* x, size_t x_step, const Rule<T>& rule) {
    const size_t inputs = layer.in, step = layer.output_size, next = inputs * LANES<T>;
    const Update<T> update_weight(layer.weight, rule), update_offset(layer.offset, rule);
    const T* slope = &layer.slope[at];
    if (layer.weight.moves) {
        size_t i = 0;
        const auto each = [&](int p, int k, Vec<T> sum) { update_weight(at * inputs + p * next + (i + k) * LANES<T>, sum); };
        for (; i + 6 <= inputs; i += 6) gradient_tile<T, 6, PANELS>(slope, step, x + i, x_step, batch, each);
        for (; i < inputs; i++) gradient_tile<T, 1, PANELS>(slope, step, x + i, x_step, batch, each);
    }
    const T one = 1;
    const auto each = [&](int p, int, Vec<T> sum) { update_offset(at + p * LANES<T>, sum); };
    if (layer.bias && layer.offset.moves) gradient_tile<T, 1, PANELS>(slope, step, &one, 0, batch, each);
}

template <class T> void linear_update(Layer<T>& layer, size_t batch, const T* x, size_t x_step, const Rule<T>& rule) {
    for (size_t at = 0; at < layer.output_size; at += 2 * LANES<T>)
        if (layer.output_size - at > LANES<T>)
            update_panels<T, 2>(layer, at, batch, x, x_step, rule);
        else
            update_panels<T, 1>(layer, at, batch, x, x_step, rule);
}

// The sums of clipped gradients, in float64, of which a panel has one or two vectors.
template <class T> void linear_sums(Layer<T>& layer, size_t batch) {
    constexpr size_t PARTS = LANES<T> / LANES<double>;
    const size_t inputs = layer.in, step = layer.output_size;
    const double one = 1, *x = layer.clipped_inputs.data();
    for (size_t at = 0; at < step; at += LANES<T>) {
        const double* slope = &layer.clipped_slopes[at];
        double* sums = &layer.weight.sum[at * inputs];
        const auto each = [&](int part, int k, Vec<double> sum) { store(sums + k * LANES<T> + part * LANES<double>, sum); };
        size_t i = 0;
        for (; i + 6 <= inputs; i += 6, sums += 6 * LANES<T>) gradient_tile<double, 6, PARTS>(slope, step, x + i, inputs, batch, each);
        for (; i < inputs; i++, sums += LANES<T>) gradient_tile<double, 1, PARTS>(slope, step, x + i, inputs, batch, each);
        sums = &layer.offset.sum[at];
        if (layer.bias) gradient_tile<double, 1, PARTS>(slope, step, &one, 0, batch, each);
    }
}

template <class T> double squares(const T* values, size_t count) {
    double sums[8] = {}, sum = 0;
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (size_t k = 0; k < 8; k++) sums[k] += double(values[i + k]) * double(values[i + k]);
    for (; i < count; i++) sum += double(values[i]) * double(values[i]);
    for (double part : sums) sum += part;
    return sum;
}

// ---- layers without parameters --------------------------------------------------------------------------------------------------------

template <class T> void activate(int64_t kind, const T* x, T* y, size_t count) {  // a NaN stays one
    if (kind == RELU)
        for (size_t i = 0; i < count; i++) y[i] = x[i] < 0 ? T(0) : x[i];
    else if (kind == TANH)
        for (size_t i = 0; i < count; i++) y[i] = hyperbolic(x[i]);
    else
        for (size_t i = 0; i < count; i++) y[i] = T(1) / (T(1) + exponential(-x[i]));
}

template <class T> void activate_backward(int64_t kind, const T* y, const T* slope, T* to, size_t count) {  // adds to `to`
    if (kind == RELU)
        for (size_t i = 0; i < count; i++) to[i] += y[i] <= 0 ? T(0) : slope[i];
    else if (kind == TANH)
        for (size_t i = 0; i < count; i++) to[i] += slope[i] * (1 - y[i] * y[i]);
    else
        for (size_t i = 0; i < count; i++) to[i] += slope[i] * (y[i] * (1 - y[i]));
}

template <class T> inline void add(const T* from, T* to, size_t count) {
    for (size_t i = 0; i < count; i++) to[i] += from[i];
}

}  // namespace
