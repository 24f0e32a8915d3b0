"""scripts/train_hf.py, but what HF_TEST_FAIL says happens to rank 1 in the third step."""

import os
import signal
import sys
import time

from hf_dist_ext import train


def fail(how: str, trainer) -> None:
    if how == "memory" and not os.path.exists(os.path.join(trainer.args.output_dir, "smaller_chunks.json")):
        trainer.model.register_forward_pre_hook(no_memory)
    if how == "raise":
        raise OSError("the data server went away")
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(1000)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)


def no_memory(*_):
    import torch

    raise torch.OutOfMemoryError("not enough memory")


def main() -> None:
    if os.environ.get("RANK") == "1":
        from transformers import TrainerCallback

        from hf_dist_ext.tasks.parts import Parts

        class Failing(TrainerCallback):
            def on_step_begin(self, args, state, control, **others):
                if state.global_step == 2:
                    fail(os.environ["HF_TEST_FAIL"], self.trainer)

        make_trainer = Parts.make_trainer

        def with_failure(self, args):
            trainer = make_trainer(self, args)
            failing = Failing()
            failing.trainer = trainer
            trainer.add_callback(failing)
            return trainer

        Parts.make_trainer = with_failure
    train.main()


if __name__ == "__main__":
    main()
