"""A trainer that is not PEARL's: transformers' model, torch's optimiser, a loop of its own. Of PEARL it knows the bridge only.

The node agent runs it (`training.command` in job.toml). What it learns by is PPO's clipped objective on group-relative advantages,
against the log-probabilities that the batch came with; what makes it a trainer of the job is between the two lines of the bridge.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from statistics import fmean, pstdev

import torch
from transformers import AutoModelForCausalLM

from services.trainer.bridge import PearlTrainer, Trajectory

EPOCHS = 4
LEARNING_RATE = 4e-3
ENTROPY = 0.01
CLIP = 0.2


class Learner:
    """A model and its optimiser, on the device or off it."""

    def begin(self, folder: Path, temperature: float, kept: Path | None) -> None:
        """Version 0, or the one that was kept; in host memory, since the GPU may be lent just now."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.temperature = temperature
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        if kept is not None:
            state = torch.load(kept / "state.pt", map_location="cpu")
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

    # --- what the bridge asks for

    def to_device(self) -> int:
        """The GPU is ours again."""
        self._move(self.device)
        return sum(each.nbytes for each in self.model.parameters())

    def off_device(self) -> int:
        """The GPU is about to be lent."""
        self._move(torch.device("cpu"))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(each.nbytes for each in self.model.parameters())

    def save(self, folder: Path) -> None:
        """Weights, as rollout workers read them."""
        self.model.save_pretrained(folder)

    def keep(self, folder: Path) -> None:
        """What is needed to go on from here."""
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, folder / "state.pt")

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value):
                    state[name] = value.to(device)

    # --- what the bridge knows nothing of

    def train(self, trajectories: tuple[Trajectory, ...]) -> tuple[float, float]:
        """Some passes over a batch; returns the mean loss and the mean norm of the gradient."""
        advantages = torch.tensor(advantages_of(trajectories), device=self.device)
        length = max(len(each.tokens) for each in trajectories)
        padded = torch.zeros(4, len(trajectories), length)
        for row, each in enumerate(trajectories):
            values = (each.tokens, each.own, each.logprobs, [1] * len(each.tokens))
            padded[:, row, : len(each.tokens)] = torch.tensor([list(map(float, value)) for value in values])
        tokens, own, behaviour, present = (each.to(self.device) for each in padded)
        tokens, mask = tokens.long(), own[:, 1:]
        losses: list[float] = []
        norms: list[float] = []
        for _ in range(EPOCHS):
            logits = self.model(input_ids=tokens, attention_mask=present.long()).logits[:, :-1]
            distribution = (logits / self.temperature).log_softmax(-1)
            current = distribution.gather(-1, tokens[:, 1:, None]).squeeze(-1)
            ratio = (current - behaviour[:, 1:]).exp()
            gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
            entropy = -(distribution.exp() * distribution).sum(-1)
            loss = -((gain + ENTROPY * entropy) * mask).sum() / mask.sum()
            self.optimizer.zero_grad()
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)))
            self.optimizer.step()
            losses.append(loss.item())
        return fmean(losses), fmean(norms)


def advantages_of(trajectories: tuple[Trajectory, ...]) -> list[float]:
    """How much better than its group's mean each reward is, in standard deviations; 0 in a group without any spread."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for each in trajectories:
        rewards[each.group].append(each.reward)
    spread = {group: pstdev(values) for group, values in rewards.items()}
    return [
        (each.reward - fmean(rewards[each.group])) / spread[each.group] if spread[each.group] > 1e-6 else 0.0
        for each in trajectories
    ]


def main() -> None:
    """Train until the job stops."""
    torch.set_num_threads(1)
    learner = Learner()
    with PearlTrainer(
        os.environ.get("PEARL_JOB_FILE", "examples/foreign_trainer/job.toml"),
        save=learner.save,
        checkpoint=learner.keep,
        offload=learner.off_device,
        reload=learner.to_device,
    ) as pearl:
        learner.begin(pearl.model, pearl.job.pipeline.temperature, pearl.restored)
        for batch in pearl.batches():
            loss, norm = learner.train(batch.trajectories)
            pearl.publish(loss=loss, grad_norm=norm)


if __name__ == "__main__":
    main()
