"""Fields that say what a run writes: checkpoints, evaluations, logs."""

from __future__ import annotations

from dataclasses import dataclass

from mb_train.config.field import AT_LEAST_0, NOT_0, OFF, POSITIVE, flag

_KEPT = ("save_interval", NOT_0)
_BOARD = (("tensorboard_dir", "wandb_project"),)


@dataclass(frozen=True, kw_only=True)
class CheckpointingFields:
    """Where a run is kept, and what it goes on from."""

    save: str | None = flag(
        "run folder: checkpoints, log, picture; default with --load its folder, else (and with "
        "--finetune) none",
        on_load="own",
    )  # fmt: skip
    save_interval: int | None = flag(
        "steps between checkpoints; the last step is always saved; 0: there are none, the folder "
        "gets the log alone",
        bounds=AT_LEAST_0,
        also=("--persistent-save-interval",),
        needs=("save",),
    )
    keep_checkpoints: int | None = flag(
        "how many checkpoints to keep; default all, with --save-retain-interval the last (ours)",
        bounds=POSITIVE,
        needs=_KEPT,
    )
    save_retain_interval: int | None = flag(
        "keep those of every so many steps beside them, a multiple of --save-interval",
        bounds=POSITIVE,
        needs=_KEPT,
    )
    async_save: bool = flag("write checkpoints beside the training", False, needs=_KEPT)
    load: str | None = flag("run folder or iteration folder to go on from", on_load="own")
    ckpt_step: int | None = flag(
        "go on from this iteration of --load, not from its latest", bounds=AT_LEAST_0,
        on_load="own",
    )  # fmt: skip
    exit_on_missing_checkpoint: bool = flag(
        "do not begin anew where --load holds no checkpoint yet", False, on_load="own",
        needs=("load",),
    )  # fmt: skip
    finetune: bool = flag(
        "take only the weights of --load: a new run from step 0", False, on_load="own",
        needs=("load",),
    )  # fmt: skip
    use_checkpoint_opt_param_scheduler: bool = flag(
        "let the schedules of --load, of learning rate and weight decay, overrule those typed",
        False,
        on_load="own",
        also=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"),
        needs=[("load",), ("finetune", OFF), ("no_load_optim", OFF)],
    )  # fmt: skip
    no_load_optim: bool = flag(
        "do not take the optimizer state of --load: rates and loss scale begin anew as well", False,
        on_load="own", needs=("load",),
    )  # fmt: skip
    no_save_optim: bool = flag("leave the optimizer state out of checkpoints", False, needs=_KEPT)

    @property
    def checkpoints_kept(self) -> int | None:
        """How many checkpoints stay, those written last; None for all."""
        alone = None if self.save_retain_interval is None else 1
        return self.keep_checkpoints or alone

    def check_checkpointing(self) -> None:
        """Raise ValueError for checkpoints to keep that are never written."""
        retain, interval = self.save_retain_interval, self.save_interval
        if retain and interval and retain % interval:
            raise ValueError(
                f"Expected --save-retain-interval to be a multiple of --save-interval {interval}, "
                f"got {retain}."
            )


@dataclass(frozen=True, kw_only=True)
class ValidationFields:
    """When and how long the model is evaluated."""

    eval_iters: int = flag(
        "global batches per evaluation; 0: none",
        100,
        bounds=AT_LEAST_0,
        on_load="said",
        said_as={"-1": "0"},
    )
    eval_interval: int = flag(
        "steps between evaluations; 0 evaluates only at the end", 1000, bounds=AT_LEAST_0,
        needs=("eval_iters", NOT_0),
    )  # fmt: skip
    skip_train: bool = flag(
        "evaluate --load as at the end of a run, and take no step; nothing is saved", False,
        on_load="own",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LoggingFields:
    """What a run says of itself, and where."""

    log_interval: int = flag("steps between progress lines", 100, bounds=POSITIVE)
    log_throughput: bool = flag("say model TFLOP/s per GPU in the progress line as well", False)
    log_params_norm: bool = flag("log the norm of the weights", False)
    log_num_zeros_in_grad: bool = flag("log how many gradients are zero", False)
    timing_log_level: int = flag(
        "how much is timed: 0 set-up and checkpoints, 1 the parts of a step as well, 2 the making "
        "of its batches too", 0,
        choices=(0, 1, 2),
    )  # fmt: skip
    timing_log_option: str = flag(
        "of the ranks' times say the extremes, the longest, or all", "minmax",
        choices=("minmax", "max", "all"),
    )  # fmt: skip
    profile: bool = flag(
        "say what the GPU's time of a few steps goes into, and keep their trace", False,
        on_load="own",
    )  # fmt: skip
    profile_step_start: int = flag(
        "steps of this start before the first that is profiled", 10, bounds=AT_LEAST_0,
        on_load="own", needs=("profile",),
    )  # fmt: skip
    profile_step_end: int = flag(
        "steps of this start before the first that no longer is; an evaluation or a checkpoint "
        "ends a profile before", 12, bounds=POSITIVE,
        on_load="own", needs=("profile",),
    )  # fmt: skip
    tensorboard_dir: str | None = flag(
        "write TensorBoard scalars here (needs mb-train[tensorboard])"
    )
    tensorboard_queue_size: int = flag(
        "scalars that wait to be written", 1000, bounds=POSITIVE, needs=("tensorboard_dir",)
    )
    log_batch_size_to_tensorboard: bool = flag("write the batch size", False, needs=_BOARD)
    log_learning_rate_to_tensorboard: bool = flag(
        "write the learning rate", True, needs=_BOARD,
        # Megatron-LM's own spelling comes first: scripts have it.
        off=("--no-log-learnig-rate-to-tensorboard",),
    )  # fmt: skip
    log_loss_scale_to_tensorboard: bool = flag("write the loss scale", True, needs=_BOARD)
    log_timers_to_tensorboard: bool = flag("write the timers", False, needs=_BOARD)
    log_validation_ppl_to_tensorboard: bool = flag(
        "write the perplexity of evaluations", False, needs=_BOARD
    )
    log_memory_to_tensorboard: bool = flag("write the memory in use", False, needs=_BOARD)
    log_world_size_to_tensorboard: bool = flag("write the number of ranks", False, needs=_BOARD)
    wandb_project: str | None = flag(
        "log to this Weights & Biases project (needs wandb)", falsy_is_none=True
    )
    wandb_exp_name: str | None = flag(
        "name of the run there", needs=("wandb_project",), also=("--wandb-name",),
        falsy_is_none=True,
    )  # fmt: skip
    wandb_entity: str | None = flag(
        "who the project belongs to there", needs=("wandb_project",), falsy_is_none=True
    )
    wandb_save_dir: str | None = flag(
        "folder of its files", needs=("wandb_project",), falsy_is_none=True
    )

    def check_logging(self) -> None:
        """Raise ValueError for a profile of no step."""
        if self.profile and self.profile_step_end <= self.profile_step_start:
            raise ValueError(
                "Expected --profile-step-end above --profile-step-start, got "
                f"{self.profile_step_end} and {self.profile_step_start}."
            )
