// Layers of images for `native.cpp`: convolutions, pools, GroupNorm. An image is [y][x][channel], pixels padded to whole vectors.
//
// What is handed back to the layer before is added to it: it may be the input of several layers.

#pragma once

#include "native_layers.h"

namespace {

template <class T> struct Entry {  // a number of the gradient of a convolution's output
    int32_t corner;  // the first number of the input that it is made of
    int32_t channel;
    T slope;
};

// ---- convolutions: inputs [y][x][channel] with their padding, weights [output][kernel y][kernel x · channel] --------------------------

// `NEXT`: how far apart the inputs of two neighbours lie, if it is known when this is compiled.
template <class T, int PIXELS, int PANELS, int NEXT>
inline void convolution_tile(const Layer<T>& layer, const T* x, const T* weight, const T* offset, T* out) {
    const size_t next = NEXT ? NEXT : layer.stride_width * layer.in, row = layer.row, step = layer.out_step;
    Vec<T> sums[PIXELS][PANELS];
    UNROLL for (int q = 0; q < PIXELS; q++)
        UNROLL for (int p = 0; p < PANELS; p++) sums[q][p] = load(offset + p * LANES<T>);
    for (int64_t y = 0; y < layer.kernel_height; y++, x += layer.image_row) {
        for (size_t j = 0; j < row; j++, weight += step) {
            Vec<T> w[PANELS];
            UNROLL for (int p = 0; p < PANELS; p++) w[p] = load(weight + p * LANES<T>);
            UNROLL for (int q = 0; q < PIXELS; q++)
                UNROLL for (int p = 0; p < PANELS; p++) sums[q][p] += w[p] * x[q * next + j];
        }
    }
    UNROLL for (int q = 0; q < PIXELS; q++)
        UNROLL for (int p = 0; p < PANELS; p++) store(out + q * step + p * LANES<T>, sums[q][p]);
}

template <class T, int PIXELS, int PANELS, int NEXT>
void convolution_row(const Layer<T>& layer, const T* x, const T* weight, const T* offset, T* out) {
    const size_t next = layer.stride_width * layer.in, step = layer.out_step, width = layer.out_width;
    size_t at = 0;
    for (; at + PIXELS <= width; at += PIXELS) convolution_tile<T, PIXELS, PANELS, NEXT>(layer, x + at * next, weight, offset, out + at * step);
    for (; at + 4 <= width; at += 4) convolution_tile<T, 4, PANELS, NEXT>(layer, x + at * next, weight, offset, out + at * step);
    for (; at < width; at++) convolution_tile<T, 1, PANELS, NEXT>(layer, x + at * next, weight, offset, out + at * step);
}

template <class T, int NEXT> void convolution_forward(Layer<T>& layer, const T* input) {
    for (int64_t y = 0; y < layer.out_height; y++) {
        const T* x = input + y * layer.stride_height * layer.image_row;
        T* out = &layer.output[y * layer.out_width * layer.out_step];
        size_t c = 0;
        for (; c + 2 * LANES<T> <= layer.out_step; c += 2 * LANES<T>)
            convolution_row<T, 6, 2, NEXT>(layer, x, &layer.turned[c], &layer.offset.value[c], out + c);
        if (c < layer.out_step) convolution_row<T, 8, 1, NEXT>(layer, x, &layer.turned[c], &layer.offset.value[c], out + c);
    }
}

// Adds to the gradients what a few entries give. `VECTORS`: of a row, if it is known when this is compiled.
template <class T, int VECTORS, bool BACKWARD>
void sparse_rows(Layer<T>& layer, const std::vector<Entry<T>>& entries, size_t count, const T* input) {
    const size_t vectors = VECTORS ? VECTORS : layer.row_step / LANES<T>, image_row = layer.image_row, row_step = layer.row_step;
    const int64_t lines = layer.kernel_height;
    T *gradients = layer.weight.gradient.data(), *offsets = layer.offset.gradient.data(), *slopes = layer.input_slope.data();
    const T* weights = layer.weight.value.data();
    const Entry<T>* entry = entries.data();
    for (const Entry<T>* last = entry + count; entry < last; entry++) {
        const T factor = entry->slope;
        T *gradient = gradients + entry->channel * lines * row_step, *slope = slopes + entry->corner;
        const T *weight = weights + entry->channel * lines * row_step, *x = input + entry->corner;
        offsets[entry->channel] += factor;
        for (int64_t y = 0; y < lines; y++, x += image_row, slope += image_row, gradient += row_step, weight += row_step) {
            UNROLL for (size_t k = 0; k < vectors * LANES<T>; k += LANES<T>) {
                store(gradient + k, load(gradient + k) + load(x + k) * factor);
                if (BACKWARD) store(slope + k, load(slope + k) + load(weight + k) * factor);
            }
        }
    }
}

template <class T, bool BACKWARD>
void sparse_backward(Layer<T>& layer, const std::vector<Entry<T>>& entries, size_t count, const T* input) {
    switch (layer.row_step / LANES<T>) {
        case 1: return sparse_rows<T, 1, BACKWARD>(layer, entries, count, input);
        case 2: return sparse_rows<T, 2, BACKWARD>(layer, entries, count, input);
        case 4: return sparse_rows<T, 4, BACKWARD>(layer, entries, count, input);
        default: return sparse_rows<T, 0, BACKWARD>(layer, entries, count, input);
    }
}

// The gradient of a convolution whose output's gradient is mostly not zero: products of blocks in registers.

template <class T, int INPUTS, int PANELS>
inline void dense_gradient_tile(const Layer<T>& layer, const T* slope, const T* x, T* to) {
    const size_t next = layer.stride_width * layer.in, step = layer.out_step, line = layer.stride_height * layer.image_row;
    Vec<T> sums[PANELS][INPUTS] = {};
    for (int64_t y = 0; y < layer.out_height; y++, x += line) {
        const T* from = x;
        for (int64_t q = 0; q < layer.out_width; q++, slope += step, from += next) {
            Vec<T> d[PANELS];
            UNROLL for (int p = 0; p < PANELS; p++) d[p] = load(slope + p * LANES<T>);
            UNROLL for (int i = 0; i < INPUTS; i++)
                UNROLL for (int p = 0; p < PANELS; p++) sums[p][i] += d[p] * from[i];
        }
    }
    UNROLL for (int i = 0; i < INPUTS; i++)
        UNROLL for (int p = 0; p < PANELS; p++) {
            T* place = to + i * step + p * LANES<T>;
            store(place, load(place) + sums[p][i]);
        }
}

template <class T, int PANELS> void dense_gradient_panels(Layer<T>& layer, const T* slope, const T* input, size_t at) {
    constexpr size_t MANY = PANELS == 2 ? 6 : 12;
    for (int64_t y = 0; y < layer.kernel_height; y++) {
        const T* x = input + y * layer.image_row;
        T* to = &layer.turned_gradient[y * layer.row * layer.out_step + at];
        size_t j = 0;
        for (; j + MANY <= layer.row; j += MANY) dense_gradient_tile<T, MANY, PANELS>(layer, slope + at, x + j, to + j * layer.out_step);
        for (; j + 3 <= layer.row; j += 3) dense_gradient_tile<T, 3, PANELS>(layer, slope + at, x + j, to + j * layer.out_step);
        for (; j < layer.row; j++) dense_gradient_tile<T, 1, PANELS>(layer, slope + at, x + j, to + j * layer.out_step);
    }
}

template <class T> void dense_gradient(Layer<T>& layer, const T* slope, const T* input) {
    for (size_t at = 0; at < layer.out_step; at += 2 * LANES<T>)
        if (layer.out_step - at > LANES<T>)
            dense_gradient_panels<T, 2>(layer, slope, input, at);
        else
            dense_gradient_panels<T, 1>(layer, slope, input, at);
    if (!layer.bias) return;
    for (int64_t p = 0; p < layer.out_height * layer.out_width; p++, slope += layer.out_step)
        add(slope, layer.offset.gradient.data(), layer.out_step);
}

template <class T, int PIXELS, int VECTORS>
inline void dense_slope_tile(const T* slope, size_t step, size_t outputs, const T* weight, size_t weight_step, T* to, size_t next) {
    Vec<T> sums[PIXELS][VECTORS] = {};
    for (size_t c = 0; c < outputs; c++, weight += weight_step) {
        Vec<T> w[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) w[v] = load(weight + v * LANES<T>);
        UNROLL for (int q = 0; q < PIXELS; q++)
            UNROLL for (int v = 0; v < VECTORS; v++) sums[q][v] += w[v] * slope[q * step + c];
    }
    for (int q = 0; q < PIXELS; q++)  // one after the other: they overlap
        for (int v = 0; v < VECTORS; v++) {
            T* place = to + q * next + v * LANES<T>;
            store(place, load(place) + sums[q][v]);
        }
}

template <class T, int VECTORS> void dense_slope_columns(Layer<T>& layer, const T* slope, int64_t line, size_t j) {
    constexpr int PIXELS = VECTORS == 1 ? 8 : 4;
    const size_t next = layer.stride_width * layer.in, step = layer.out_step, weight_step = layer.kernel_height * layer.row_step;
    const T* weight = &layer.weight.value[line * layer.row_step + j];
    for (int64_t y = 0; y < layer.out_height; y++) {
        T* to = &layer.input_slope[(y * layer.stride_height + line) * layer.image_row + j];
        const T* from = slope + y * layer.out_width * step;
        int64_t q = 0;
        for (; q + PIXELS <= layer.out_width; q += PIXELS)
            dense_slope_tile<T, PIXELS, VECTORS>(from + q * step, step, layer.out, weight, weight_step, to + q * next, next);
        for (; q < layer.out_width; q++)
            dense_slope_tile<T, 1, VECTORS>(from + q * step, step, layer.out, weight, weight_step, to + q * next, next);
    }
}

template <class T> void dense_slope(Layer<T>& layer, const T* slope) {
    const size_t vectors = layer.row_step / LANES<T>;
    for (int64_t line = 0; line < layer.kernel_height; line++)
        for (size_t v = 0; v < vectors;) {
            const size_t some = std::min<size_t>(3, vectors - v), j = v * LANES<T>;
            if (some == 3)
                dense_slope_columns<T, 3>(layer, slope, line, j);
            else if (some == 2)
                dense_slope_columns<T, 2>(layer, slope, line, j);
            else
                dense_slope_columns<T, 1>(layer, slope, line, j);
            v += some;
        }
}

// ---- pools ----------------------------------------------------------------------------------------------------------------------------

template <class T> void pool_forward(Layer<T>& layer, const T* x, Integer<T>* largest) {
    const T none = layer.relu ? T(0) : -std::numeric_limits<T>::infinity();
    for (int64_t y = 0; y < layer.out_height; y++)
        for (int64_t q = 0; q < layer.out_width; q++) {
            const int64_t top = y * layer.stride_height - layer.pad_height, left = q * layer.stride_width - layer.pad_width;
            const int64_t first = std::max<int64_t>(0, top), end = std::min(layer.height, top + layer.kernel_height);
            const int64_t from = std::max<int64_t>(0, left), until = std::min(layer.width, left + layer.kernel_width);
            const size_t to = (y * layer.out_width + q) * layer.in_step;
            for (size_t c = 0; c < layer.in_step; c += LANES<T>) {
                Vec<T> most = Vec<T>{} + none;
                Index<T> place = Index<T>{} - 1;
                for (int64_t line = first; line < end; line++)
                    for (int64_t column = from; column < until; column++) {
                        const Integer<T> pixel = line * layer.width + column;
                        const Vec<T> values = load(x + pixel * layer.in_step + c);
                        const auto more = (values > most) | (values != values);  // a NaN is the largest, as torch has it
                        most = more ? values : most;
                        place = more ? Index<T>{} + pixel : place;
                    }
                store(&layer.output[to + c], most);
                *reinterpret_cast<Index<T>*>(largest + to + c) = place;
            }
        }
}

template <class T> void pool_backward(const Layer<T>& layer, const T* slope, const Integer<T>* largest, T* to) {
    for (int64_t p = 0; p < layer.out_height * layer.out_width; p++, slope += layer.in_step, largest += layer.in_step)
        for (int64_t c = 0; c < layer.in; c++)
            if (largest[c] >= 0) to[largest[c] * layer.in_step + c] += slope[c];
}

// Calls `each(pixel of the output, pixel of the input)` for the pixels in each window of an average pool.
template <class T, class Each> void average_windows(const Layer<T>& layer, Each each) {
    for (int64_t y = 0; y < layer.out_height; y++)
        for (int64_t q = 0; q < layer.out_width; q++) {
            const int64_t top = y * layer.stride_height - layer.pad_height, left = q * layer.stride_width - layer.pad_width;
            const int64_t end = std::min(layer.height, top + layer.kernel_height), until = std::min(layer.width, left + layer.kernel_width);
            for (int64_t line = std::max<int64_t>(0, top); line < end; line++)
                for (int64_t column = std::max<int64_t>(0, left); column < until; column++)
                    each(y * layer.out_width + q, line * layer.width + column);
        }
}

template <class T> void average_forward(Layer<T>& layer, const T* x) {
    const size_t step = layer.in_step;
    T* to = layer.output.data();
    std::fill(layer.output.begin(), layer.output.end(), T(0));
    average_windows(layer, [&](int64_t out, int64_t in) { add(x + in * step, to + out * step, step); });
    for (T& value : layer.output) value /= T(layer.kernel_height * layer.kernel_width);
}

template <class T> void average_backward(const Layer<T>& layer, const T* slope, T* to) {
    const size_t step = layer.in_step;
    const T share = T(1) / T(layer.kernel_height * layer.kernel_width);
    average_windows(layer, [&](int64_t out, int64_t in) {
        for (size_t c = 0; c < step; c++) to[in * step + c] += slope[out * step + c] * share;
    });
}

// ---- GroupNorm ------------------------------------------------------------------------------------------------------------------------

// Sums over the pixels by channel, in `lanes`: of vectors that `each(place)` gives. Rows are summed by themselves: rounding stays small.
template <class T, class Each> void pixel_sums(const Layer<T>& layer, T* lanes, Each each) {
    for (size_t c = 0; c < layer.in_step; c += LANES<T>) {
        Vec<T> whole = {};
        for (int64_t y = 0; y < layer.height; y++) {
            Vec<T> line = {};
            for (int64_t x = 0; x < layer.width; x++) line += each((y * layer.width + x) * layer.in_step + c);
            whole += line;
        }
        store(lanes + c, whole);
    }
}

// Puts a number of each group, made by `of` of the sum of its channels' `lanes`, in the place of these.
template <class T, class Of> void by_group(const Layer<T>& layer, T* lanes, Of of) {
    const int64_t size = layer.in / layer.groups;
    for (int64_t g = 0; g < layer.groups; g++, lanes += size) {
        double sum = 0;
        for (int64_t c = 0; c < size; c++) sum += double(lanes[c]);
        std::fill_n(lanes, size, T(of(sum)));
    }
}

template <class T> void group_norm_forward(Layer<T>& layer, const T* x, T* normal, T* root) {
    const double count = double(layer.height * layer.width * (layer.in / layer.groups));
    T* mean = layer.lanes.data();  // padding stays zero: it has no group
    pixel_sums(layer, mean, [&](size_t at) { return load(x + at); });
    std::fill(mean + layer.in, mean + layer.in_step, T(0));
    by_group(layer, mean, [&](double sum) { return sum / count; });
    pixel_sums(layer, root, [&](size_t at) {
        const Vec<T> apart = load(x + at) - load(mean + at % layer.in_step);
        return apart * apart;
    });
    std::fill(root + layer.in, root + layer.in_step, T(0));
    by_group(layer, root, [&](double sum) { return 1 / std::sqrt(sum / count + layer.eps); });
    const T *scale = layer.weight.value.data(), *shift = layer.offset.value.data();
    T* to = layer.output.data();
    for (int64_t p = 0; p < layer.height * layer.width; p++, x += layer.in_step, normal += layer.in_step, to += layer.in_step)
        for (size_t c = 0; c < layer.in_step; c += LANES<T>) {
            const Vec<T> even = (load(x + c) - load(mean + c)) * load(root + c);
            store(normal + c, even);
            store(to + c, even * load(scale + c) + load(shift + c));
        }
}

template <class T> void group_norm_backward(Layer<T>& layer, const T* slope, const T* normal, const T* root, T* to) {
    const size_t step = layer.in_step;
    const double count = double(layer.height * layer.width * (layer.in / layer.groups));
    T *along = layer.lanes.data(), *whole = along + step;
    const T* scale = layer.weight.value.data();
    pixel_sums(layer, along, [&](size_t at) { return load(slope + at) * load(normal + at); });
    pixel_sums(layer, whole, [&](size_t at) { return load(slope + at); });
    add(along, layer.weight.gradient.data(), step);
    add(whole, layer.offset.gradient.data(), step);
    if (!to) return;
    for (T* lanes : {along, whole}) {
        for (size_t c = 0; c < step; c++) lanes[c] *= scale[c];
        by_group(layer, lanes, [&](double sum) { return sum / count; });
    }
    for (int64_t p = 0; p < layer.height * layer.width; p++, slope += step, normal += step, to += step)
        for (size_t c = 0; c < step; c += LANES<T>) {
            const Vec<T> change = load(slope + c) * load(scale + c) - load(whole + c) - load(normal + c) * load(along + c);
            store(to + c, load(to + c) + change * load(root + c));
        }
}

}  // namespace
