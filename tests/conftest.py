"""Puts tests/ on the path, so that `import edge_cases` and `from oracles import scalar` work in every test.

Without a GPU the Triton kernels run in Triton's interpreter, which has to be switched on before they are imported.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
