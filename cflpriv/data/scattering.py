"""Wavelet scattering of images: a public feature map, which uses no statistic of any data.

Two layers of Morlet wavelets at two scales and eight angles, each followed by the modulus and a low-pass filter, make 81 channels at a
quarter of the resolution of one. Convolutions and filters are those of Oyallon & Mallat 2015 ("Deep roto-translation scattering for object
classification") with the parameters of kymatio (Andreux et al. 2020). kymatio 0.3 cannot be imported beside SciPy 1.17. Deviation: kymatio
cuts the spectra of filters at lower resolutions, here every subsampled convolution is exact; values differ by less than 1e-3.

`features` are what Tramèr & Boneh 2021 ("Differentially private learning needs better features") train a linear model on: channels in
groups, each group normalised by its own mean and deviation over one sample (group normalisation without parameters). So a sample's
features depend on this sample alone, and cost no privacy. Images are computed one by one: beside others the last bits could differ, which a
server that lies could amplify (`engine.clipped_sums`).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import InputError
from ..types import Array, Population

__all__ = ["FEATURE_MEAN", "FEATURE_STD", "feature_shape", "features", "has_features", "scattering"]

SCALES, ANGLES = 2, 8
PADDING = 2**SCALES
CHANNELS = 1 + ANGLES * SCALES + ANGLES**2 * (SCALES * (SCALES - 1) // 2)
GROUPS = 27
RANGE = 8.0
"""Normalised features beyond it are clipped, and the range is mapped to [0, 1]."""
FEATURE_MEAN, FEATURE_STD = (0.5,), (1 / (2 * RANGE),)
"""What a model normalises its input by to undo that map. Constants: no statistic of any data."""
SMALLEST = 8
EPS = 1e-5


def feature_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape of the features of an image of `shape` (channels, height, width). `InputError` for what is no image of 8×8 at least."""
    if len(shape) != 3 or min(shape[1:]) < SMALLEST:
        raise InputError(f"data.features = 'scattering': needs images of at least {SMALLEST}×{SMALLEST}, the data have shape {shape}")
    return (shape[0] * CHANNELS, *(-(-side // PADDING) for side in shape[1:]))


def has_features(population: Population) -> bool:
    """Whether samples have a shape of `features`, and models undo the map to [0, 1]."""
    return population.shape[0] % CHANNELS == 0 and (population.mean, population.std) == (FEATURE_MEAN, FEATURE_STD)


def features(x: Array) -> Array:
    """Normalised scattering (n, channels · 81, ⌈h/4⌉, ⌈w/4⌉) float32 in [0, 1] of images (n, channels, h, w) in [0, 1].

    The model's normalisation by `FEATURE_MEAN` and `FEATURE_STD` gives the normalised features back, up to clipping.
    """
    shape = feature_shape(x.shape[1:])
    made = np.empty((len(x), *shape), np.float32)
    groups = GROUPS * x.shape[1]
    for image, out in zip(x, made, strict=True):
        rows = scattering(image[None]).reshape(groups, -1)
        rows -= rows.mean(1, keepdims=True)
        rows /= np.sqrt(np.square(rows).mean(1, keepdims=True) + EPS)
        np.clip(rows, -RANGE, RANGE, out=rows)
        out[:] = (rows / (2 * RANGE) + 0.5).reshape(shape)
    return made


def scattering(x: Array) -> Array:
    """Scattering (n, channels · 81, ⌈h/4⌉, ⌈w/4⌉) float32 of images (n, channels, h, w), each channel of an image by itself.

    Order of the 81: the low-pass, the first layer by scale and angle, the second by its angles.
    """
    from scipy.fft import fft2, ifft2  # slow to import

    count, channels, height, width = x.shape
    bank = _bank(height, width)
    images = np.pad(x.astype(np.float32).reshape(-1, height, width), ((0, 0), *bank.margins), mode="reflect")
    spectrum = fft2(images)[:, None]
    fine = np.abs(ifft2(spectrum * bank.fine))
    coarse = np.abs(ifft2(_halved(spectrum * bank.coarse)))
    both = np.abs(ifft2(_halved(fft2(fine)[:, :, None] * bank.coarse)))
    both = both.reshape(len(images), ANGLES**2, *both.shape[3:])
    rows, columns = bank.blurs
    layers = [rows @ images[:, None] @ columns, rows @ fine @ columns]
    rows, columns = bank.blurs_of_half
    made = np.concatenate([*layers, rows @ coarse @ columns, rows @ both @ columns], axis=1)
    return made.reshape(count, channels * CHANNELS, *made.shape[2:])


def _halved(spectrum: Array) -> Array:
    """The spectrum (…, h / 2, w / 2) of every other number of what has the spectrum (…, h, w)."""
    height, width = spectrum.shape[-2] // 2, spectrum.shape[-1] // 2
    rows = spectrum[..., :height, :] + spectrum[..., height:, :]
    return np.asarray((rows[..., :width] + rows[..., width:]) * np.float32(0.25))


@dataclass(frozen=True, eq=False)
class _Bank:
    """Filters for images of one size, whose `margins` are padded. `fine` and `coarse`: spectra (8, h, w) of the wavelets of the two scales.

    `blurs`: the low-pass filter with its subsampling, as matrices for rows (⌈h/4⌉, h) and columns (w, ⌈w/4⌉); `blurs_of_half`: of every
    other number.
    """

    margins: tuple[tuple[int, int], tuple[int, int]]
    fine: Array
    coarse: Array
    blurs: tuple[Array, Array]
    blurs_of_half: tuple[Array, Array]


@lru_cache(maxsize=8)
def _bank(height: int, width: int) -> _Bank:
    from scipy.fft import fft2

    sides = [(side, side + 2 * PADDING + -side % PADDING) for side in (height, width)]
    (_, rows), (_, columns) = sides
    wavelets = [
        np.stack([np.asarray(fft2(_morlet(rows, columns, scale, angle)).real, np.float32) for angle in range(ANGLES)])
        for scale in range(SCALES)
    ]
    blurs = [[_blur(side, padded, stride) for side, padded in sides] for stride in (1, 2)]
    (fine_rows, fine_columns), (half_rows, half_columns) = blurs
    return _Bank(
        ((PADDING, rows - height - PADDING), (PADDING, columns - width - PADDING)),
        wavelets[0], wavelets[1], (fine_rows, fine_columns.T), (half_rows, half_columns.T),
    )  # fmt: skip


def _places(size: int) -> Array:
    """Coordinates (5, size) of a period and of two on each side, which filters are summed over."""
    return np.arange(-2 * size, 3 * size, dtype=np.float64).reshape(5, size)


def _morlet(rows: int, columns: int, scale: int, angle: int) -> Array:
    """A Morlet wavelet (rows, columns), complex, periodic, of mean zero."""
    sigma, slant, frequency = 0.8 * 2**scale, 4 / ANGLES, 0.75 * np.pi / 2**scale
    turn = (ANGLES // 2 - 1 - angle) * np.pi / ANGLES
    u, v = _places(rows)[:, None, :, None], _places(columns)[None, :, None, :]
    along, across = u * np.cos(turn) + v * np.sin(turn), v * np.cos(turn) - u * np.sin(turn)
    bell = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2)) * slant / (2 * np.pi * sigma**2)
    wave, bell = (bell * np.exp(1j * frequency * along)).sum((0, 1)), bell.sum((0, 1))
    return np.asarray(wave - wave.sum() / bell.sum() * bell)


def _blur(side: int, padded: int, stride: int) -> Array:
    """The low-pass filter (⌈side/4⌉, padded / stride) of every `stride`-th number of a side, at every fourth of its own."""
    sigma = 0.8 * 2 ** (SCALES - 1)
    bell = np.exp(-(_places(padded) ** 2) / (2 * sigma**2)).sum(0) / np.sqrt(2 * np.pi * sigma**2)
    at = PADDING * (1 + np.arange(-(-side // PADDING)))
    return np.asarray(stride * bell[(at[:, None] - stride * np.arange(padded // stride)) % padded], np.float32)
