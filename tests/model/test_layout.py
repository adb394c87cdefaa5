"""Packed matrices byte by byte against native.h, and the way back to canonical parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kdecode.config import ModelConfig
from kdecode.kernels.common.expert_stack import ExpertStack
from kdecode.kernels.common.matrix import (
    Matrix,
    empty_huge,
    pack_mxfp4_rows,
    pack_mxfp4_tiles,
    pack_rows,
    pack_tiles,
    to_mxfp4,
    to_rows,
)
from kdecode.kernels.linear.unpack import unpack_rows
from kdecode.model.gated_layout import pair_tiles
from kdecode.model.layout import (
    PackedKda,
    PackedMla,
    PackedMlp,
    PackedModel,
    PackedMoe,
    TrunkFormat,
    pack_model,
    to_device,
)
from kdecode.model.mxfp4 import dequantise, unpack_codes
from kdecode.model.parameters import (
    ExpertWeight,
    KdaParameters,
    MlpParameters,
    ModelParameters,
    MoeParameters,
    Mxfp4,
)
from kdecode.model.shards import CheckpointError
from kdecode.model.unpack import unpack_gated, unpack_kda, unpack_mla
from kdecode.model.weights import CheckpointReader

FAMILIES = ["mini_checkpoint", "mini_linear_checkpoint"]


def random_bf16(rows: int, cols: int) -> Tensor:
    """Every bit pattern may occur, NaN too: packing must not look at values."""
    bits = torch.randint(-(2**15), 2**15, (rows, cols), dtype=torch.int16)
    return bits.view(torch.bfloat16)


def random_mxfp4(rows: int, cols: int) -> Mxfp4:
    packed = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
    scale = torch.randint(1, 253, (rows, cols // 32), dtype=torch.uint8)
    return Mxfp4(packed, scale)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize(("rows", "cols"), [(16, 2), (1, 4), (33, 6), (48, 34)])
def test_tiles_byte_order(rows: int, cols: int) -> None:
    weight = random_bf16(rows, cols)
    matrix = pack_tiles(weight)
    assert (matrix.format, matrix.rows, matrix.cols) == ("tiles", rows, cols)
    flat, source = bits(matrix.data).flatten(), bits(weight)
    for row in range(-(-rows // 16) * 16):
        for col in range(cols):
            place = (row // 16 * (cols // 2) + col // 2) * 32 + row % 16 * 2 + col % 2
            assert flat[place] == (source[row, col] if row < rows else 0)
    assert torch.equal(bits(to_rows(matrix)), source)
    assert matrix.num_bytes == -(-rows // 16) * 16 * cols * 2


@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (5, 64), (35, 96)])
def test_mxfp4_tiles_byte_order(rows: int, cols: int) -> None:
    weight = random_mxfp4(rows, cols)
    matrix = pack_mxfp4_tiles(weight.packed, weight.scale)
    codes = unpack_codes(weight.packed)
    data, groups = matrix.data.flatten(), cols // 32
    assert matrix.scales is not None
    scales = matrix.scales.flatten()
    for row in range(-(-rows // 16) * 16):
        for col in range(cols):
            tile_group = row // 16 * groups + col // 32
            block, inside = col % 32 // 8, col % 8
            lane, nibble = row % 16 * 2 + inside % 2, inside // 2
            byte = data[tile_group * 256 + block * 64 + lane * 2 + nibble // 2]
            code = byte >> 4 if nibble % 2 else byte & 15
            assert code == (codes[row, col] if row < rows else 0)
            scale = scales[tile_group * 16 + row % 16]
            assert scale == (weight.scale[row, col // 32] if row < rows else 127)
    packed, scale = to_mxfp4(matrix)
    assert torch.equal(packed, weight.packed)
    assert torch.equal(scale, weight.scale)
    assert torch.equal(bits(to_rows(matrix)), bits(dequantise(weight)))
    assert matrix.num_bytes == -(-rows // 16) * 16 * cols // 32 * 17


def test_mxfp4_rows_are_the_checkpoint_bytes() -> None:
    """Two matrices, one below the other."""
    first, second = random_mxfp4(5, 64), random_mxfp4(3, 64)
    matrix = pack_mxfp4_rows([(w.packed, w.scale) for w in (first, second)])
    assert (matrix.format, matrix.rows, matrix.cols) == ("mxfp4_rows", 8, 64)
    joined = Mxfp4(torch.cat([first.packed, second.packed]), torch.cat([first.scale, second.scale]))
    assert torch.equal(matrix.data, joined.packed)
    assert torch.equal(to_mxfp4(matrix)[1], joined.scale)
    assert torch.equal(bits(to_rows(matrix)), bits(dequantise(joined)))
    assert torch.equal(bits(unpack_rows(matrix)), bits(dequantise(joined)))
    assert matrix.num_bytes == 8 * 64 // 32 * 17


def test_packing_fills_memory_that_is_given() -> None:
    weight, quantised = random_bf16(20, 8), random_mxfp4(20, 32)
    data = torch.full((2, 2, 4, 16, 2), -1, dtype=torch.bfloat16)
    matrix = pack_tiles(weight, data[:, 1])
    assert torch.equal(bits(to_rows(matrix)), bits(weight))
    assert (data[:, 0] == -1).all()
    blocks = torch.full((2, 2, 1, 256), 7, dtype=torch.uint8)
    scales = torch.full((2, 2, 1, 16), 7, dtype=torch.uint8)
    matrix = pack_mxfp4_tiles(quantised.packed, quantised.scale, (blocks[:, 1], scales[:, 1]))
    assert torch.equal(to_mxfp4(matrix)[0], quantised.packed)
    assert torch.equal(to_mxfp4(matrix)[1], quantised.scale)
    assert (blocks[:, 0] == 7).all()
    assert (scales[:, 0] == 7).all()
    flat = torch.full((2, 20, 16), 7, dtype=torch.uint8), torch.full((2, 20, 1), 7).byte()
    pack_mxfp4_rows([(quantised.packed, quantised.scale)], (flat[0][1], flat[1][1]))
    assert torch.equal(flat[0][1], quantised.packed)
    assert torch.equal(flat[1][1], quantised.scale)
    assert (flat[0][0] == 7).all()
    rows = torch.zeros(20, 8, dtype=torch.bfloat16)
    assert pack_rows([weight[:7], weight[7:]], rows).data is rows
    assert torch.equal(bits(rows), bits(weight))


def test_sizes_that_no_format_holds() -> None:
    with pytest.raises(ValueError, match=r"pairs of columns; the matrix is \[16, 3\]"):
        pack_tiles(random_bf16(16, 3))
    with pytest.raises(ValueError, match="one scale for 32 columns"):
        pack_mxfp4_tiles(torch.zeros(16, 24, dtype=torch.uint8), torch.ones(16, 1))
    with pytest.raises(ValueError, match="one scale for 32 columns"):
        pack_mxfp4_rows([(torch.zeros(16, 24, dtype=torch.uint8), torch.ones(16, 1))])
    with pytest.raises(ValueError, match=r"float32"):
        pack_tiles(torch.zeros(16, 2))
    with pytest.raises(ValueError, match=r"is \[1, 1, 16, 2\]; out is \[1, 2, 16, 2\]"):
        pack_tiles(random_bf16(16, 2), torch.zeros(1, 2, 16, 2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="this matrix is in rows"):
        to_mxfp4(pack_rows([random_bf16(16, 2)]))


@pytest.mark.parametrize("shape", [(3, 5), (1100, 1024), (0, 4)])
def test_huge_memory(shape: tuple[int, ...]) -> None:
    tensor = empty_huge(shape, torch.bfloat16)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.bfloat16)
    assert tensor.data_ptr() % 64 == 0
    tensor.fill_(1)
    assert (tensor == 1).all()


def load(directory: Path) -> ModelParameters:
    return CheckpointReader(directory).load_model()


def assert_same(found: ExpertWeight, expected: ExpertWeight | None) -> None:
    if isinstance(expected, Mxfp4):
        assert isinstance(found, Mxfp4)
        assert torch.equal(found.packed, expected.packed)
        assert torch.equal(found.scale, expected.scale)
    else:
        assert isinstance(found, Tensor)
        assert expected is not None
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def check_attention(config: ModelConfig, packed: PackedModel, model: ModelParameters) -> None:
    for found, layer in zip(packed.layers, model.layers, strict=True):
        expected = layer.attention
        if isinstance(found.attention, PackedKda):
            assert isinstance(expected, KdaParameters)
            unpacked = unpack_kda(config, found.attention)
            assert torch.equal(found.attention.decay_scale, expected.a_log.exp())
            assert torch.equal(found.attention.dt_bias, expected.dt_bias)
            assert torch.equal(found.attention.o_norm, expected.o_norm)
            vectors = {"a_log", "dt_bias", "o_norm"}
        else:
            assert isinstance(found.attention, PackedMla)
            unpacked = unpack_mla(config, found.attention)
            assert torch.equal(found.attention.kv_norm, expected.kv_a_norm.float())
            vectors = {"q_a_norm", "kv_a_norm", "k_scale"}
        present = {name for name, value in vars(expected).items() if value is not None}
        assert set(unpacked) == present - vectors
        for name, tensor in unpacked.items():
            assert_same(tensor, getattr(expected, name))


def check_gated(found: PackedMlp, gate: ExpertWeight, up: ExpertWeight, down: ExpertWeight) -> None:
    for left, right in zip(unpack_gated(found), (gate, up, down), strict=True):
        assert_same(left, right)


def check_mlps(packed: PackedModel, model: ModelParameters) -> None:
    for found, layer in zip(packed.layers, model.layers, strict=True):
        mlp, p = found.mlp, layer.mlp
        if isinstance(p, MlpParameters):
            assert isinstance(mlp, PackedMlp)
            check_gated(mlp, p.gate_proj, p.up_proj, p.down_proj)
            continue
        assert isinstance(mlp, PackedMoe)
        assert isinstance(p, MoeParameters)
        assert_same(to_rows(mlp.router), p.router)
        assert torch.equal(mlp.router_bias, p.router_bias)
        assert mlp.shared is not None
        assert p.shared is not None
        check_gated(mlp.shared, p.shared.gate_proj, p.shared.up_proj, p.shared.down_proj)
        for matrix, weight in ((mlp.latent_down, p.latent_down), (mlp.latent_up, p.latent_up)):
            assert (matrix is None) == (weight is None)
            if matrix is not None:
                assert_same(to_rows(matrix), weight)
        for expert, weights in zip(mlp.experts, zip(p.w1, p.w3, p.w2, strict=True), strict=True):
            check_gated(expert, *weights)


@pytest.mark.parametrize("trunk_format", ["rows", "tiles", "tiles12"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_model_is_the_checkpoint(
    family: str, trunk_format: TrunkFormat, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(family)
    seen: list[tuple[int, int]] = []
    reader = CheckpointReader(directory)
    packed = pack_model(reader, trunk_format, lambda done, total: seen.append((done, total)))
    model, config = load(directory), reader.config
    assert seen == [(done, 9) for done in range(1, 10)]
    assert torch.equal(packed.embed, model.embed)
    assert packed.head.format == trunk_format
    assert_same(to_rows(packed.head), model.lm_head)
    check_attention(config, packed, model)
    check_mlps(packed, model)
    for found, layer in zip(packed.layers, model.layers, strict=True):
        assert torch.equal(found.input_norm, layer.input_norm.float())
        assert torch.equal(found.post_norm, layer.post_norm.float())
        assert (found.attn_mix is None) == (config.attn_res_block is None)
        if layer.mlp_mix is not None:
            folded = layer.mlp_mix.norm.float() * layer.mlp_mix.proj.float()
            assert found.mlp_mix is not None
            assert torch.equal(found.mlp_mix, folded)


@pytest.mark.parametrize("trunk_format", ["rows", "tiles"])
def test_coded_experts_in_rows(mini_checkpoint: Path, trunk_format: TrunkFormat) -> None:
    """What a GPU reads: one block a layer, whole on any device."""
    reader = CheckpointReader(mini_checkpoint)
    packed = pack_model(reader, trunk_format, mxfp4="mxfp4_rows")
    check_mlps(packed, load(mini_checkpoint))
    moe, config = packed.layers[1].mlp, reader.config.moe
    assert isinstance(moe, PackedMoe)
    assert formats(moe.experts[0]) == {"mxfp4_rows"}
    for experts in (moe.experts, to_device(moe, "cpu").experts):
        stack = ExpertStack.of(experts)
        assert stack.gate_up.data_ptr() == experts[0].gate_up.data.data_ptr()
        assert stack.num_experts == config.num_experts
        assert stack.gate_up.shape[1:] == experts[0].gate_up.data.shape
        for found, expert in zip(stack.matrices(), experts, strict=True):
            assert torch.equal(found[0].data, expert.gate_up.data)
            assert torch.equal(to_rows(found[1]), to_rows(expert.down))
            assert found[1].data.data_ptr() == expert.down.data.data_ptr()


def test_experts_that_are_no_block(mini_checkpoint: Path) -> None:
    packed = pack_model(CheckpointReader(mini_checkpoint), "rows", mxfp4="mxfp4_rows")
    moe = packed.layers[1].mlp
    assert isinstance(moe, PackedMoe)
    with pytest.raises(ValueError, match="expert 1 does not follow the one before it"):
        ExpertStack.of(moe.experts[::-1])
    apart = replace(moe.experts[1], down=replace(moe.experts[1].down, scales=torch.ones(2, 2)))
    with pytest.raises(ValueError, match="expert 1 does not follow"):
        ExpertStack.of((moe.experts[0], apart))
    tiles = pack_model(CheckpointReader(mini_checkpoint), "rows").layers[1].mlp
    assert isinstance(tiles, PackedMoe)
    with pytest.raises(ValueError, match="these are in mxfp4_tiles"):
        ExpertStack.of(tiles.experts)


def formats(mlp: PackedMlp) -> set[str]:
    return {mlp.gate_up.format, mlp.down.format}


@pytest.mark.parametrize(
    ("family", "trunk_format", "expert_format"),
    [
        ("mini_checkpoint", "rows", "mxfp4_tiles"),
        ("mini_checkpoint", "tiles", "mxfp4_tiles"),
        ("mini_linear_checkpoint", "rows", "rows"),
        ("mini_linear_checkpoint", "tiles", "tiles"),
        ("mini_checkpoint", "tiles12", "mxfp4_tiles"),
        ("mini_linear_checkpoint", "tiles12", "tiles12"),
    ],
)
def test_formats_and_the_order_of_gate_and_up(
    family: str, trunk_format: TrunkFormat, expert_format: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(family)
    packed = pack_model(CheckpointReader(directory), trunk_format)
    moe, p = packed.layers[1].mlp, load(directory).layers[1].mlp
    assert isinstance(moe, PackedMoe)
    assert isinstance(p, MoeParameters)
    assert moe.shared is not None
    assert p.shared is not None
    assert {moe.router.format} | formats(moe.shared) == {trunk_format}
    assert {name for expert in moe.experts for name in formats(expert)} == {expert_format}
    gate, up = p.shared.gate_proj, p.shared.up_proj
    rows = to_rows(moe.shared.gate_up)
    if trunk_format == "rows":
        assert torch.equal(rows, torch.cat([gate, up]))
    else:
        alternating = torch.stack([gate.view(-1, 16, 192), up.view(-1, 16, 192)], dim=1)
        assert torch.equal(rows, alternating.view(-1, 192))


def test_the_absorbed_key_projection(mini_checkpoint: Path) -> None:
    """Head h's rows of w_uk are its W_UK transposed: q_latent = w_uk[h] q_nope."""
    reader = CheckpointReader(mini_checkpoint)
    packed = pack_model(reader, "tiles").layers[3].attention
    kv_b = load(mini_checkpoint).layers[3].attention.kv_b_proj
    assert isinstance(packed, PackedMla)
    mla = reader.config.mla
    for head in range(mla.num_heads):
        start = head * (mla.nope_dim + mla.v_dim)
        w_uk = kv_b[start : start + mla.nope_dim]
        rows = to_rows(packed.w_uk)[head * mla.kv_rank : (head + 1) * mla.kv_rank]
        assert torch.equal(rows, w_uk.t())


def test_widths_that_cannot_alternate(mini_linear_checkpoint: Path) -> None:
    assert pair_tiles(48) == 6
    with pytest.raises(ValueError, match="multiple of 16; it is 40"):
        pair_tiles(40)
    with pytest.raises(ValueError, match="trunk_format is 'columns'"):
        pack_model(CheckpointReader(mini_linear_checkpoint), "columns")  # type: ignore[arg-type]


def test_a_reader_is_packed_once(mini_checkpoint: Path) -> None:
    reader = CheckpointReader(mini_checkpoint)
    pack_model(reader, "rows")
    with pytest.raises(CheckpointError, match="a second time"):
        pack_model(reader, "rows")


def test_packed_bytes(mini_checkpoint: Path) -> None:
    """Nothing is stored twice: tiles take the bytes of the codes and scales, plus padding rows."""
    packed = pack_model(CheckpointReader(mini_checkpoint), "tiles")
    expert = packed.layers[1].mlp.experts[0]  # type: ignore[union-attr]
    config = packed.config.moe
    assert config.latent_width is not None
    numbers = 3 * config.expert_width * config.latent_width
    assert expert.gate_up.num_bytes + expert.down.num_bytes == numbers // 2 + numbers // 32
    assert isinstance(expert.gate_up, Matrix)
