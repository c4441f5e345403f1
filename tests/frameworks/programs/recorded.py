"""A rank that fails in a function with @record. The other one waits for it."""

import os
import time

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError(f"bad shard of rank {os.environ['RANK']}\nsecond line")
    time.sleep(600)


if __name__ == "__main__":
    main()
