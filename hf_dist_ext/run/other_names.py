"""What other projects and older releases call a field -> what to write here, with the value where that differs.

run/read.py answers an unknown field with its sentence. A value in a sentence stands as the run file writes it.
"""

_SENTENCES = {
    "bs batch_size micro_batch_size train_batch_size": "Use per_device_train_batch_size, rows of one device.",
    "eval_batch_size": "Use per_device_eval_batch_size, rows of one device.",
    "gas grad_accum gradient_accumulation accumulate_grad_batches": "Use gradient_accumulation_steps.",
    "epochs num_epochs max_epochs total_steps train_steps num_steps": (
        "Use num_train_epochs, or max_steps for a number of updates."
    ),
    "lr": "Use learning_rate.",
    "wd": "Use weight_decay.",
    "warmup_ratio": "Use warmup_steps, which is a share of all steps when below 1.",
    "optimizer": 'Use optim, such as "optim": "adamw_torch_fused".',
    "scheduler lr_scheduler": 'Use lr_scheduler_type, such as "lr_scheduler_type": "cosine".',
    "gradient_clip gradient_clipping gradient_clip_val grad_clip clip_grad_norm": "Use max_grad_norm.",
    "model model_name model_path base_model": "Use model_name_or_path.",
    "dataset train_file data_path train_data": "Use dataset_name: a file, a folder or a hub id.",
    "max_seq_length max_seq_len cutoff_len": "Use max_length: one number, or one for each column.",
    "checkpoint_dir save_dir save_top_k": (
        "Use output_dir for the folder, and save_total_limit for how many checkpoints stay."
    ),
    "precision mixed_precision": 'Use "bf16": true or "fp16": true; without them the run computes in float32.',
    "num_gpus gpus devices num_nodes world_size nproc_per_node": (
        "Use num_processes, one for each GPU of this machine; of several machines each runs accelerate launch with "
        "--num_machines and --machine_rank. hf-dist plan takes --num_devices 8 --num_nodes 1 --device h100."
    ),
    "strategy use_fsdp use_ddp use_deepspeed zero_stage": (
        'Use "accelerate_config": "ddp", or "fsdp", "hsdp", "zero2", "zero3", "tp", "pp" in its place.'
    ),
    "sharding_strategy fsdp_sharding_strategy": (
        'Use "accelerate_config": "fsdp", and "sharding": "FULL_SHARD", or SHARD_GRAD_OP, HYBRID_SHARD, NO_SHARD.'
    ),
    "offload_params fsdp_offload_params": 'Use "cpu_offload": true, with "accelerate_config": "fsdp".',
    "tp_size tensor_parallel_size": (
        'Use "accelerate_config": "tp", which makes groups of 2; accelerate launch takes others as '
        "--parallelism_config_tp_size."
    ),
    "pp_size": 'Use pipeline_parallel_size, and "accelerate_config": "pp".',
    "use_flash_attention use_flash_attn flash_attn": 'Use "attn_implementation": "flash_attention_2".',
    "use_gradient_checkpointing": 'Use "gradient_checkpointing": true.',
    "use_gradient_cache gradient_cache grad_cache chunk_size mini_batch_size": (
        'Use gradient_cache_chunk_size: a number of rows, or "gradient_cache_chunk_size": "auto"; null is off.'
    ),
    "scale loss_type": 'Use loss, and temperature, which is 1 / scale: "loss": "infonce", "temperature": 0.05.',
    "freeze_vision freeze_vision_tower freeze_language freeze_language_model freeze_gemma_language freeze_llm "
    "freeze_projector freeze_backbone tune_mm_mlp_adapter": (
        'Use frozen_modules or trainable_modules, lists of names: "vision", "language" and "projector" are known in '
        'vision-language models. "trainable_modules": ["projector"] trains the projector alone.'
    ),
    "negatives_cross_device negatives_x_device gather_across_devices": (
        "Remove it: every row's negatives are those of the whole batch, of all devices (cross_device_negatives)."
    ),
    "lora_rank": "Use lora_r.",
    "log_to_wandb log_to_tensorboard use_wandb": 'Use "report_to": ["wandb", "tensorboard"].',
    "batch_sampler": "Use no_duplicates_in_batch; other samplers are given from Python.",
    "multi_dataset_batch_sampler": "Use datasets, each with its weight.",
    "router_mapping": "Leave it out: queries take a Router's route of queries, other columns that of documents.",
    "learning_rate_mapping": "Use learning_rates.",
    "evaluation_strategy": "Use eval_strategy.",
    "group_by_length": "Remove it: rows of a batch are sorted by length before they are cut (gradient_cache_sort).",
    "no_cuda": 'Use "use_cpu": true.',
    "token_dim": 'Use "loss": "late_interaction" with projection_dim: the dimensions of token vectors.',
    "config_override": "Write --FIELD VALUE, for any field of the run file.",
}
ANSWERS = {name: sentence for names, sentence in _SENTENCES.items() for name in names.split()}
