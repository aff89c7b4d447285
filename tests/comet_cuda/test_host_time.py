"""What a launch costs the host: calls counted without a GPU, time beside torch.add's on one.

Without a GPU the launchers run on CPU tensors (whose device is -1, which is then "the current GPU"), and a stand-in for
libcuda keeps what reaches it: also the test that launchers write what the kernels read, field by field.
"""

import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "cuda" / "tools"))
from host_time import host_microseconds

from comet_cuda import dispatch, driver, integer_linear, jit, quantize_act_cuda, quantize_token, w4ax_gemm_sm90
from comet_cuda import w4ax_gemm_integer as gemm
from comet_cuda.prepared_linear import ActivationFormat, PreparedLinear, prepare_linear
from comet_cuda.quantize_act import TOKEN
from tests.comet_cuda.test_driver import Driver
from tests.comet_cuda.test_quantize_act_emulated import aligned

TOKENS, CHANNELS, ROWS, BLOCKS, EIGHTS = 9, 640, 192, 5, 2
PLAN = gemm.choose_integer_tiles(TOKENS, ROWS, BLOCKS).plan(TOKENS, ROWS, BLOCKS, EIGHTS, 132)
PAD = (0,) * ((len(PLAN.schedule) + 5) % 2)
GEMM = f"<9Q{4 + len(PLAN.schedule) + 1 + len(PAD)}i"  # its parameter
# Bytes of the kernels' parameter.
SIZES = {"quantize_row": 96, "quantize_token": 96, "quantize_few": 88, "w4ax_gemm_integer": struct.calcsize(GEMM)}
TOKEN_PARAMS = "<9Q3ifi4x"
FOLDER = str(Path(__file__).parent)
MOST_CALLS = {
    "quantize_token": 16,
    "rms_norm": 19,
    "silu_mul": 16,
    "gemm": 19,
    "linear": 28,
}  # of Python and C functions
CACHES = (
    quantize_act_cuda._bound, quantize_token._bound, gemm._call, integer_linear._step, jit._compile_kernel,
    dispatch.device_capability, dispatch.device_arch, w4ax_gemm_sm90.sm_count,
)  # fmt: skip


class Memory:
    FLOATS, FLAGS, addresses = 1 << 30, 1 << 30, (4096, 8192)

    def __init__(self, device: int) -> None: ...


class Hopper(Driver):
    """Kernels by their names, with the sizes of their parameters."""

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        function._obj.value = SIZES[name.decode()]
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        offset._obj.value, size._obj.value = 0, function.value
        return 0


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hopper]:
    library = Hopper()
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    for cache in CACHES:
        cache.cache_clear()
    quantize_token._CALLS.clear()
    monkeypatch.setattr(driver, "driver_library", lambda: library)
    monkeypatch.setattr(driver, "_empty_strided", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", abs, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", (-1).__int__, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", bool)
    monkeypatch.setattr(jit, "_compile_cubin", lambda *_: jit.Cubin("sm_90a", b"cubin", {}))
    monkeypatch.setattr(w4ax_gemm_sm90, "Workspace", Memory)
    monkeypatch.setattr(w4ax_gemm_sm90, "_WORKSPACES", {})
    yield library
    for cache in CACHES:
        cache.cache_clear()
    quantize_token._CALLS.clear()


class Operands:
    """Of one linear, all on the CPU."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x, self.residual = torch.randn(2, TOKENS, CHANNELS).bfloat16()
        self.gate_up = torch.randn(TOKENS, 2 * CHANNELS).bfloat16()
        self.weight = torch.ones(CHANNELS, dtype=torch.bfloat16)
        self.perm = aligned(torch.randperm(CHANNELS).int())
        self.clip = torch.full((BLOCKS,), 0.9)
        self.bits = torch.tensor([8] * EIGHTS + [4] * (BLOCKS - EIGHTS), dtype=torch.uint8)
        self.common = (self.perm, EIGHTS, self.clip, True)
        records = torch.zeros(ROWS // 64, BLOCKS, gemm.RECORD, dtype=torch.uint8)
        self.rows = gemm.IntegerWeight(records, torch.ones(ROWS), ROWS, EIGHTS)

    def quantize(self) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = quantize_token.launch(self.x, *self.common)
        return found

    def norm(self) -> tuple[Tensor, ...]:
        norm = ("rms_norm", self.residual, self.weight, 1e-5)
        found: tuple[Tensor, ...] = quantize_token.launch(self.x, *self.common, *norm)
        return found

    def silu(self) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = quantize_token.launch(self.gate_up, *self.common, "silu_mul")
        return found

    def linear(self, bias: Tensor | None = None) -> Tensor:
        return integer_linear.integer_linear(self.x, self.perm, self.clip, True, self.rows, bias)

    def multiply(self, operand: tuple[Tensor, ...], bias: Tensor | None = None) -> Tensor:
        weight = (self.rows.records, self.rows.base, bias, TOKENS, ROWS, EIGHTS, torch.bfloat16)
        return gemm.launch(operand[0], operand[1], operand[2], *weight)


def at(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def test_launchers_write_what_the_kernels_read(hopper: Hopper) -> None:
    o = Operands()
    eps = struct.unpack("<f", struct.pack("<f", 1e-5))[0]
    codes, multiples, scale = found = o.quantize()
    wanted = [(*at(o.x, None, None, None, o.perm, multiples, o.clip, codes, scale), 0.0)]
    normed = o.norm()
    inputs = at(o.x, o.residual, normed[3], o.weight, o.perm)
    wanted.append((*inputs, *at(normed[1], o.clip, normed[0], normed[2]), eps))
    gated = o.silu()
    wanted.append((*at(o.gate_up, None, None, None, o.perm, gated[1], o.clip, gated[0], gated[2]), 0.0))
    assert [struct.unpack(TOKEN_PARAMS, packed) for _, packed in hopper.launches] == [
        (*pointers, TOKENS, CHANNELS, BLOCKS, value, EIGHTS) for *pointers, value in wanted
    ]
    hopper.launches.clear()

    meta = torch.zeros(BLOCKS, 2, 16)
    quantize_act_cuda.launch(o.x, o.perm, o.bits, o.clip, True, codes, meta, "sm_90", 1)
    ((_, packed),) = hopper.launches
    pointers = at(o.x, None, None, None, o.perm, o.bits, o.clip, codes, meta)
    assert struct.unpack("<9Q3if", packed) == (*pointers, TOKENS, CHANNELS, BLOCKS, 0.0)
    hopper.launches.clear()

    bias = torch.ones(ROWS)
    y = o.multiply(found, bias)
    assert (y.shape, y.dtype) == ((TOKENS, ROWS), torch.bfloat16)
    ((shape, packed),) = hopper.launches
    fields = struct.unpack(GEMM, packed)
    assert list(fields[:9]) == [*at(o.rows.records, o.rows.base, codes, multiples, scale, bias, y), *Memory.addresses]
    assert fields[9:] == (TOKENS, ROWS, 2, 3, *PLAN.schedule, EIGHTS, *PAD)
    assert shape[0] == PLAN.ctas and shape[-1] == 1  # overlaps with the kernel before it


def test_a_linear_launches_what_its_two_ops_do(hopper: Hopper) -> None:
    """The same parameters, but for where results lie: the parts between the launches in one buffer, apart."""
    o, bias = Operands(), torch.ones(ROWS)
    y = o.linear(bias)
    o.multiply(o.quantize(), bias)
    assert (y.shape, y.dtype) == ((TOKENS, ROWS), torch.bfloat16)
    (q_shape, q), (m_shape, m), (q_shape_two, q_two), (m_shape_two, m_two) = hopper.launches
    assert (q_shape, m_shape) == (q_shape_two, m_shape_two)
    first, second = (struct.unpack(TOKEN_PARAMS, packed) for packed in (q, q_two))
    codes, scale, multiples = first[7], first[8], first[5]
    assert {i for i in range(len(first)) if first[i] != second[i]} <= {5, 7, 8}
    third, fourth = (struct.unpack(GEMM, packed) for packed in (m, m_two))
    assert third[2:5] == (codes, multiples, scale) and third[6] == y.data_ptr()
    assert {i for i in range(len(third)) if third[i] != fourth[i]} <= {2, 3, 4, 6}
    assert multiples - codes == BLOCKS * 2 * 1024 and scale - multiples == 512 >= EIGHTS * 2 * 8 * 4
    with pytest.raises(gemm.CometError, match="x has 639 channels"):
        integer_linear.integer_linear(o.x[:, 1:], o.perm, o.clip, True, o.rows, None)
    with pytest.raises(gemm.CometError, match="clip has 4 values"):
        integer_linear.check_format(o.perm, o.clip[1:], o.rows)


def test_wrong_operands_are_named(hopper: Hopper) -> None:
    o = Operands()
    found = o.quantize()
    hopper.launches.clear()
    for index, name in enumerate(("x_codes", "multiples", "token_scale")):
        for wrong in (found[index].double(), found[index][:-1]):
            operand = [*found]
            operand[index] = wrong
            with pytest.raises(gemm.CometError, match=f"{name} is"):
                o.multiply(tuple(operand))
    with pytest.raises(gemm.CometError, match="bias is"):
        o.multiply(found, torch.ones(ROWS - 1))
    with pytest.raises(gemm.CometError, match="weight is"):
        gemm.launch(*found, o.rows.records[1:], o.rows.base, None, TOKENS, ROWS, EIGHTS, torch.bfloat16)
    with pytest.raises(gemm.CometError, match="base is"):
        gemm.IntegerWeight(o.rows.records, o.rows.base[:-1], ROWS, EIGHTS)
    for clip, perm in ((o.clip[:-1], o.perm), (o.clip.double(), None), (o.clip, o.perm.long()), (o.clip, o.perm[1:])):
        with pytest.raises(gemm.CometError, match="quantize_token: (clip|perm) is"):
            quantize_token.launch(o.x, perm, EIGHTS, clip, True)
    assert not hopper.launches


def test_a_tensor_that_changed_since_is_seen(hopper: Hopper) -> None:
    """What passed the checks once is compared with them again: its address, type, shape and strides."""
    o = Operands()
    o.quantize(), o.norm(), o.silu()
    clips = [torch.full((BLOCKS,), 0.8), torch.full((BLOCKS - 1,), 0.8), torch.ones(2 * BLOCKS)[::2]]
    hopper.launches.clear()
    o.clip.data = clips[0]  # the same object in new memory
    o.quantize()
    assert struct.unpack(TOKEN_PARAMS, hopper.launches.pop()[1])[6] == clips[0].data_ptr()
    for o.clip.data in clips[1:]:
        for op in (o.quantize, o.norm, o.silu):
            with pytest.raises(gemm.CometError, match="quantize_token: clip is"):
                op()
    o = Operands()
    for wrong in (o.residual[1:], o.residual.half(), o.residual.double()):
        with pytest.raises(gemm.CometError, match="rms_norm_quantize_token: residual is"):
            quantize_token.launch(o.x, *o.common, "rms_norm", wrong, o.weight, 1e-5)
    for wrong in (o.weight[1:], o.weight.half(), o.weight[None]):
        with pytest.raises(gemm.CometError, match="rms_norm_quantize_token: weight is"):
            quantize_token.launch(o.x, *o.common, "rms_norm", o.residual, wrong, 1e-5)
    for x, op in ((o.x[0], "none"), (o.x[0], "rms_norm"), (o.gate_up[None], "silu_mul")):
        weight = o.weight if op == "rms_norm" else None
        with pytest.raises(gemm.CometError, match="tokens, channels"):
            quantize_token.launch(x, *o.common, op, None, weight, 1e-5)
    assert not hopper.launches


@pytest.mark.parametrize("guards", [driver._tensor_guards, None, dict, lambda *_, **__: None])
def test_launches_alike_but_for_one_thing_are_told_apart(
    hopper: Hopper, monkeypatch: pytest.MonkeyPatch, guards: Any
) -> None:
    """Other types and shapes of as many values, copies of rows, a tensor given twice; also without torch's guards."""
    monkeypatch.setattr(driver, "_tensor_guards", guards)  # torch's, none, and what other versions may have
    o = Operands()
    half, column = o.x.half(), o.x.T.contiguous().T
    long = o.x.view(-1)[: TOKENS * 512].view(-1, 512)  # as many values, and another permutation, as 9 x 512
    short, perm = long.reshape(-1, 384), aligned(torch.arange(384).int())
    for _ in range(2):
        codes, _, scale = o.quantize()
        assert codes.shape == (BLOCKS, 2, 1024) and scale.shape == (16,)
        assert quantize_token.launch(half, *o.common)[0].shape == codes.shape
        assert quantize_token.launch(long, None, EIGHTS, o.clip[:4], True)[0].shape == (4, 2, 1024)
        assert quantize_token.launch(short, None, EIGHTS, o.clip[:3], True)[0].shape == (3, 2, 1024)
        assert quantize_token.launch(short, perm, EIGHTS, o.clip[:3], True)[0].shape == (3, 2, 1024)
        quantize_token.launch(column, *o.common)
        normed = quantize_token.launch(o.x, *o.common, "rms_norm", o.x, o.weight, 1e-5)
        assert normed[3].shape == o.x.shape and normed[3].data_ptr() != o.x.data_ptr()
        found = [struct.unpack(TOKEN_PARAMS, packed) for _, packed in hopper.launches]
        assert [each[10] for each in found] == [CHANNELS, CHANNELS, 512, 384, 384, CHANNELS, CHANNELS]
        assert [each[9] for each in found] == [TOKENS, TOKENS, TOKENS, 12, 12, TOKENS, TOKENS]
        assert [each[0] == o.x.data_ptr() for each in found] == [True, False, True, True, True, False, True]
        assert found[5][0] != column.data_ptr() and found[6][1] == o.x.data_ptr() and found[4][4] == perm.data_ptr()
        hopper.launches.clear()
    assert len({id(call) for _, call in quantize_token._CALLS.values()}) >= 4


def moved(tensor: Tensor) -> Tensor:
    """The same values, shape and strides, at an address that is no multiple of 16."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def test_addresses_are_looked_at_again(hopper: Hopper) -> None:
    """Torch's guard does not see them: loads of 16 bytes must not meet rows, weights or a permutation that moved."""
    o = Operands()
    x, residual, weight, perm = moved(o.x), moved(o.residual), moved(o.weight), moved(o.perm)
    for rows in (o.x, x):
        quantize_token.launch(rows, *o.common)
    given = (o.x, o.residual, o.weight)
    for norm in (given, (x, *given[1:]), (o.x, residual, o.weight), (*given[:2], weight)):
        quantize_token.launch(norm[0], *o.common, "rms_norm", *norm[1:], 1e-5)
    plain, plain_moved, norm_aligned, *norm_moved = [shape for shape, _ in hopper.launches]  # a kernel for any address
    assert plain != plain_moved and norm_moved == [norm_moved[0]] * 3 and norm_aligned != norm_moved[0]
    quantize_token.launch(o.x, perm, *o.common[1:])  # copied
    assert struct.unpack(TOKEN_PARAMS, hopper.launches.pop()[1])[4] not in (0, perm.data_ptr())


def test_operands_beside_a_gpu_are_named(hopper: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    o = Operands()
    found = o.quantize()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", int)  # GPU 0; all operands are on the CPU
    for op in (o.quantize, o.norm, o.silu, o.linear, lambda: o.multiply(found)):
        with pytest.raises(gemm.CometError, match="is on cpu, other arguments are on a GPU"):
            op()
    with pytest.raises(gemm.CometError, match="is on cpu, other arguments are on a GPU"):
        quantize_act_cuda.launch(o.x, o.perm, o.bits, o.clip, True, found[0], found[2], "sm_90")


def host_calls(op: Callable[[], object]) -> int:
    """Functions, of Python and C alike, that one call of `op` makes once its shape is known; those of tests apart."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and not frame.f_code.co_filename.startswith(FOLDER)

    op()
    sys.setprofile(count)
    op()
    sys.setprofile(None)
    return calls


@pytest.mark.parametrize("name", list(MOST_CALLS))
def test_a_launch_makes_few_calls(hopper: Hopper, name: str) -> None:
    o = Operands()
    found = o.quantize()
    ops: dict[str, Callable[[], object]] = {
        "quantize_token": o.quantize, "rms_norm": o.norm, "silu_mul": o.silu, "gemm": lambda: o.multiply(found),
        "linear": o.linear,
    }  # fmt: skip
    assert host_calls(ops[name]) <= MOST_CALLS[name]


ON_GPU = {
    "quantize_token": 2.2,
    "rms_norm_quantize_token": 2.2,
    "silu_mul_quantize_token": 2.2,
    "w4ax_gemm_integer": 2.2,
    "PreparedLinear": 3.2,  # two launches
}


on_sm90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
)


@pytest.mark.gpu
@on_sm90
def test_an_op_costs_the_host_little_more_than_torch_s_own() -> None:
    runs = [host_microseconds() for _ in range(3)]  # of which other processes on the machine disturb one or two
    times = {name: min(run[name] for run in runs) for name in runs[0]}
    ratios = {name: times[name] / times["torch.add"] for name in ON_GPU}
    assert all(ratios[name] <= most for name, most in ON_GPU.items()), f"{times}"


@pytest.mark.gpu
@on_sm90
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_a_linear_is_its_two_ops_bit_by_bit(tokens: int) -> None:
    """Also in a graph, under torch.compile, on another stream and from threads at once."""
    torch.manual_seed(tokens)
    linear, bias = random_linear(), torch.randn(ROWS, device="cuda")
    x, other = torch.randn(2, tokens, CHANNELS, device="cuda").bfloat16()

    def by_ops(x: Tensor) -> Tensor:
        return linear.multiply(linear.quantize(x), tokens, bias, x.dtype)

    want, want_other = by_ops(x), by_ops(other)
    assert torch.equal(linear(x, bias), want) and not torch.equal(want, want_other)
    assert torch.equal(linear(x.T.contiguous().T, bias), want)
    assert torch.equal(torch.compile(lambda x: linear(x, bias), fullgraph=True)(x), want)
    graph, given = torch.cuda.CUDAGraph(), other.clone()
    with torch.cuda.graph(graph):
        y = linear(given, bias)
    given.copy_(x)
    graph.replay()
    assert torch.equal(y, want)

    def repeat(x: Tensor) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [linear(x, bias) for _ in range(200)]
            torch.cuda.current_stream().synchronize()
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(repeat, (x, other)))
    assert all(torch.equal(one, want) for one in both[0]) and all(torch.equal(one, want_other) for one in both[1])


def random_linear() -> PreparedLinear:
    codes = torch.randint(0, 256, (ROWS, CHANNELS // 2), dtype=torch.uint8, device="cuda")
    scale = torch.full((ROWS, BLOCKS), 2.0**-9, dtype=torch.bfloat16, device="cuda")
    zero = torch.full((ROWS, BLOCKS), 8, dtype=torch.uint8, device="cuda")
    bits = torch.tensor([8] * EIGHTS + [4] * (BLOCKS - EIGHTS), dtype=torch.uint8, device="cuda")
    perm, clip = torch.randperm(CHANNELS, device="cuda").int(), torch.full((BLOCKS,), 0.9, device="cuda")
    return prepare_linear(codes, scale, zero, ActivationFormat(perm, bits, clip, True, TOKEN))
