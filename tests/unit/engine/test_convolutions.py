"""Two ways of the convolutions of many clients give the same, forward and backward; a device takes patches where they fit."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended_device import pretended

from cflpriv.engine.convolutions import WAYS, Form, convolved, grouped, patches, unfolded

sides = st.tuples(st.integers(1, 3), st.integers(1, 3))
forms = st.builds(Form, sides, sides, st.tuples(st.integers(0, 2), st.integers(0, 2)), st.tuples(st.integers(1, 2), st.integers(1, 2)))


@settings(max_examples=40, deadline=None)
@given(
    form=forms, clients=st.integers(1, 4), batch=st.integers(1, 3), channels=st.integers(1, 3), out=st.integers(1, 3),
    side=st.tuples(st.integers(5, 8), st.integers(5, 8)), bias=st.booleans(), last=st.booleans(),
)  # fmt: skip
def test_both_ways_agree(form: Form, clients: int, batch: int, channels: int, out: int, side: Any, bias: bool, last: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((batch, clients * channels, *side), generator=generator, dtype=torch.float64)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    weight = torch.randn((clients, out, channels, *form.size), generator=generator, dtype=torch.float64)
    shift = torch.randn((clients, out), generator=generator, dtype=torch.float64) if bias else None
    leaves = [one.requires_grad_() for one in (x, weight, shift) if one is not None]
    one, other = grouped(x, weight, shift, form), unfolded(x, weight, shift, form)
    assert one.shape == other.shape
    torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-10)
    towards = torch.randn(one.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(torch.autograd.grad(other, leaves, towards), torch.autograd.grad(one, leaves, towards), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@settings(max_examples=15, deadline=None)
@given(form=forms, n=st.integers(1, 2), channels=st.integers(1, 2), side=st.tuples(st.integers(5, 6), st.integers(5, 6)))
def test_patches_are_those_of_unfold_and_are_differentiated_twice(form: Form, n: int, channels: int, side: Any) -> None:
    x = torch.randn((n, channels, *side), generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.unfold(x, form.size, form.dilation, form.padding, form.stride)
    torch.testing.assert_close(patches(x, form), expected, rtol=0, atol=0)
    assert torch.autograd.gradgradcheck(lambda x: patches(x, form).square(), x)


def convolution_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Form]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn((2, 6, 8, 8), generator=generator), torch.randn((3, 4, 2, 3, 3), generator=generator)
    return x, weight, torch.randn((3, 4), generator=generator), Form((3, 3), (1, 1), (1, 1), (1, 1))


@pytest.mark.parametrize(("memory", "taken"), [(1 << 34, "unfolded"), (1 << 10, "grouped")])
def test_a_device_takes_patches_where_they_fit(memory: int, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noted(name: str, way: Any, *operands: Any) -> torch.Tensor:
        asked.append(name)
        return torch.as_tensor(way(*operands))

    for name, way in list(WAYS.items()):
        monkeypatch.setitem(WAYS, name, partial(noted, name, way))
    with pretended():
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
        x, weight, bias, form = convolution_inputs()
        made = convolved(x.to("cuda"), weight.to("cuda"), bias.to("cuda"), form)
        np.testing.assert_allclose(made.cpu().numpy(), grouped(x, weight, bias, form).numpy(), atol=1e-5)
    assert asked == [taken]


def test_the_cpu_takes_groups() -> None:
    x, weight, bias, form = convolution_inputs()
    assert torch.equal(convolved(x, weight, bias, form), grouped(x, weight, bias, form))
