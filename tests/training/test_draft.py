"""The draft that trains is the reference: hidden rows, logits and confidence of several rounds."""

from __future__ import annotations

from pathlib import Path

import torch

from k3train.draft import Draft
from kdecode.config import ModelConfig
from kdecode.config_draft import DraftConfig
from kdecode.model import draft_reference as reference
from kdecode.model.draft_synthesis import make_draft
from kdecode.model.draft_weights import load_draft
from kdecode.model.reference import GOLD32
from kdecode.model.weights import CheckpointReader

NUM_DRAFTS = 5


def test_rounds_are_those_of_the_reference(mini_checkpoint: Path, tmp_path: Path) -> None:
    make_draft(tmp_path / "draft", "mini", "inferact", seed=0)
    config = DraftConfig.from_checkpoint(tmp_path / "draft")
    parameters = load_draft(tmp_path / "draft", config)
    model = CheckpointReader(mini_checkpoint).load_model()
    width = ModelConfig.from_checkpoint(mini_checkpoint).hidden_size
    draft = Draft(config, model.embed, model.lm_head, seed=0, dtype=torch.float32)
    state = {}
    for slot, tensor in draft.state().items():
        node: object = parameters
        field = {"confidence.proj": "confidence.weight"}.get(slot, slot)
        for part in field.split("."):
            node = node[int(part)] if part.isdigit() else getattr(node, part)  # type: ignore[index]
        assert isinstance(node, torch.Tensor)
        state[slot] = node.float().view_as(tensor)
    draft.load(state)

    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 1000, (2, 24), generator=generator)
    taps = torch.randn(2, 24, len(config.taps), width, generator=generator)
    anchors = torch.tensor([[1, 9, 18], [4, 5, 6]])
    with torch.no_grad():
        rounds = draft(taps, ids, anchors, NUM_DRAFTS)
    for row in range(2):
        for place, anchor in enumerate(anchors[row].tolist()):
            cached = reference.DraftState.new(config, GOLD32)
            reference.append_context(parameters, config, cached, taps[row, :anchor], GOLD32)
            text = ids[row, anchor:].tolist()
            wanted = reference.block(
                parameters, config, model, cached, text[0], NUM_DRAFTS,
                lambda step, _, text=text: text[step + 1] if step + 1 < len(text) else 0,
                GOLD32,
            )  # fmt: skip
            torch.testing.assert_close(rounds.logits[row, place], wanted.logits, atol=1e-3, rtol=0)
            assert wanted.confidence is not None
            got = torch.sigmoid(rounds.confidence[row, place])
            torch.testing.assert_close(got, wanted.confidence, atol=1e-4, rtol=0)
