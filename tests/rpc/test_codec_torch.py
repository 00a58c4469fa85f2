"""Tensors, there and back: as raw memory, and not the storage that a view belongs to."""

from typing import Any

import pytest
import torch

from lp_pipe.rpc import codec

BASE = torch.arange(24.0).reshape(4, 6)


def through(value: Any) -> Any:
    body, buffers = codec.encode(value)
    return codec.decode(bytes(body), [bytearray(buffer) for buffer in buffers])


def size_of(value: Any) -> int:
    body, buffers = codec.encode(value)
    return len(body) + sum(memoryview(buffer).nbytes for buffer in buffers)


def test_a_tensor_comes_back_equal_and_writable() -> None:
    back = through({"weights": BASE})["weights"]
    assert torch.equal(back, BASE)
    back += 1
    assert not torch.equal(back, BASE)


@pytest.mark.parametrize(
    "tensor",
    [
        *(
            torch.ones(3, 2).to(kind)
            for kind in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8)
        ),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3 - 4j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor(3.5),
        torch.empty(0, 3),
        BASE[:, ::2],
        BASE.t(),
        BASE[0].expand(5, 6),
        BASE.flip(0),
        BASE[:1, 0],  # one element, and a stride that no byte view has
        BASE[:1, :1],
        torch.zeros(2, 2, dtype=torch.float8_e4m3fn) if hasattr(torch, "float8_e4m3fn") else torch.zeros(2, 2),
    ],
    ids=lambda tensor: f"{tensor.dtype}{tuple(tensor.shape)}{tensor.layout}",
)
def test_every_kind_of_tensor(tensor: torch.Tensor) -> None:
    back = through(tensor)
    assert type(back) is type(tensor)
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    if tensor.layout is torch.strided and tensor.dtype.itemsize > 1:
        assert torch.equal(back, tensor)
    else:
        assert torch.equal(back.to_dense().float(), tensor.to_dense().float())


def test_attributes_of_tensors_travel_with_them() -> None:
    """Parameters have notes such as `_no_weight_decay`, which may lead back to the parameter."""
    layer = torch.nn.Linear(2, 2)
    layer.weight.layer = layer  # type: ignore[assignment]
    layer.weight.partner = layer.bias  # type: ignore[assignment]
    back: Any = through(layer)
    assert back.weight.layer is back
    assert back.weight.partner is back.bias


def test_parameters_and_requires_grad() -> None:
    for requires_grad in (True, False):
        parameter = torch.nn.Parameter(BASE.clone(), requires_grad=requires_grad)
        back = through(parameter)
        assert type(back) is torch.nn.Parameter
        assert back.requires_grad is requires_grad
        assert torch.equal(back, parameter)
    assert through(BASE.clone().requires_grad_()).requires_grad
    inner = (BASE.clone().requires_grad_() * 2).sum()  # part of a graph, which stays here
    assert through(inner).is_leaf


def test_a_small_view_of_a_huge_storage_is_small() -> None:
    assert size_of(torch.zeros(1_000_000)[:3]) < 2000
    assert size_of(torch.zeros(1).expand(1000)) < 10_000


def test_modules_and_state_dicts() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    back = through(module)
    x = torch.ones(2, 3)
    assert torch.equal(back.eval()(x), module.eval()(x))
    assert list(through(module.state_dict())) == list(module.state_dict())


def test_a_tensor_that_comes_twice_stays_one() -> None:
    one, two = through([BASE, BASE])
    assert one is two


@pytest.mark.parametrize("kernel", [1, (3, 1)], ids=["1 x 1", "3 x 1"])
def test_weights_of_small_kernels_stay_channels_last(kernel: Any) -> None:
    """Regression: they count as contiguous, too, and came as such, so that convolutions had other last bits."""
    conv = torch.nn.Conv2d(2, 4, kernel).to(memory_format=torch.channels_last)
    back = codec.loads(codec.dumps(conv))
    assert back.weight.stride() == conv.weight.stride()
    image = torch.randn(2, 1, 5, 5).to(memory_format=torch.channels_last)
    assert codec.loads(codec.dumps(image)).stride() == image.stride()


@pytest.mark.parametrize("value", [BASE[1:, 1:5], BASE.t()[1:3], BASE.flatten()[3:]], ids=["part", "columns", "tail"])
def test_a_slice_keeps_its_place_in_a_cache_line(value: torch.Tensor) -> None:
    """Products have other last bits where rows begin at no multiple of 16 bytes."""
    back = through(value)
    assert torch.equal(back, value)
    assert back.data_ptr() % 64 == value.data_ptr() % 64


def test_large_tensors_are_not_copied_into_the_pickle() -> None:
    tensor = torch.zeros(1000, 1000)
    body, buffers = codec.encode(tensor)
    assert len(body) < 2000
    assert memoryview(buffers[0]).nbytes == 4_000_000


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors_are_left_to_torch() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0]), (3,)).coalesce()
    assert torch.equal(through(sparse).to_dense(), sparse.to_dense())


NESTED = [torch.ones(2), torch.ones(3)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_to_torch(layout: torch.layout) -> None:
    copy = through(torch.nested.nested_tensor(NESTED, layout=layout))
    assert copy.is_nested and copy.layout is layout
    assert all(torch.equal(one, other) for one, other in zip(copy.unbind(), NESTED, strict=True))


def test_tensors_of_mkldnn_travel_dense() -> None:
    copy = through(torch.ones(3, 3).to_mkldnn())
    assert copy.is_mkldnn and torch.equal(copy.to_dense(), torch.ones(3, 3))


@pytest.mark.parametrize(
    "wrap", [torch._efficientzerotensor, lambda shape: torch._to_functional_tensor(torch.ones(shape))]
)
def test_tensors_without_memory_of_their_own_are_refused(wrap: Any) -> None:
    with pytest.raises(RuntimeError):
        codec.encode(wrap((3,)))


def test_tensors_inside_vmap_are_refused() -> None:
    def encoded(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError):
            codec.encode(tensor)
        return tensor

    torch.vmap(encoded)(torch.ones(2, 3))


def test_other_torch_values() -> None:
    for value in (torch.float32, torch.device("cpu"), torch.Size([1, 2])):
        assert through(value) == value


def test_apply_of_an_autograd_function_travels_by_value() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 3

    x = torch.ones(2, requires_grad=True)
    y = through(Double.apply)(x)
    y.sum().backward()
    assert y.tolist() == [2, 2] and x.grad is not None and x.grad.tolist() == [3, 3]
