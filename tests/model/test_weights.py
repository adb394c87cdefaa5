"""Reading checkpoints: the mini models through the real loader, and every kind of damage."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from kdecode.config import ModelConfig
from kdecode.model.parameters import KdaParameters, MlaParameters, MoeParameters, Mxfp4
from kdecode.model.roster import roster
from kdecode.model.shards import CheckpointError, Shard
from kdecode.model.weights import INDEX_FILE, CheckpointReader

Header = dict[str, Any]


def copy_of(checkpoint: Path, target: Path) -> Path:
    return Path(shutil.copytree(checkpoint, target / "copy"))


def index_of(directory: Path) -> dict[str, str]:
    return dict(json.loads((directory / INDEX_FILE).read_text())["weight_map"])


def write_index(directory: Path, weight_map: dict[str, Any]) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def edit_header(path: Path, change: Callable[[Header], None]) -> None:
    """Rewrites a file's header; the data stays as it is."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def leaves(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in leaves(item)]
    if is_dataclass(value):
        return [leaf for field in fields(value) for leaf in leaves(getattr(value, field.name))]
    return []


@pytest.mark.parametrize("family", ["mini_checkpoint", "mini_linear_checkpoint"])
def test_a_checkpoint_is_read_whole(family: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(family)
    reader = CheckpointReader(directory)
    model = reader.load_model()
    assert len(model.layers) == reader.config.num_layers
    assert len(leaves(model)) == len(index_of(directory)) == len(list(roster(reader.config)))
    # Every tensor agrees with what another reader of the format finds.
    stored = {}
    for file in sorted(set(index_of(directory).values())):
        stored |= safetensors.torch.load_file(directory / file)
    prefix = "language_model." if directory.name == "mini" else ""
    layer = f"{prefix}model.layers.1."
    parameters = model.layers[1]
    assert isinstance(parameters.attention, KdaParameters)
    assert isinstance(parameters.mlp, MoeParameters)
    assert torch.equal(parameters.attention.k_proj, stored[f"{layer}self_attn.k_proj.weight"])
    a_log = stored[f"{layer}self_attn.A_log"].flatten()[: reader.config.kda.num_heads]
    assert torch.equal(parameters.attention.a_log, a_log)
    conv = stored[f"{layer}self_attn.v_conv1d.weight"][:, 0].float()
    assert torch.equal(parameters.attention.v_conv, conv)
    assert parameters.attention.v_conv.dtype == torch.float32
    w2, name = parameters.mlp.w2[5], f"{layer}block_sparse_moe.experts.5.w2.weight"
    if isinstance(w2, Mxfp4):
        assert torch.equal(w2.packed, stored[f"{name}_packed"])
        assert torch.equal(w2.scale, stored[f"{name}_scale"])
    else:
        assert torch.equal(w2, stored[name])
    assert torch.equal(model.lm_head, stored[f"{prefix}lm_head.weight"])


def test_names_without_the_outer_prefix(mini_checkpoint: Path, tmp_path: Path) -> None:
    directory = copy_of(mini_checkpoint, tmp_path)

    def strip(names: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("language_model."): value for name, value in names.items()}

    def rename(header: Header) -> None:
        renamed = strip(header)
        header.clear()
        header.update(renamed)

    for file in set(index_of(directory).values()):
        edit_header(directory / file, rename)
    write_index(directory, strip(index_of(directory)))
    CheckpointReader(directory).load_model()


def test_a_single_file_without_index(mini_linear_checkpoint: Path, tmp_path: Path) -> None:
    tensors = {}
    for file in set(index_of(mini_linear_checkpoint).values()):
        tensors |= safetensors.torch.load_file(mini_linear_checkpoint / file)
    shutil.copy(mini_linear_checkpoint / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"neither .*index.json nor model.safetensors"):
        CheckpointReader(tmp_path)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = CheckpointReader(tmp_path).load_model()
    expected = CheckpointReader(mini_linear_checkpoint).load_model()
    for left, right in zip(leaves(model), leaves(expected), strict=True):
        assert torch.equal(left, right)


def test_vision_tensors_are_skipped_and_others_refused(
    mini_checkpoint: Path, tmp_path: Path
) -> None:
    directory = copy_of(mini_checkpoint, tmp_path)
    extra = {"vision_tower.blocks.0.w": torch.ones(3), "mm_projector.proj.0.bias": torch.ones(2)}
    safetensors.torch.save_file(extra, directory / "vision.safetensors")
    weight_map = index_of(directory) | dict.fromkeys(extra, "vision.safetensors")
    write_index(directory, weight_map)
    CheckpointReader(directory).load_model()

    safetensors.torch.save_file({"model.mtp.w": torch.ones(1)}, directory / "more.safetensors")
    write_index(directory, weight_map | {"model.mtp.w": "more.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"more\.safetensors, tensor model\.mtp\.w: .* no such"
    ):
        CheckpointReader(directory)


def test_every_tensor_is_taken_once(mini_checkpoint: Path) -> None:
    reader = CheckpointReader(mini_checkpoint)
    reader.load_embed()
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight was asked for a second time"):
        reader.load_embed()
    for _ in reader.iter_layers():
        pass
    with pytest.raises(CheckpointError, match=r"4 of \d+ tensors were never read"):
        reader.finish()
    reader.load_head()
    reader.finish()


def test_dropped_layers_stay_readable(mini_checkpoint: Path) -> None:
    reader = CheckpointReader(mini_checkpoint)
    with reader.layer(2) as layer:
        before = [tensor.clone() for tensor in leaves(layer)]
    for tensor, copy in zip(leaves(layer), before, strict=True):
        assert torch.equal(tensor, copy)


def test_dropping_gives_memory_back(tmp_path: Path) -> None:
    tensors = {name: torch.ones(4 << 20, dtype=torch.uint8) for name in ("a", "b", "c")}
    safetensors.torch.save_file(tensors, tmp_path / "big.safetensors")
    shard = Shard(tmp_path / "big.safetensors")

    def resident_bytes() -> int:
        statm = Path("/proc/self/statm").read_text().split()
        return int(statm[1]) * os.sysconf("SC_PAGE_SIZE")

    views = [shard.tensor(name) for name in shard.entries]
    assert all(bool((view == 1).all()) for view in views)
    before = resident_bytes()
    shard.drop(shard.entries)
    assert before - resident_bytes() > 10 << 20


def test_the_scale_of_an_fp8_cache(mini_checkpoint: Path, tmp_path: Path) -> None:
    directory = copy_of(mini_checkpoint, tmp_path)
    name = "language_model.model.layers.3.self_attn.k_scale"
    write_index(directory, index_of(directory) | {name: "scale.safetensors"})
    safetensors.torch.save_file({name: torch.tensor([0.25])}, directory / "scale.safetensors")
    model = CheckpointReader(directory).load_model()
    scales = {
        layer: parameters.attention.k_scale
        for layer, parameters in enumerate(model.layers)
        if isinstance(parameters.attention, MlaParameters)
    }
    assert scales == {3: torch.tensor(0.25), 7: None, 8: None}
    safetensors.torch.save_file({name: torch.tensor(-1.0)}, directory / "scale.safetensors")
    with pytest.raises(CheckpointError, match=r"k_scale: expected a positive scale, found -1\.0"):
        CheckpointReader(directory).load_model()


class TestDamage:
    """Each kind of damage is found, and the message has file, tensor, expected and found."""

    @pytest.fixture
    def directory(self, mini_checkpoint: Path, tmp_path: Path) -> Path:
        return copy_of(mini_checkpoint, tmp_path)

    @pytest.fixture
    def name(self) -> str:
        return "language_model.model.layers.2.self_attn.o_norm.weight"

    @pytest.fixture
    def shard(self, directory: Path, name: str) -> Path:
        return directory / index_of(directory)[name]

    def refused(self, directory: Path, *words: str) -> None:
        with pytest.raises(CheckpointError) as error:
            CheckpointReader(directory).load_model()
        for word in words:
            assert word in str(error.value)

    def test_truncated(self, directory: Path, shard: Path) -> None:
        size = shard.stat().st_size
        os.truncate(shard, size - 1)
        self.refused(
            directory, shard.name, f"ends at byte {size}", f"{size - 1} bytes", "truncated"
        )

    @pytest.mark.parametrize("size", [0, 7])
    def test_truncated_to_nothing(self, directory: Path, shard: Path, size: int) -> None:
        os.truncate(shard, size)
        self.refused(directory, shard.name, f"{size} bytes")

    def test_bytes_after_the_data(self, directory: Path, shard: Path) -> None:
        size = shard.stat().st_size
        with shard.open("ab") as file:
            file.write(b"x")
        self.refused(directory, shard.name, f"{size + 1} bytes", f"end at byte {size}")

    def test_missing_shard(self, directory: Path, shard: Path) -> None:
        shard.unlink()
        self.refused(directory, shard.name, "does not exist")

    def test_header_longer_than_the_file(self, directory: Path, shard: Path) -> None:
        with shard.open("r+b") as file:
            file.write(struct.pack("<Q", 1 << 60))
        self.refused(directory, shard.name, f"header of {1 << 60} bytes")

    @pytest.mark.parametrize("text", [b"{]", b"\xff\xfe", b"[]", b"[" * 100_000])
    def test_header_that_is_no_json_object(self, directory: Path, shard: Path, text: bytes) -> None:
        shard.write_bytes(struct.pack("<Q", len(text)) + text)
        self.refused(directory, shard.name, "not valid")

    @pytest.mark.parametrize(
        ("entry", "words"),
        [
            ({"shape": [31]}, ["needs 124 bytes", "hold 128"]),
            ({"shape": [-1]}, ["[-1]"]),
            ({"shape": "32"}, ["'32'"]),
            ({"dtype": "F12"}, ["unknown dtype 'F12'"]),
            ({"data_offsets": [0]}, ["[0]"]),
            ({"data_offsets": [0, 128]}, ["overlaps"]),
            ({"data_offsets": [1 << 50, (1 << 50) + 128]}, ["gap"]),
            ({"extra": 1}, ["must have dtype, shape and data_offsets"]),
            ({"dtype": ["BF16"]}, ["unknown dtype ['BF16']"]),
            ({"dtype": {}}, ["unknown dtype {}"]),
            ({"shape": [1] * 9}, ["not a list of at most 8 sizes"]),
            ({"shape": [10**39] * 8}, ["needs 4000", "characters) bytes"]),
            ({"dtype": "F" * 5000}, ["5,002 characters"]),
        ],
    )
    def test_header_entries(
        self, directory: Path, shard: Path, name: str, entry: Header, words: list[str]
    ) -> None:
        edit_header(shard, lambda header: header[name].update(entry))
        self.refused(directory, shard.name, *words)

    def test_wrong_shape(self, directory: Path, shard: Path, name: str) -> None:
        edit_header(shard, lambda header: header[name].update(shape=[2, 16]))
        self.refused(directory, shard.name, name, "expected shape [32]", "found [2, 16]")

    def test_wrong_dtype(self, directory: Path, shard: Path, name: str) -> None:
        edit_header(shard, lambda header: header[name].update(dtype="I32"))
        self.refused(directory, shard.name, name, "expected dtype F32 or BF16", "found I32")

    def test_missing_tensor(self, directory: Path, shard: Path, name: str) -> None:
        wrong = name.replace("o_norm", "p_norm")
        edit_header(shard, lambda header: header.update({wrong: header.pop(name)}))
        self.refused(directory, shard.name, name, "no such tensor")
        weight_map = index_of(directory)
        weight_map[wrong] = weight_map.pop(name)
        write_index(directory, weight_map)
        self.refused(directory, f"has no tensor {name}", "asks for F32 of shape [32]")

    def test_incomplete_checkpoint(self, directory: Path, tmp_path: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        config["text_config"]["num_hidden_layers"] = 10
        config["text_config"]["linear_attn_config"]["kda_layers"].append(10)
        (directory / "config.json").write_text(json.dumps(config))
        self.refused(directory, "has no tensor language_model.model.layers.9.")

    def test_tensor_that_the_index_does_not_have(
        self, directory: Path, shard: Path, name: str
    ) -> None:
        weight_map = index_of(directory)
        del weight_map[name]
        write_index(directory, weight_map)
        self.refused(directory, shard.name, name, "no file")

    def test_tensor_in_two_shards(self, directory: Path, name: str) -> None:
        safetensors.torch.save_file(
            {name: torch.ones(32), "vision_tower.x": torch.ones(1)}, directory / "z.safetensors"
        )
        write_index(directory, index_of(directory) | {"vision_tower.x": "z.safetensors"})
        self.refused(directory, "z.safetensors", name)

    def test_names_given_twice(self, directory: Path, name: str) -> None:
        text = (directory / INDEX_FILE).read_text()
        (directory / INDEX_FILE).write_text(
            text.replace('"weight_map": {', f'"weight_map": {{"{name}": "x",', 1)
        )
        self.refused(directory, INDEX_FILE, name, "more than once")

    @pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", 3])
    def test_index_that_leaves_the_directory(
        self, directory: Path, name: str, file: object
    ) -> None:
        write_index(directory, index_of(directory) | {name: file})
        self.refused(directory, INDEX_FILE, name, repr(file))

    @pytest.mark.parametrize("file", ["a\0b", "z" * 255])
    def test_index_that_names_what_no_file_is_called(
        self, directory: Path, name: str, file: str
    ) -> None:
        write_index(directory, index_of(directory) | {name: file})
        self.refused(directory, INDEX_FILE, name, "does not exist")

    @pytest.mark.parametrize("change", [-1, 1, 0.5])
    def test_the_sum_of_the_index(self, directory: Path, change: float) -> None:
        index = json.loads((directory / INDEX_FILE).read_text())
        right = index["metadata"]["total_size"]
        index["metadata"]["total_size"] = float(right)
        (directory / INDEX_FILE).write_text(json.dumps(index))
        CheckpointReader(directory)
        index["metadata"]["total_size"] = right + change
        (directory / INDEX_FILE).write_text(json.dumps(index))
        self.refused(directory, INDEX_FILE, f"total_size of {right + change}", str(right))

    @pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
    def test_index_without_a_map(self, directory: Path, text: str) -> None:
        (directory / INDEX_FILE).write_text(text)
        self.refused(directory, INDEX_FILE, "weight_map")

    @pytest.mark.parametrize("scale", [0, 255])
    def test_scale_bytes_that_are_no_scale(self, directory: Path, scale: int) -> None:
        name = "language_model.model.layers.4.block_sparse_moe.experts.7.w3.weight_scale"
        path = directory / index_of(directory)[name]
        begin = Shard(path).entries[name].begin
        with path.open("r+b") as file:
            file.seek(begin + 5)
            file.write(bytes([scale]))
        self.refused(directory, path.name, name, f"found {scale}")


def test_unaligned_data_is_copied(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
            "none": {"dtype": "BF16", "shape": [0, 4], "data_offsets": [11, 11]},
        }
    ).encode()
    data = bytes([1, 2, 3]) + struct.pack("<2f", 1.5, -2.0)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    shard = Shard(path)
    assert shard.tensor("a").tolist() == [1, 2, 3]
    assert shard.tensor("b").tolist() == [1.5, -2.0]
    assert shard.tensor("none").shape == (0, 4)


def test_conversions_from_bf16(mini_linear_checkpoint: Path, tmp_path: Path) -> None:
    """Vectors that one release has in fp32 and the other in bf16 are read from either."""
    directory = copy_of(mini_linear_checkpoint, tmp_path)
    for file in set(index_of(directory).values()):
        tensors = safetensors.torch.load_file(directory / file)
        changed = {
            name: tensor.bfloat16() if tensor.dtype == torch.float32 else tensor.float()
            for name, tensor in tensors.items()
            if tensor.dtype == torch.float32 or tensor.dim() in (1, 3)
        }
        safetensors.torch.save_file(tensors | changed, directory / file)
    # Without the sum of bytes, which is another one now.
    write_index(directory, index_of(directory))
    config = ModelConfig.from_checkpoint(directory)
    attention = CheckpointReader(directory, config).load_layer(0).attention
    assert isinstance(attention, KdaParameters)
    for tensor in (attention.q_conv, attention.a_log, attention.dt_bias, attention.o_norm):
        assert tensor.dtype == torch.float32
