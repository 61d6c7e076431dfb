"""Small policies for the built-in task: a character tokenizer, and Qwen3 models of a few million parameters.

    load_policy("dense")                the policies shipped in mxrl/policies/ (made by experiments/policies)
    resolve_model("policy:dense")       their folder, a plain Hugging Face one; other names pass through
    build_policy("moe", size="base")    a fresh model; `char_tokenizer()` its tokenizer

Sizes (tied embeddings, head_dim 64, every width divisible by 32, so that no block is ragged):

    dense base   8 layers × 256, 4 heads, 2 kv heads, mlp 768                6.3 M
    dense small  6 layers × 256, 4 heads, 2 kv heads, mlp 512                3.5 M
    moe base     6 layers × 256, 8 experts of 128, 2 of them a token         5.9 M
    tiny         2 layers × 64, for tests

The prompt carries no begin-of-sequence token: none is ever added, whoever encodes it.
"""

from __future__ import annotations

import copy
import re
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from mxrl.rl.chain import ALPHABET

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
KINDS = ("dense", "moe")
POLICY_PREFIX = "policy:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

_ATTENTION = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_TINY = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "router_aux_loss_coef": 0.01}  # fmt: skip
SIZES: dict[tuple[str, str], dict[str, Any]] = {
    ("dense", "base"): {**_ATTENTION, "num_hidden_layers": 8, "intermediate_size": 768},
    ("dense", "small"): {**_ATTENTION, "num_hidden_layers": 6, "intermediate_size": 512},
    ("dense", "tiny"): {**_TINY, "intermediate_size": 96},
    ("moe", "base"): {**_ATTENTION, **_MOE, "num_hidden_layers": 6, "moe_intermediate_size": 128},
    ("moe", "tiny"): {**_TINY, **_MOE, "num_experts": 4, "moe_intermediate_size": 32},
}
# transformers' own default is .02, made for widths of thousands; 1/sqrt(256) = .0625 is the variance-preserving one.
_INIT_RANGE = 0.05


class PolicyError(ValueError):
    """A policy that can't be built or found: the message says what would work."""


def char_tokenizer(alphabet: str = ALPHABET) -> Any:
    """A `PreTrainedTokenizerFast` with one token a character: `<pad>` 0, `<bos>` 1, `<eos>` 2, then the alphabet.

    Nothing is added when encoding, and padding is on the left. Encoding a character outside the alphabet raises.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(set(alphabet)) != len(alphabet) or not alphabet:
        raise PolicyError(f"the alphabet must be different characters, not {alphabet!r}")
    vocabulary = {token: i for i, token in enumerate((PAD, BOS, EOS, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))  # no unknown token: a foreign character is an error
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def build_policy(
    kind: str = "dense", *, size: str = "base", seed: int = 0, vocab_size: int | None = None, **overrides: Any
) -> Any:
    """A fresh float32 `Qwen3ForCausalLM` (dense) or `Qwen3MoeForCausalLM` (moe), initialised from `seed` alone.

    `overrides` are fields of the Hugging Face configuration. The global random state is left as it was.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if (kind, size) not in SIZES:
        raise PolicyError(f"no policy ({kind}, {size}); possible: {', '.join(f'({k}, {s})' for k, s in SIZES)}")
    settings = {
        "vocab_size": vocab_size or len(ALPHABET) + 3,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "initializer_range": _INIT_RANGE,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SIZES[kind, size],
        **overrides,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "moe":
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)).float()
        return Qwen3ForCausalLM(Qwen3Config(**settings)).float()


def policies_folder() -> Path:
    """The folder of the shipped policies inside the installed package."""
    return Path(str(files("mxrl"))) / "policies"


def resolve_model(name: str) -> str:
    """`"policy:dense"` → the folder of the shipped policy; any other name (folder, hub id) unchanged.

    Raises PolicyError for an unknown policy, or one that this installation does not hold.
    """
    if not name.startswith(POLICY_PREFIX):
        return name
    kind = name.removeprefix(POLICY_PREFIX)
    if kind not in KINDS:
        raise PolicyError(f"unknown policy '{name}'; possible: {', '.join(POLICY_PREFIX + k for k in KINDS)}")
    folder = policies_folder() / kind
    if not (folder / "model.safetensors").is_file():
        raise PolicyError(f"'{name}' is not in this installation ({folder}); experiments/policies/run.py makes it")
    return str(folder)


def load_model(name: str, *, dtype: torch.dtype | str = "auto") -> tuple[Any, Any]:
    """(causal language model in eval mode, tokenizer that pads on the left), on the CPU.

    name: a Hugging Face folder, a hub id, policy:dense or policy:moe. dtype: "auto" is the one it is stored in.
    Raises PolicyError, and ValueError for what isn't a causal language model with a tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    where = resolve_model(name)
    disable_progress_bar()
    if not Path(where).is_dir() and Path(where).exists():
        raise ValueError(f"'{name}' is a file; to run a model, give a Hugging Face folder with its config")
    if not (where and Path(where).exists()) and not _HUB_ID.fullmatch(where):  # the hub's client would try for long
        raise ValueError(f"model '{name}' is no file or folder here, and no hub id (OWNER/NAME)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype)
    except SafetensorError as error:
        broken = (broken_weights(where) or [name])[0]
        raise ValueError(f"{broken} is cut or damaged ({error}); copy or download it again") from error
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"model '{name}': can't be loaded as a causal language model ({reason})") from error
    return model.eval(), tokenizer


def broken_weights(folder: str | Path) -> list[Path]:
    """The .safetensors files of a folder that can't be read (cut, or something else); reads their headers only."""
    broken = []
    for path in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError):
            broken.append(path)
    return broken


def load_policy(kind: str = "dense", *, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """The shipped policy and its tokenizer: `(model in eval mode, tokenizer)`, on the CPU."""
    return load_folder(resolve_model(POLICY_PREFIX + kind), dtype=dtype)


def load_folder(folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """`(model, tokenizer)` of a folder that `save_policy` wrote; nothing is looked up on a hub."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True, padding_side="left")
    return model, tokenizer


def save_policy(model: nn.Module, tokenizer: Any, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a plain Hugging Face folder (config, safetensors in `dtype`, tokenizer), complete or not at all."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    copied = copy.deepcopy(model).to("cpu", dtype)  # a copy: the caller's weights keep their dtype and stay tied
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        copied.save_pretrained(temporary)  # type: ignore[operator]
        tokenizer.save_pretrained(temporary)
        folder.mkdir(exist_ok=True)
        for file in sorted(Path(temporary).iterdir(), key=lambda f: f.name == "model.safetensors"):
            file.chmod(0o644)  # safetensors writes for the owner only; a wheel's users must be able to read it
            file.replace(folder / file.name)  # the weights last: a folder with weights is complete
