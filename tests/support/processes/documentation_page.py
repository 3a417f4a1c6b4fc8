"""Runs the Python blocks of a page of the documentation, on this rank, in their order, in one namespace.

python documentation_page.py PAGE DIRECTORY: in that directory, where the page's volumes are, too.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist


def main(page: str, directory: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL)
    os.chdir(directory)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks):
        code = compile(block.replace('"/nvme', f'"{directory}/nvme'), f"block {number}", "exec")
        if "ckpt" in block and "Checkpointer" not in block:
            # The page goes on in the loop that its first block has left.
            with names["everystep"].Checkpointer("runs/other", names["state"]) as names["ckpt"]:
                exec(code, names)
        else:
            exec(code, names)
        if dist.get_rank() == 0:
            print(f"block {number} of {len(blocks)} ran", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
