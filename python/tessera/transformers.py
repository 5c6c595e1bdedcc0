"""`transformers.Trainer` for sharded modules."""

from __future__ import annotations

import types

import transformers

from . import _C
from .optimizer import ShardedOptimizer
from .sharded_module import Wrapper


class SavesTogether:
    """Put before a class of trainers, as in `class Mine(SavesTogether, SFTTrainer)`: all ranks gather what rank 0 saves, and an
    optimizer that the trainer makes for a sharded model is sharded, too."""

    def create_optimizer(self, *args, **kwargs):
        given = self.optimizer
        optimizer = super().create_optimizer(*args, **kwargs)
        if given is None and isinstance(self.model, Wrapper):
            optimizer = self.optimizer = ShardedOptimizer(self.model, optimizer, fused=False)  # args.optim chooses that
        return optimizer

    def _save(self, output_dir=None, state_dict=None):
        model = self.model
        if any(map(_C.is_sharded, model.parameters())):
            state_dict = state_dict or model.state_dict()
            self.model = model.module if isinstance(model, Wrapper) else model  # so its config is saved, too
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model = model

    def _save_optimizer_and_scheduler(self, output_dir):
        optimizer, state = self.optimizer, self.optimizer.state_dict()
        self.optimizer = types.SimpleNamespace(state_dict=lambda: state)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer


class Trainer(SavesTogether, transformers.Trainer):
    """`transformers.Trainer`, unchanged but that checkpoints of a sharded model are gathered by all ranks."""
