"""Short names of presets, and what to write in place of names that other projects have."""

PRESET_SHORT_NAMES = {
    "single": "single_gpu",
    "ddp": "multi_gpu_ddp",
    "fsdp": "multi_gpu_fsdp",
    "fsdp2": "multi_gpu_fsdp",
    "hsdp": "multi_gpu_hsdp",
    "fsdp_offload": "multi_gpu_fsdp_offload",
    "tp": "multi_gpu_tp",
    "pp": "multi_gpu_pp",
    "3d": "multi_gpu_3d",
    "zero1": "deepspeed_zero1",
    "zero2": "deepspeed_zero2",
    "zero3": "deepspeed_zero3",
}

_ANSWERS = {
    "batch_size micro_batch_size": "Use per_device_train_batch_size, rows of one device.",
    "epochs num_epochs total_steps": "Use num_train_epochs, or max_steps for a number of updates.",
    "lr": "Use learning_rate.",
    "warmup_ratio": "Use warmup_steps, which is a share of all steps when below 1.",
    "model_name base_model": "Use model_name_or_path.",
    "checkpoint_dir save_top_k": "Use output_dir for the folder, and save_total_limit for how many checkpoints stay.",
    "precision mixed_precision": 'Use "bf16": true or "fp16": true; without them the run computes in float32.',
    "num_gpus gpus devices num_nodes world_size nproc_per_node": (
        "Use num_processes, one for each GPU of this machine; of several machines each runs accelerate launch with "
        "--num_machines and --machine_rank. hf-dist plan takes --num_devices 8 --num_nodes 1 --device h100."
    ),
    "strategy use_fsdp zero_stage": 'Use accelerate_config: "ddp", "fsdp", "hsdp", "zero2", "zero3", "tp", "pp".',
    "sharding_strategy fsdp_sharding_strategy": (
        'Use "accelerate_config": "fsdp", and sharding: "FULL_SHARD", "SHARD_GRAD_OP" or "HYBRID_SHARD".'
    ),
    "tp_size tensor_parallel_size": (
        'Use "accelerate_config": "tp", which makes groups of 2; accelerate launch takes others as '
        "--parallelism_config_tp_size."
    ),
    "pp_size": 'Use pipeline_parallel_size, and "accelerate_config": "pp".',
    "use_flash_attention use_flash_attn flash_attn": 'Use "attn_implementation": "flash_attention_2".',
    "use_gradient_cache grad_cache chunk_size mini_batch_size": (
        'Use gradient_cache_chunk_size: a number of rows, or "auto".'
    ),
    "scale loss_type": 'Use loss, and temperature, which is 1 / scale: "loss": "infonce", "temperature": 0.05.',
    "max_seq_length cutoff_len": "Use max_length: one number, or one for each column.",
    "dataset train_file data_path": "Use dataset_name: a file, a folder or a hub id.",
    "freeze_vision freeze_language freeze_projector freeze_backbone freeze_llm tune_mm_mlp_adapter": (
        'Use frozen_modules or trainable_modules, lists of names: "vision", "language" and "projector" are known in '
        'vision-language models. "trainable_modules": ["projector"] trains the projector alone.'
    ),
    "negatives_cross_device negatives_x_device gather_across_devices": (
        "Remove it: every row's negatives are those of the whole batch, of all devices (cross_device_negatives)."
    ),
    "lora_rank": "Use lora_r.",
    "log_to_wandb log_to_tensorboard": 'Use "report_to": ["wandb", "tensorboard"].',
    "evaluation_strategy": "Use eval_strategy.",
    "no_cuda": 'Use "use_cpu": true.',
    "group_by_length": "Remove it: rows of a batch are sorted by length before they are cut (gradient_cache_sort).",
    "token_dim": 'Use "loss": "late_interaction" with projection_dim: the dimensions of token vectors.',
    "config_override": "Write --FIELD VALUE, for any field of the run file.",
}
MEANINGS = {name: answer for names, answer in _ANSWERS.items() for name in names.split()}
