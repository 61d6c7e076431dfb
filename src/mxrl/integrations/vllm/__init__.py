"""Recipes in vLLM (0.33): a general plugin with the quantization method "mxrl", which quantizes activations.

    settings.py   the recipe as vLLM carries it; which layers, under which Hugging Face names; blocks and shards
    forward.py    the numerics, without vLLM: Q of a layer's input, and the experts by mxrl.nn's grouped GEMMs
    experts.py    vLLM's fused experts with both inputs quantized
    method.py     vLLM's quantization config and its methods for linear layers and experts
    worker.py     what each worker quantizes, and the check against what training quantizes

    y = Q(x) · wᵀ + b       x quantized along K by the recipe's activation operand; w as loaded

Weights are left as they are loaded: a trainer sends Q(w + noise) rounded once (integrations/verl/export.py), and a
second rounding would move it. `weights="quantize"` is for a plain checkpoint served without a trainer.

The recipe travels in the Hugging Face config, which vLLM hashes into its compilation cache's key (an environment
variable it does not: a graph compiled for another recipe would be served):

    vllm serve MODEL --hf-overrides '{"quantization_config": {"quant_method": "mxrl", "recipe": "mxfp4+mbs+of"}}'

Importing this package imports nothing of vLLM; experts.py and method.py do.
"""


def register() -> None:
    """The entry point `vllm.general_plugins`: vLLM calls it in every process; calling again changes nothing."""
    from mxrl.integrations.vllm import method

    method.register()
