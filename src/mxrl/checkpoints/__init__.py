"""What a checkpoint's files hold, in four steps (`mxrl.checkpoint` puts them together and is what others import):

files.py        which files a path or a hub id means, and what config.json says of their quantization
tensors.py      a file's tensors without their data (safetensors, GGUF, PyTorch), and a map onto the data
encodings.py    how stored bytes become a weight's numbers: plain floats, FP8, FP4, GPTQ, AWQ, packed integers, GGUF
recognise.py    which stored tensors belong together: codes, scales, zero points -> one weight
"""


class CheckpointError(RuntimeError):
    """A checkpoint that can't be read: the message names the file or tensor and says what would work."""
