// Local SGD of one client at a time, layer by layer. `native.py` describes a network as rows of numbers and calls this file through ctypes.
//
// What makes it quick:
// - images lie with their channels last, so that a row of a convolution's kernel is contiguous, and nothing is unfolded;
// - weights are copied once a client into panels that are one vector wide; the copies are the parameters until the client is done;
// - a linear layer's gradient is never stored: each vector of it goes straight into the update of its weights;
// - a max-pool follows each convolution, so most of the gradient there is zero, and only the rest is visited.
//
// Rows are padded to whole vectors. Padding of weights is zero when training begins, and its gradient is zero, so it stays zero.
// Nothing is kept between clients. Indices and labels are checked by the caller.

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
    size_t images = 0;  // this many layers, up to the first Flatten, take one sample after the other; the others take a batch
    size_t sample = 0, classes = 0;
    Settings settings;
    Rule<T> rule;
    Buffer<T> flat, scratch;
    std::vector<Entry<T>> entries;

    Network(const Shape* shapes, size_t count, size_t longest, const Settings& chosen) : settings(chosen) {
        const size_t batch = chosen.clip != 0 ? 1 : longest;  // samples whose gradients are clipped are computed one at a time
        rule = {T(chosen.rate), T(chosen.momentum), T(chosen.decay), T(chosen.prox), false};
        rule.pulled = chosen.decay != 0 || chosen.anchored || chosen.corrected;
        sample = shapes[0].in * shapes[0].height * shapes[0].width;
        classes = shapes[count - 1].out;
        size_t most = 0;
        for (size_t q = 0; q < count; q++)
            if (shapes[q].kind == FLATTEN) images = q + 1;
        for (size_t q = 0; q < count; q++) {
            layers.emplace_back();
            Layer<T>& layer = layers.back();
            static_cast<Shape&>(layer) = shapes[q];
            shape(layer, q < images, batch);
            if (layer.kind == LINEAR && chosen.clip != 0) {
                layer.clipped_inputs.assign(longest * layer.in, 0);
                layer.clipped_slopes.assign(longest * layer.output_size, 0);
            }
            const size_t into = layer.height * layer.width * layer.in_step, out = layer.out_height * layer.out_width * layer.out_step;
            most = std::max({most, into, out});
        }
        size_t pooled = 0;
        for (const Layer<T>& layer : layers)
            if (layer.kind == MAX_POOL) pooled = std::max(pooled, layer.output_size);
        entries.resize(pooled + 1);  // one more: a number that does not count is written, too
        if (!images) flat.assign(batch * sample, 0);
        scratch.assign(images ? most : 0, 0);
    }

    void shape(Layer<T>& layer, bool image, size_t batch) {
        layer.in_step = rounded(layer.in, LANES<T>), layer.out_step = rounded(layer.out, LANES<T>);
        if (layer.kind == CONVOLUTION) {
            const size_t lines = layer.height + 2 * layer.pad_height;
            layer.row = layer.kernel_width * layer.in, layer.row_step = rounded(layer.row, 8);
            layer.image_row = (layer.width + 2 * layer.pad_width) * layer.in;
            layer.input_size = rounded(lines * layer.image_row + layer.row_step + 8, LANES<T>);
            layer.output_size = layer.out_height * layer.out_width * layer.out_step;
            layer.weight.reserve(layer.out * layer.kernel_height * layer.row_step, settings, true);
            layer.offset.reserve(layer.out_step, settings, true);
            layer.turned.assign(layer.kernel_height * layer.row * layer.out_step, 0);
            layer.input.assign(batch * layer.input_size, 0), layer.output.assign(layer.output_size, 0);
            layer.slope.assign(layer.input_size, 0);
            for (int64_t y = 0; y < layer.out_height; y++)
                for (int64_t x = 0; x < layer.out_width; x++)
                    layer.corners.push_back(y * layer.stride_height * layer.image_row + x * layer.stride_width * layer.in);
        } else if (layer.kind == MAX_POOL) {
            layer.output_size = layer.out_height * layer.out_width * layer.in_step;
            layer.output.assign(layer.output_size, 0), layer.largest.assign(batch * layer.output_size, 0);
        } else if (image && layer.kind != FLATTEN) {
            layer.output_size = layer.height * layer.width * layer.in_step;
            layer.output.assign(batch * layer.output_size, 0);
        } else {  // rows of features
            layer.output_size = rounded(layer.out, LANES<T>);
            layer.output.assign(batch * layer.output_size, 0), layer.slope.assign(batch * layer.output_size, 0);
            if (layer.kind == LINEAR) {
                layer.weight.reserve(layer.in * layer.output_size, settings, false);
                layer.offset.reserve(layer.output_size, settings, false);
            }
        }
    }

    // Calls `each(parameter, run)` for every number of the vector, run by run.
    template <class Each> void walk(Each each) {
        size_t at = 0;
        for (Layer<T>& layer : layers) {
            const size_t outputs = layer.out, inputs = layer.in, lines = layer.kernel_height, width = layer.kernel_width;
            if (layer.kind == LINEAR) {
                for (size_t o = 0; o < outputs; o += LANES<T>)  // a panel, in blocks that stay in the nearest cache
                    for (size_t i = 0; i < inputs; i += BLOCK)
                        for (size_t lane = 0; lane < std::min(LANES<T>, outputs - o); lane++)
                            each(layer.weight, Run{at + (o + lane) * inputs + i, o * inputs + i * LANES<T> + lane, LANES<T>,
                                                   std::min(BLOCK, inputs - i)});
                at += outputs * inputs;
            } else if (layer.kind == CONVOLUTION) {
                for (size_t o = 0; o < outputs; o++)
                    for (size_t c = 0; c < inputs; c++)
                        for (size_t y = 0; y < lines; y++, at += width)
                            each(layer.weight, Run{at, (o * lines + y) * layer.row_step + c, inputs, width});
            }
            if ((layer.kind == LINEAR || layer.kind == CONVOLUTION) && layer.bias) {
                each(layer.offset, Run{at, 0, 1, outputs});
                at += outputs;
            }
        }
    }

    void begin(const T* start, const T* anchor, const T* correction, const uint8_t* frozen) {
        for (Layer<T>& layer : layers)
            for (Parameter<T>* parameter : {&layer.weight, &layer.offset}) {
                for (Buffer<T>* buffer : {&parameter->value, &parameter->velocity, &parameter->anchor, &parameter->correction})
                    std::fill(buffer->begin(), buffer->end(), T(0));
                if (parameter == &layer.weight ? layer.weight.count > 0 : layer.bias && layer.offset.count > 0) parameter->moves = !*frozen++;
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

    const T* input_of(size_t q, size_t& step) const {  // of a layer of the flat part
        step = q ? layers[q - 1].output_size : sample;
        return q ? layers[q - 1].output.data() : flat.data();
    }

    void image_forward(size_t b, const T* x) {
        bool raw = true;  // [channel][y][x], as the caller has it
        for (size_t q = 0; q < images; q++) {
            Layer<T>& layer = layers[q];
            const size_t pixels = layer.height * layer.width, in = layer.in;
            if (layer.kind == CONVOLUTION) {
                T* input = &layer.input[b * layer.input_size];
                const size_t pixel_step = raw ? 1 : layer.in_step, channel_step = raw ? pixels : 1, width = layer.width;
                for (int64_t y = 0; y < layer.height; y++) {
                    T* to = input + (y + layer.pad_height) * layer.image_row + layer.pad_width * in;
                    const T* from = x + y * width * pixel_step;
                    for (size_t p = 0; p < width; p++, from += pixel_step, to += in)
                        for (size_t c = 0; c < in; c++) to[c] = from[c * channel_step];
                }
                if (layer.stride_width * layer.in == 1)
                    convolution_forward<T, 1>(layer, input);
                else
                    convolution_forward<T, 0>(layer, input);
                x = layer.output.data();
            } else if (layer.kind == MAX_POOL) {
                pool_forward(layer, x, &layer.largest[b * layer.output_size]);
                x = layer.output.data();
            } else if (layer.kind == FLATTEN) {
                T* to = &layer.output[b * layer.output_size];
                if (raw)
                    std::copy(x, x + in * pixels, to);
                else
                    for (size_t p = 0; p < pixels; p++)
                        for (size_t c = 0; c < in; c++) to[c * pixels + p] = x[p * layer.in_step + c];
            } else {
                T* to = &layer.output[b * layer.output_size];
                activate(layer.kind, x, to, layer.output_size);
                x = to;
            }
            raw = false;
        }
    }

    // What a max-pool hands back to a convolution: the numbers that are not zero.
    size_t list(const Layer<T>& pool, const Layer<T>& before, size_t b, const T* slope) {
        const size_t in = pool.in, step = pool.in_step, pixels = pool.out_height * pool.out_width;
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

    void image_backward(size_t b) {
        T* slope = scratch.data();
        size_t listed = 0;  // numbers of the gradient that are in `entries`
        for (size_t q = images; q-- > 0;) {
            Layer<T>& layer = layers[q];
            const size_t pixels = layer.height * layer.width, in = layer.in;
            if (layer.kind == FLATTEN) {
                const T* from = &layer.slope[b * layer.output_size];
                for (size_t p = 0; p < pixels; p++)
                    for (size_t c = 0; c < in; c++) slope[p * layer.in_step + c] = from[c * pixels + p];
            } else if (layer.kind == MAX_POOL) {
                listed = list(layer, layers[q - 1], b, slope);
            } else if (layer.kind == CONVOLUTION) {
                const T* input = &layer.input[b * layer.input_size];
                if (q == 0) return sparse_backward<T, false>(layer, entries, listed, input);
                std::fill(layer.slope.begin(), layer.slope.end(), T(0));
                sparse_backward<T, true>(layer, entries, listed, input);
                for (int64_t y = 0; y < layer.height; y++) {
                    const T* from = &layer.slope[(y + layer.pad_height) * layer.image_row + layer.pad_width * in];
                    T* to = slope + y * layer.width * layer.in_step;
                    for (int64_t p = 0; p < layer.width; p++, from += in, to += layer.in_step)
                        for (size_t c = 0; c < in; c++) to[c] = from[c];
                }
            } else {
                activate_backward(layer.kind, &layer.output[b * layer.output_size], slope, layer.output_size);
            }
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
            size_t step;
            const T* input = input_of(q, step);
            Layer<T>& layer = layers[q];
            if (layer.kind == LINEAR)
                linear_forward(layer, batch, input, step);
            else
                for (size_t b = 0; b < batch; b++) activate(layer.kind, input + b * step, &layer.output[b * layer.output_size], layer.in);
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

    void backward(size_t batch) {  // the gradients of convolutions, and the slopes of all layers
        for (size_t q = layers.size(); q-- > images;) {
            if (q == 0 || (q == images && images == 1)) break;  // what is before has no parameters
            Layer<T>& layer = layers[q];
            Layer<T>& before = layers[q - 1];
            if (layer.kind == LINEAR) {
                linear_backward(layer, batch, before.slope.data(), before.output_size);
                continue;
            }
            for (size_t b = 0; b < batch; b++) {
                T* to = &before.slope[b * before.output_size];
                std::copy_n(&layer.slope[b * layer.output_size], layer.in, to);
                activate_backward(layer.kind, &layer.output[b * layer.output_size], to, layer.in);
            }
        }
        for (size_t q = 0; q < images; q++)
            for (Parameter<T>* parameter : {&layers[q].weight, &layers[q].offset})
                std::fill(parameter->gradient.begin(), parameter->gradient.end(), T(0));
        if (images > 1)
            for (size_t b = 0; b < batch; b++) image_backward(b);
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
                sum += (squares(input_of(q, step), layer.in) + double(layer.bias)) * squares(layer.slope.data(), layer.out);
            } else if (layer.kind == CONVOLUTION) {
                layer.clear_padding();
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
                const T* input = input_of(q, step);
                double *inputs = &layer.clipped_inputs[b * layer.in], *slopes = &layer.clipped_slopes[b * layer.output_size];
                for (int64_t i = 0; i < layer.in; i++) inputs[i] = finite ? double(input[i]) : 0.0;
                for (int64_t o = 0; o < layer.out; o++) slopes[o] = finite ? double(layer.slope[o]) * factor : 0.0;
            } else if (layer.kind == CONVOLUTION && finite) {
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
                const T* input = input_of(q, stride);
                linear_update(layer, batch, input, stride, rule);
            } else if (layer.kind == CONVOLUTION) {
                layer.clear_padding();
                layer.weight.update(rule);
                if (layer.bias) layer.offset.update(rule);
                layer.turn();
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
