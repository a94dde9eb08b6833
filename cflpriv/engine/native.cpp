// Local SGD of one client at a time, layer by layer. `native.py` describes a network as rows of numbers and calls this file through ctypes.
//
// What makes it quick:
// - images lie with their channels last, so that a row of a convolution's kernel is contiguous, and nothing is unfolded;
// - weights are copied once a client into panels that are one vector wide; the copies are the parameters until the client is done;
// - a linear layer's gradient is never stored: each vector of it goes straight into the update of its weights;
// - where a max-pool follows a convolution, most of the gradient there is zero, and only the rest is visited.
//
// Layers are in an order in which each comes behind its inputs; layers of images come first. Gradients go the other way,
// and a value that several layers take gets the sum of theirs.
// Rows are padded to whole vectors. Padding of weights is zero when training begins, and its gradient is zero, so it stays zero.
// Nothing is kept between clients. Indices and labels are checked by the caller.

#include "native_images.h"
#include "native_layers.h"
#include "native_noise.h"

namespace {

constexpr size_t BLOCK = 64;

struct Run {  // `count` numbers: from `at` on in the vector, from `place` on and `step` apart in the buffers of a parameter
    size_t at, place, step, count;

    template <class T> void scatter(const T* vector, T* buffer) const {
        for (size_t k = 0; k < count; k++) buffer[place + k * step] = vector[at + k];
    }
    template <class T> void gather(const T* buffer, T* vector) const {
        for (size_t k = 0; k < count; k++) vector[at + k] = buffer[place + k * step];
    }
    __attribute__((noinline)) void add_rounded(const double* vector, double grid, double* buffer) const {  // inside of `walk` it lacks registers
        const double* from = vector + at;
        const double inverse = 1 / grid;  // exact: the grid is a power of two
        double* sum = buffer + place;
        for (size_t k = 0; k < count; k++, sum += step) *sum = std::nearbyint((from[k] + *sum) * inverse) * grid;
    }
};

template <class T> struct Network {
    std::vector<Layer<T>> layers;
    size_t images = 0;  // this many layers, up to the last Flatten, take one sample after the other; the others take a batch
    size_t sample = 0, classes = 0;
    Settings settings;
    Rule<T> rule;
    Buffer<T> flat;
    std::vector<Entry<T>> entries;

    Network(const Shape* shapes, size_t count, size_t longest, const Settings& chosen) : settings(chosen) {
        const size_t batch = chosen.clip != 0 ? 1 : longest;  // samples whose gradients are clipped are computed one at a time
        rule = {T(chosen.rate), T(chosen.momentum), T(chosen.decay), T(chosen.prox), false};
        rule.pulled = chosen.decay != 0 || chosen.anchored || chosen.corrected;
        sample = shapes[0].in * shapes[0].height * shapes[0].width;
        classes = shapes[count - 1].out;
        size_t pooled = 0;
        for (size_t q = 0; q < count; q++)
            if (shapes[q].kind == FLATTEN) images = q + 1;
        layers.resize(count);
        for (size_t q = 0; q < count; q++) static_cast<Shape&>(layers[q]) = shapes[q];
        connect();
        for (size_t q = 0; q < count; q++) {
            Layer<T>& layer = layers[q];
            reserve(layer, q < images, batch);
            if (layer.kind == LINEAR && chosen.clip != 0) {
                layer.clipped_inputs.assign(longest * layer.in, 0);
                layer.clipped_slopes.assign(longest * layer.output_size, 0);
            }
            if (layer.kind == MAX_POOL) pooled = std::max(pooled, layer.output_size);
        }
        entries.resize(pooled + 1);  // one more: a number that does not count is written, too
        if (!images) flat.assign(batch * sample, 0);
    }

    // What the layers are to each other.
    void connect() {
        std::vector<int64_t> takers(layers.size() + 1, 0), taker(layers.size() + 1, -1);
        for (size_t q = 0; q < layers.size(); q++) {
            Layer<T>& layer = layers[q];
            layer.learns = layer.weight_at >= 0;
            for (int64_t value : {layer.first, layer.second}) {
                if (value > 0 && layers[value - 1].learns) layer.learns = true;
                if (value >= 0) takers[value]++, taker[value] = q;
            }
        }
        std::vector<bool> has(layers.size() + 1, false);
        for (size_t q = layers.size(); q-- > 0;) {
            Layer<T>& layer = layers[q];
            if (layer.kind == CONVOLUTION && takers[q + 1] == 1 && layers[taker[q + 1]].kind == MAX_POOL) layer.pool = taker[q + 1];
            const int64_t values[2] = {layer.first, layer.second};
            for (int k = 0; k < 2; k++)
                if (values[k] > 0) layer.adds[k] = has[values[k]], has[values[k]] = true;
        }
    }

    void reserve(Layer<T>& layer, bool image, size_t batch) {
        layer.in_step = rounded(layer.in, LANES<T>), layer.out_step = rounded(layer.out, LANES<T>);
        if (!image || layer.kind == FLATTEN) {  // rows of features
            layer.output_size = layer.kept = rounded(layer.out, LANES<T>);
            layer.output.assign(batch * layer.output_size, 0), layer.slope.assign(batch * layer.output_size, 0);
            if (layer.kind == LINEAR) {
                layer.weight.reserve(layer.in * layer.output_size, settings, false);
                layer.offset.reserve(layer.output_size, settings, false);
            }
            return;
        }
        layer.output_size = layer.out_height * layer.out_width * layer.out_step;
        if (layer.kind == RELU || layer.kind == TANH || layer.kind == SIGMOID) layer.kept = layer.output_size;
        layer.output.assign((layer.kept ? batch : 1) * layer.output_size, 0), layer.slope.assign(layer.output_size, 0);
        if (layer.kind == MAX_POOL) {
            layer.largest.assign(batch * layer.output_size, 0);
        } else if (layer.kind == GROUP_NORM) {
            layer.weight.reserve(layer.in_step, settings, true), layer.offset.reserve(layer.in_step, settings, true);
            layer.normal.assign(batch * layer.output_size, 0), layer.root.assign(batch * layer.in_step, 0);
            layer.lanes.assign(2 * layer.in_step, 0);
        } else if (layer.kind == CONVOLUTION) {
            const size_t lines = layer.height + 2 * layer.pad_height;
            layer.row = layer.kernel_width * layer.in, layer.row_step = rounded(layer.row, 8);
            layer.image_row = (layer.width + 2 * layer.pad_width) * layer.in;
            layer.input_size = rounded(lines * layer.image_row + layer.row_step + 8, LANES<T>);
            layer.weight.reserve(layer.out * layer.kernel_height * layer.row_step, settings, true);
            layer.offset.reserve(layer.out_step, settings, true);
            layer.turned.assign(layer.kernel_height * layer.row * layer.out_step, 0);
            if (layer.is_dense()) layer.turned_gradient.assign(layer.turned.size(), 0);
            layer.input.assign(batch * layer.input_size, 0), layer.input_slope.assign(layer.input_size, 0);
            for (int64_t y = 0; y < layer.out_height; y++)
                for (int64_t x = 0; x < layer.out_width; x++)
                    layer.corners.push_back(y * layer.stride_height * layer.image_row + x * layer.stride_width * layer.in);
        }
    }

    // Calls `each(parameter, run)` for every number of the vector, run by run.
    template <class Each> void walk(Each each) {
        for (Layer<T>& layer : layers) {
            const size_t outputs = layer.out, inputs = layer.in, lines = layer.kernel_height, width = layer.kernel_width;
            size_t at = layer.weight_at;
            if (layer.kind == LINEAR) {
                for (size_t o = 0; o < outputs; o += LANES<T>)  // a panel, in blocks that stay in the nearest cache
                    for (size_t i = 0; i < inputs; i += BLOCK)
                        for (size_t lane = 0; lane < std::min(LANES<T>, outputs - o); lane++)
                            each(layer.weight, Run{at + (o + lane) * inputs + i, o * inputs + i * LANES<T> + lane, LANES<T>,
                                                   std::min(BLOCK, inputs - i)});
            } else if (layer.kind == CONVOLUTION) {
                for (size_t o = 0; o < outputs; o++)
                    for (size_t c = 0; c < inputs; c++)
                        for (size_t y = 0; y < lines; y++, at += width)
                            each(layer.weight, Run{at, (o * lines + y) * layer.row_step + c, inputs, width});
            } else if (layer.kind == GROUP_NORM) {
                each(layer.weight, Run{at, 0, 1, outputs});
            }
            if (layer.bias) each(layer.offset, Run{size_t(layer.offset_at), 0, 1, outputs});
        }
    }

    // `frozen`: of each layer its weight and its offset.
    void begin(const T* start, const T* anchor, const T* correction, const uint8_t* frozen) {
        for (Layer<T>& layer : layers)
            for (Parameter<T>* parameter : {&layer.weight, &layer.offset}) {
                for (Buffer<T>* buffer : {&parameter->value, &parameter->velocity, &parameter->anchor, &parameter->correction})
                    std::fill(buffer->begin(), buffer->end(), T(0));
                parameter->moves = !*frozen++;
            }
        walk([&](Parameter<T>& p, Run run) {
            run.scatter(start, p.value.data());
            if (settings.anchored) run.scatter(anchor, p.anchor.data());
            if (settings.corrected) run.scatter(correction, p.correction.data());
        });
        turn();
    }

    void end(T* to) {
        walk([&](Parameter<T>& p, Run run) { run.gather(p.value.data(), to); });
    }

    void turn() {
        for (Layer<T>& layer : layers)
            if (layer.kind == CONVOLUTION) layer.turn();
    }

    const T* rows_of(int64_t value, size_t& step) const {  // of features
        step = value ? layers[value - 1].output_size : sample;
        return value ? layers[value - 1].output.data() : flat.data();
    }

    void image_forward(size_t b, const T* raw) {  // of a sample [channel][y][x], as the caller has it
        for (size_t q = 0; q < images; q++) {
            Layer<T>& layer = layers[q];
            const auto output_of = [&](int64_t value) { return &layers[value - 1].output[b * layers[value - 1].kept]; };
            const bool is_raw = layer.first == 0;
            const T* x = is_raw ? raw : output_of(layer.first);
            const size_t pixels = layer.height * layer.width, in = layer.in;
            const size_t pixel_step = is_raw ? 1 : layer.in_step, channel_step = is_raw ? pixels : 1;
            T* to = &layer.output[b * layer.kept];
            switch (layer.kind) {
                case CONVOLUTION: {
                    T* input = &layer.input[b * layer.input_size];
                    for (int64_t y = 0; y < layer.height; y++) {
                        T* line = input + (y + layer.pad_height) * layer.image_row + layer.pad_width * in;
                        const T* from = x + y * layer.width * pixel_step;
                        for (int64_t p = 0; p < layer.width; p++, from += pixel_step, line += in)
                            for (size_t c = 0; c < in; c++) line[c] = from[c * channel_step];
                    }
                    if (layer.stride_width * layer.in == 1)
                        convolution_forward<T, 1>(layer, input);
                    else
                        convolution_forward<T, 0>(layer, input);
                    break;
                }
                case MAX_POOL: pool_forward(layer, x, &layer.largest[b * layer.output_size]); break;
                case AVERAGE_POOL: average_forward(layer, x); break;
                case GROUP_NORM: group_norm_forward(layer, x, &layer.normal[b * layer.output_size], &layer.root[b * layer.in_step]); break;
                case ADD:
                    std::copy_n(x, layer.output_size, to);
                    add(output_of(layer.second), to, layer.output_size);
                    break;
                case FLATTEN:
                    for (size_t p = 0; p < pixels; p++)
                        for (size_t c = 0; c < in; c++) to[c * pixels + p] = x[p * pixel_step + c * channel_step];
                    break;
                case PIXELS:
                    for (size_t p = 0; p < pixels; p++)
                        for (size_t c = 0; c < in; c++) to[p * layer.in_step + c] = x[p * pixel_step + c * channel_step];
                    break;
                default: activate(layer.kind, x, to, layer.output_size);
            }
        }
    }

    // What a max-pool hands back to a convolution: the numbers that are not zero.
    size_t list(const Layer<T>& pool, const Layer<T>& before, size_t b) {
        const size_t in = pool.in, step = pool.in_step, pixels = pool.out_height * pool.out_width;
        const T* slope = pool.slope.data();
        const Integer<T>* largest = &pool.largest[b * pool.output_size];
        const int32_t* corners = before.corners.data();
        Entry<T>* entry = entries.data();
        for (size_t p = 0; p < pixels; p++, largest += step, slope += step)
            for (size_t c = 0; c < in; c++) {
                *entry = {corners[std::max<Integer<T>>(largest[c], 0)], int32_t(c), slope[c]};
                entry += (largest[c] >= 0) & (slope[c] != 0);
            }
        return entry - entries.data();
    }

    // Where layer `q` adds the gradient of its first or second (`k` = 1) input, of `count` numbers. Null: nothing before learns.
    T* slope_of_input(size_t q, int k, size_t b, size_t count) {
        Layer<T>& layer = layers[q];
        const int64_t value = k ? layer.second : layer.first;
        if (value <= 0 || !layers[value - 1].learns) return nullptr;
        Layer<T>& before = layers[value - 1];
        const bool of_rows = size_t(value) > images || before.kind == FLATTEN;
        T* to = &before.slope[of_rows ? b * before.output_size : 0];
        if (!layer.adds[k]) std::fill_n(to, count, T(0));
        return to;
    }

    void image_backward(size_t b) {
        for (size_t q = images; q-- > 0;) {
            Layer<T>& layer = layers[q];
            if (!layer.learns || (layer.kind == MAX_POOL && layers[layer.first - 1].pool == int64_t(q))) continue;
            const size_t pixels = layer.height * layer.width, in = layer.in;
            const T* slope = &layer.slope[layer.kind == FLATTEN ? b * layer.output_size : 0];
            T* to = slope_of_input(q, 0, b, pixels * layer.in_step);
            if (layer.kind == CONVOLUTION) {
                convolution_backward(layer, b, to);
            } else if (layer.kind == GROUP_NORM) {
                group_norm_backward(layer, slope, &layer.normal[b * layer.output_size], &layer.root[b * layer.in_step], to);
            } else if (layer.kind == ADD) {
                if (to) add(slope, to, layer.output_size);
                T* other = slope_of_input(q, 1, b, layer.output_size);
                if (other) add(slope, other, layer.output_size);
            } else if (!to) {
                continue;
            } else if (layer.kind == FLATTEN) {
                for (size_t p = 0; p < pixels; p++)
                    for (size_t c = 0; c < in; c++) to[p * layer.in_step + c] += slope[c * pixels + p];
            } else if (layer.kind == MAX_POOL) {
                pool_backward(layer, slope, &layer.largest[b * layer.output_size], to);
            } else if (layer.kind == AVERAGE_POOL) {
                average_backward(layer, slope, to);
            } else {
                activate_backward(layer.kind, &layer.output[b * layer.kept], slope, to, layer.output_size);
            }
        }
    }

    void convolution_backward(Layer<T>& layer, size_t b, T* to) {
        const T* input = &layer.input[b * layer.input_size];
        if (to) std::fill(layer.input_slope.begin(), layer.input_slope.end(), T(0));
        if (layer.is_dense()) {
            dense_gradient(layer, layer.slope.data(), input);
            if (to) dense_slope(layer, layer.slope.data());
        } else {
            const size_t count = list(layers[layer.pool], layer, b);
            if (to)
                sparse_backward<T, true>(layer, entries, count, input);
            else
                sparse_backward<T, false>(layer, entries, count, input);
        }
        if (!to) return;
        const size_t in = layer.in;
        for (int64_t y = 0; y < layer.height; y++) {
            const T* from = &layer.input_slope[(y + layer.pad_height) * layer.image_row + layer.pad_width * in];
            for (int64_t p = 0; p < layer.width; p++, from += in, to += layer.in_step)
                for (size_t c = 0; c < in; c++) to[c] += from[c];
        }
    }

    void forward(const T* x, const int64_t* rows, size_t batch) {
        for (size_t b = 0; b < batch; b++) {
            const T* from = x + rows[b] * sample;
            if (images)
                image_forward(b, from);
            else
                std::copy(from, from + sample, &flat[b * sample]);
        }
        for (size_t q = images; q < layers.size(); q++) {
            size_t step, other_step;
            Layer<T>& layer = layers[q];
            const T* input = rows_of(layer.first, step);
            if (layer.kind == LINEAR) {
                linear_forward(layer, batch, input, step);
                continue;
            }
            for (size_t b = 0; b < batch; b++) {
                T* to = &layer.output[b * layer.output_size];
                if (layer.kind == ADD) {
                    std::copy_n(input + b * step, layer.in, to);
                    add(rows_of(layer.second, other_step) + b * other_step, to, layer.in);
                } else {
                    activate(layer.kind, input + b * step, to, layer.in);
                }
            }
        }
    }

    void loss_slopes(const int64_t* y, const int64_t* rows, size_t batch, T factor) {
        Layer<T>& last = layers.back();
        for (size_t b = 0; b < batch; b++) {
            const T* scores = &last.output[b * last.output_size];
            T* slope = &last.slope[b * last.output_size];
            T most = scores[0], sum = 0;
            for (size_t c = 1; c < classes; c++) most = scores[c] > most || scores[c] != scores[c] ? scores[c] : most;
            for (size_t c = 0; c < classes; c++) slope[c] = exponential(scores[c] - most);
            for (size_t c = 0; c < classes; c++) sum += slope[c];
            for (size_t c = 0; c < classes; c++) slope[c] = (slope[c] / sum - T(size_t(y[rows[b]]) == c)) * factor;
        }
    }

    void backward(size_t batch) {  // the gradients of convolutions and GroupNorms, and the slopes of all layers
        for (size_t q = layers.size(); q-- > images;) {
            Layer<T>& layer = layers[q];
            for (int k = 0; k < 1 + (layer.kind == ADD); k++) {
                const int64_t value = k ? layer.second : layer.first;
                const size_t step = value ? layers[value - 1].output_size : 0;
                T* to = slope_of_input(q, k, 0, batch * step);
                if (!to) continue;
                if (layer.kind == LINEAR) {
                    linear_backward(layer, batch, to, step);
                    continue;
                }
                for (size_t b = 0; b < batch; b++, to += step) {
                    const T* slope = &layer.slope[b * layer.output_size];
                    if (layer.kind == ADD)
                        add(slope, to, layer.in);
                    else
                        activate_backward(layer.kind, &layer.output[b * layer.output_size], slope, to, layer.in);
                }
            }
        }
        for (size_t q = 0; q < images; q++) {
            for (Parameter<T>* parameter : {&layers[q].weight, &layers[q].offset})
                std::fill(parameter->gradient.begin(), parameter->gradient.end(), T(0));
            std::fill(layers[q].turned_gradient.begin(), layers[q].turned_gradient.end(), T(0));
        }
        for (size_t b = 0; b < batch; b++) image_backward(b);
        for (size_t q = 0; q < images; q++) {
            if (layers[q].is_dense()) layers[q].turn_back();
            if (layers[q].kind == CONVOLUTION) layers[q].clear_padding();
        }
    }

    // The sum over a batch of gradients, each scaled down to the norm `clip`, in float64. A sample is computed by itself, so it adds the
    // same bits beside any others; one whose gradient has no finite norm adds nothing.
    void clipped_sum(const T* x, const int64_t* y, const int64_t* rows, size_t batch, double expected) {
        for (Layer<T>& layer : layers)
            for (Parameter<T>* parameter : {&layer.weight, &layer.offset})
                std::fill(parameter->sum.begin(), parameter->sum.end(), 0.0);
        for (size_t b = 0; b < batch; b++) {
            forward(x, rows + b, 1);
            loss_slopes(y, rows + b, 1, T(1));
            backward(1);
            const double norm = gradient_norm();
            const double factor = settings.clip / std::max(norm, settings.clip) / (expected > 0 ? expected : double(batch));
            keep(b, factor, std::isfinite(norm));
        }
        for (Layer<T>& layer : layers)
            if (layer.kind == LINEAR) linear_sums(layer, batch);
    }

    // In float64: a square of a small slope is zero in float32, and beside large inputs that is most of the norm.
    double gradient_norm() {
        double sum = 0;
        for (size_t q = 0; q < layers.size(); q++) {
            Layer<T>& layer = layers[q];
            size_t step;
            if (layer.kind == LINEAR) {
                sum += (squares(rows_of(layer.first, step), layer.in) + double(layer.bias)) * squares(layer.slope.data(), layer.out);
            } else if (layer.stores_gradient()) {
                sum += squares(layer.weight.gradient.data(), layer.weight.count);
                if (layer.bias) sum += squares(layer.offset.gradient.data(), layer.out);
            }
        }
        return std::sqrt(sum);
    }

    void keep(size_t b, double factor, bool finite) {  // of a sample without a finite norm, nothing
        for (size_t q = 0; q < layers.size(); q++) {
            Layer<T>& layer = layers[q];
            if (layer.kind == LINEAR) {
                size_t step;
                const T* input = rows_of(layer.first, step);
                double *inputs = &layer.clipped_inputs[b * layer.in], *slopes = &layer.clipped_slopes[b * layer.output_size];
                for (int64_t i = 0; i < layer.in; i++) inputs[i] = finite ? double(input[i]) : 0.0;
                for (int64_t o = 0; o < layer.out; o++) slopes[o] = finite ? double(layer.slope[o]) * factor : 0.0;
            } else if (layer.stores_gradient() && finite) {
                for (size_t k = 0; k < layer.weight.count; k++) layer.weight.sum[k] += double(layer.weight.gradient[k]) * factor;
                for (int64_t o = 0; o < layer.out * layer.bias; o++) layer.offset.sum[o] += double(layer.offset.gradient[o]) * factor;
            }
        }
    }

    // One step on clipped gradients. `noise`, in the order of the vector, is added in float64 and the sum rounded to multiples of `grid`.
    void clipped_step(const T* x, const int64_t* y, const int64_t* rows, size_t batch, double expected, const double* noise) {
        clipped_sum(x, y, rows, batch, expected);
        if (noise) walk([&](Parameter<T>& p, Run run) { run.add_rounded(noise, settings.grid, p.sum.data()); });
        for (Layer<T>& layer : layers) {
            layer.weight.update_by_sum(rule);
            if (layer.bias) layer.offset.update_by_sum(rule);
        }
        turn();
    }

    void step(const T* x, const int64_t* y, const int64_t* rows, size_t batch, double expected) {
        forward(x, rows, batch);
        loss_slopes(y, rows, batch, T(1) / T(expected > 0 ? expected : double(batch)));
        backward(batch);
        for (size_t q = 0; q < layers.size(); q++) {
            Layer<T>& layer = layers[q];
            if (layer.kind == LINEAR) {
                size_t stride;
                const T* input = rows_of(layer.first, stride);
                linear_update(layer, batch, input, stride, rule);
            } else if (layer.stores_gradient()) {
                layer.weight.update(rule);
                if (layer.bias) layer.offset.update(rule);
                if (layer.kind == CONVOLUTION) layer.turn();
            }
        }
    }
};

template <class T> void* create(const int64_t* shapes, int64_t layers, int64_t batch, const Settings* settings) {
    try {
        return new Network<T>(reinterpret_cast<const Shape*>(shapes), layers, batch, *settings);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

template <class T> void outputs(void* made, const T* x, int64_t count, int64_t batch, T* to) {
    Network<T>& network = *static_cast<Network<T>*>(made);
    const Layer<T>& last = network.layers.back();
    std::vector<int64_t> rows(batch);
    for (int64_t at = 0; at < count; at += batch) {
        const int64_t some = std::min(batch, count - at);
        for (int64_t b = 0; b < some; b++) rows[b] = at + b;
        network.forward(x, rows.data(), some);
        for (int64_t b = 0; b < some; b++, to += last.out) std::copy_n(&last.output[b * last.output_size], last.out, to);
    }
}

// Sets a client's parameters and forgets the one before.
template <class T>
void begin(void* network, const T* start, const T* anchor, const T* correction, const uint8_t* frozen) {
    static_cast<Network<T>*>(network)->begin(start, anchor, correction, frozen);
}

template <class T>
void steps(void* made, const T* x, const int64_t* y, const int64_t* rows, const int64_t* ends, int64_t first, int64_t end, double expected,
           const double* noise) {
    Network<T>& network = *static_cast<Network<T>*>(made);
    for (int64_t at = first; at < end; at++) {
        const int64_t from = at ? ends[at - 1] : 0;
        if (network.settings.clip != 0)
            network.clipped_step(x, y, rows + from, ends[at] - from, expected, noise);
        else
            network.step(x, y, rows + from, ends[at] - from, expected);
    }
}

template <class T>
void clipped_sum(void* made, const T* x, const int64_t* y, const int64_t* rows, int64_t count, double expected, double* to) {
    Network<T>& network = *static_cast<Network<T>*>(made);
    network.clipped_sum(x, y, rows, count, expected);
    network.walk([&](Parameter<T>& p, Run run) { run.gather(p.sum.data(), to); });
}

}  // namespace

#define EXPORTED(T, NAME)                                                                                                                  \
    extern "C" void* create_##NAME(const int64_t* shapes, int64_t layers, int64_t batch, const Settings* settings) {                       \
        return create<T>(shapes, layers, batch, settings);                                                                                 \
    }                                                                                                                                      \
    extern "C" void destroy_##NAME(void* network) { delete static_cast<Network<T>*>(network); }                                            \
    extern "C" void begin_##NAME(void* network, const T* start, const T* anchor, const T* correction, const uint8_t* frozen) {             \
        begin<T>(network, start, anchor, correction, frozen);                                                                              \
    }                                                                                                                                      \
    extern "C" void steps_##NAME(void* network, const T* x, const int64_t* y, const int64_t* rows, const int64_t* ends, int64_t first,     \
                                 int64_t end, double expected, const double* noise) {                                                      \
        steps<T>(network, x, y, rows, ends, first, end, expected, noise);                                                                  \
    }                                                                                                                                      \
    extern "C" void clipped_sum_##NAME(void* network, const T* x, const int64_t* y, const int64_t* rows, int64_t count, double expected,   \
                                       double* to) {                                                                                       \
        clipped_sum<T>(network, x, y, rows, count, expected, to);                                                                          \
    }                                                                                                                                      \
    extern "C" void outputs_##NAME(void* network, const T* x, int64_t count, int64_t batch, T* to) {                                       \
        outputs<T>(network, x, count, batch, to);                                                                                          \
    }                                                                                                                                      \
    extern "C" void end_##NAME(void* network, T* to) { static_cast<Network<T>*>(network)->end(to); }

EXPORTED(float, float32)
EXPORTED(double, float64)

// Makes rows of normals, `step` apart, of the words (rows, count) of two keystreams, which are wiped.
extern "C" void normals(uint64_t* words, uint64_t* more, int64_t rows, int64_t count, double deviation, double* to, int64_t step) {
    for (int64_t row = 0; row < rows; row++) row_of_normals(words + row * count, more + row * count, count, deviation, to + row * step);
}

extern "C" const char* sources() { return SOURCES; }  // a digest of this file and its headers, which `compiled.py` compares
