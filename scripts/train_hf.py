#!/usr/bin/env python
"""Train from one run file; `hf-dist train` is the same function (hf_dist_ext/train.py).

python scripts/train_hf.py --config configs/code_search.json                    # one process, or as the file says
accelerate launch --config_file configs/accelerate/multi_gpu_ddp.yaml scripts/train_hf.py --config run.json
python scripts/train_hf.py --config run.json --learning_rate 2e-5 --max_steps 100     # any field, over the file
"""

from hf_dist_ext.train import main

if __name__ == "__main__":
    main()
