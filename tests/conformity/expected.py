"""Trainer's own tests that end otherwise with our classes, each with the reason why that is meant.

Keys end the tests' names; what is not listed has to end as it does with the stock classes, failures (a model that is
not in the cache, another version of transformers) included.

Run last with 50 of them, on transformers 5.23 and without a network: 26 of checkpoints, 19 of callbacks, 5 of
evaluation. 45 pass with both, one (of a later version) fails with both, and these four differ.
"""

EXPECTED = {
    "TrainerResumeTrainingTest::test_resume_training_with_shard_checkpoint": (
        "removes model.safetensors from a committed checkpoint and resumes it by path: a checkpoint that is not what "
        "its manifest says is refused"
    ),
    "TrainerResumeTrainingTest::test_resume_training_with_checkpoint": "the same",
    "TrainerCheckpointRotationTest::test_compare_trainer_and_checkpoint_args_logging": (
        "resumes on a training set of another length, which is refused unless allow_changed_data is true"
    ),
    "TrainerBestModelTest::test_best_model_checkpoint_behavior": (
        "save_total_limit=1 with a best checkpoint that is not the newest: Trainer keeps the best alone, we keep the "
        "newest too, or there would be nothing to resume"
    ),
}
