"""meshpar trains large transformers on a named mesh of devices.

This is the table of contents: names listed here stay, everything else may change. Each is imported when it is first
asked for, so `import meshpar` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers and editors; a test keeps the two lists equal
    from meshpar.attention.attend import attend as attend
    from meshpar.check.invariance import check_recipe as check_recipe
    from meshpar.checkpoint.manager import Checkpoints as Checkpoints
    from meshpar.checkpoint.weights import load_weights as load_weights
    from meshpar.checkpoint.weights import save_weights as save_weights
    from meshpar.generate.generator import Generator as Generator
    from meshpar.generate.generator import sample as sample
    from meshpar.generate.sampling import Sampling as Sampling
    from meshpar.hf.folder import load_hf as load_hf
    from meshpar.hf.folder import open_hf as open_hf
    from meshpar.hf.folder import save_hf as save_hf
    from meshpar.interfaces import Batch as Batch
    from meshpar.interfaces import LanguageModel as LanguageModel
    from meshpar.layout.constrain import constrain as constrain
    from meshpar.layout.constrain import einsum as einsum
    from meshpar.layout.describe import as_table as as_table
    from meshpar.matmul.linear import linear as linear
    from meshpar.matmul.lookup import lookup as lookup
    from meshpar.mesh.aot import topology as topology
    from meshpar.mesh.devices import choose_devices as choose_devices
    from meshpar.mesh.devices import use_compilation_cache as use_compilation_cache
    from meshpar.mesh.distributed import is_first as is_first
    from meshpar.mesh.distributed import join as join
    from meshpar.mesh.emulate import emulate as emulate
    from meshpar.mesh.spec import MeshSpec as MeshSpec
    from meshpar.module import abstract as abstract
    from meshpar.module import stack as stack
    from meshpar.plan import Plan as Plan
    from meshpar.precision.loss_scale import LossScaling as LossScaling
    from meshpar.precision.policy import Policy as Policy
    from meshpar.precision.remat import save_name as save_name
    from meshpar.train.build import build as build
    from meshpar.train.data import DataConfig as DataConfig
    from meshpar.train.data import open_dataset as open_dataset
    from meshpar.train.data import train_batches as train_batches
    from meshpar.train.data import validation_batches as validation_batches
    from meshpar.train.describe import describe_state as describe_state
    from meshpar.train.describe import persistent_bytes as persistent_bytes
    from meshpar.train.lora import Lora as Lora
    from meshpar.train.lora import adapt as adapt
    from meshpar.train.lora import merge_adapters as merge_adapters
    from meshpar.train.lora import with_fresh_adapters as with_fresh_adapters
    from meshpar.train.optimizer import OptimizerConfig as OptimizerConfig
    from meshpar.train.peft import load_adapter as load_adapter
    from meshpar.train.peft import save_adapter as save_adapter
    from meshpar.train.run import Recipe as Recipe
    from meshpar.train.run import RunConfig as RunConfig
    from meshpar.train.score import scorer as scorer
    from meshpar.train.step import Objective as Objective
    from meshpar.train.trainer import Hook as Hook
    from meshpar.train.trainer import fit as fit

_HOME = {
    # a plan: how one step is spread
    "MeshSpec": "mesh.spec",
    "Plan": "plan",
    "Policy": "precision.policy",
    "LossScaling": "precision.loss_scale",
    # devices and processes
    "join": "mesh.distributed",
    "is_first": "mesh.distributed",
    "emulate": "mesh.emulate",
    "choose_devices": "mesh.devices",
    "topology": "mesh.aot",
    "use_compilation_cache": "mesh.devices",
    # what a model is made of
    "LanguageModel": "interfaces",
    "Batch": "interfaces",
    "abstract": "module",
    "stack": "module",
    "constrain": "layout.constrain",
    "einsum": "layout.constrain",
    "linear": "matmul.linear",
    "lookup": "matmul.lookup",
    "attend": "attention.attend",
    "save_name": "precision.remat",
    # a step and the loop around it
    "build": "train.build",
    "Objective": "train.step",
    "OptimizerConfig": "train.optimizer",
    "fit": "train.trainer",
    "Hook": "train.trainer",
    "Checkpoints": "checkpoint.manager",
    "save_weights": "checkpoint.weights",
    "load_weights": "checkpoint.weights",
    # Hugging Face
    "open_hf": "hf.folder",
    "load_hf": "hf.folder",
    "save_hf": "hf.folder",
    # adapters
    "Lora": "train.lora",
    "adapt": "train.lora",
    "with_fresh_adapters": "train.lora",
    "merge_adapters": "train.lora",
    "save_adapter": "train.peft",
    "load_adapter": "train.peft",
    # text
    "scorer": "train.score",
    "sample": "generate.generator",
    "Generator": "generate.generator",
    "Sampling": "generate.sampling",
    "DataConfig": "train.data",
    "open_dataset": "train.data",
    "train_batches": "train.data",
    "validation_batches": "train.data",
    # a run as one value
    "Recipe": "train.run",
    "RunConfig": "train.run",
    # what a plan costs, before it runs
    "describe_state": "train.describe",
    "persistent_bytes": "train.describe",
    "as_table": "layout.describe",
    # whether a step depends on where it runs
    "check_recipe": "check.invariance",
}

__all__ = list(_HOME)


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker that sees a __getattr__ takes every name for a public one

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            from meshpar.layout.rules import did_you_mean

            raise AttributeError(f"meshpar has no public name {name!r}{did_you_mean(name, _HOME)}")
        value = getattr(import_module(f"meshpar.{_HOME[name]}"), name)
        globals()[name] = value
        return value
