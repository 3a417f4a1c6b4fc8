"""What DeepSpeed calls its files, the entries in them and its classes. No other module knows these names.

Importing this module imports neither DeepSpeed nor torch.
"""

from __future__ import annotations

import re

# --- files

LATEST = "latest"
"""The file beside the tags that names the newest one."""
LATEST_UNIVERSAL = "latest_universal"
"""The same for directories in the universal layout; ``.`` means the directory that the file is in."""
STATES = "_states.pt"
"""How the names of a tag's files end."""
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt", re.ASCII)
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", re.ASCII)
LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt", re.ASCII)
EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt", re.ASCII)
EXPERT_OPTIMIZER_FILE = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", re.ASCII)
ZERO = "zero"
"""The directory of the universal layout that has a directory for each parameter."""
OPTIMIZER_STATE = "optimizer_state.pt"
WANTED = (
    "*_model_states.pt with *_optim_states.pt or layer_*-model_states.pt, "
    f"or {LATEST!r} beside their directory"
)
WANTED_UNIVERSAL = f"{ZERO}/{OPTIMIZER_STATE}, or {LATEST_UNIVERSAL}"


def model_file(model_rank: int, *, zero3: bool = False) -> str:
    """The name of a model-parallel rank's model file; with `zero3`, that of its first data-parallel rank."""
    return f"{'zero_pp_rank_0_' if zero3 else ''}mp_rank_{model_rank:02d}_model_states.pt"


# --- entries of files

MODULE, BUFFERS, INFO = "module", "buffer_names", "universal_checkpoint_info"
PARAM_SHAPES, SHARED = "param_shapes", "shared_params"
FROZEN_SHAPES, FROZEN_PIECES = "frozen_param_shapes", "frozen_param_fragments"
DEGREES = "checkpoint_parallel_dimensions"
SCHEDULER = "lr_scheduler"
STEPS, DATA_RANKS, VERSION, CONFIG = "global_steps", "dp_world_size", "ds_version", "ds_config"
COUNTERS = (STEPS, "global_samples", "skipped_steps")
OPTIMIZER_DICT, FLAT_MASTERS = "optimizer_state_dict", "fp32_flat_groups"
"""Of optimizer files: torch's own state in them, and the FP32 weights of ZeRO-3."""
GLOBAL_STATE = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""Of an optimizer, beside its param_groups; values ``deepspeed.<name>`` in our states."""
FP32, STEP = "fp32", "step"
OWN_KEYS = frozenset(
    [
        *(MODULE, BUFFERS, INFO, PARAM_SHAPES, SHARED, FROZEN_SHAPES, FROZEN_PIECES, DEGREES, SCHEDULER),
        *(*COUNTERS, DATA_RANKS, VERSION, CONFIG),
        "optimizer",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "mp_world_size",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
    ]
)
"""What DeepSpeed itself puts into a model file. Everything else is the client's."""

# --- classes

FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"
STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler.LossScaler"
DYNAMIC_LOSS_SCALER = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
CLASSES = frozenset({FRAGMENT, STAGE, LOSS_SCALER, DYNAMIC_LOSS_SCALER})
"""The classes of DeepSpeed whose objects are in its files."""
SUBPARAM_SHAPE = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
"""A further one in files of the universal layout."""
NAMESPACE = "argparse.Namespace"
"""The class of arguments that users put into the client state."""
