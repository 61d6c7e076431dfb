"""The keys of a verl run, all under one name, checked before Ray starts.

    python -m verl.trainer.main_ppo … +mxrl.recipe=mxfp4+mbs+of+aqn '+mxrl.skip=["model.layers.0.*"]' +mxrl.seed=1

verl's own sections are closed dataclasses, and `model.override_config` is written into the Hugging Face configuration
(and saved with it). At the top of the configuration a foreign section is let through, printed and logged with the
rest, but it ends in the driver. So `prepare`, called in the driver where verl validates its configuration, parses the
section, refuses what would make rollout and training differ, and sends the result to every process of the run in an
environment variable, by Ray's runtime_env. A wrong key is one line on stderr and exit code 2.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mxrl.recipes import Recipe, RecipeError

SECTION = "mxrl"
ENVIRONMENT = "MXRL_VERL"  # JSON of a VerlConfig
VENDOR = "mxrl"  # of the engines, for verl's VERL_ENGINE_VENDOR
ROLLOUT = "mxrl"  # rollout.name of our own rollout
PLUGIN = "mxrl.integrations.verl.plugin"
ROLLOUT_ACTIVATIONS = ("recipe", "a16")
STRATEGIES = ("fsdp", "fsdp2", "megatron")
EXTENSION = "mxrl.integrations.verl.vllm.Extension"  # vLLM's worker_extension_cls


class VerlConfigError(ValueError):
    """A configuration that can't be: one line that names the key and what would work."""


@dataclass(frozen=True)
class VerlConfig:
    """The section `mxrl` of a verl run. AQN's σ are in the recipe: `+aqn:START:END`."""

    recipe: str
    skip: tuple[str, ...] = ()  # fnmatch patterns of module names left unquantized, besides the recipe's
    seed: int = 0  # of AQN's noise, and of our own rollout's draws
    total_rollouts: int | None = None  # T of AQN's schedule; None: the actor's updates, optim.total_training_steps
    reference: bool = False  # quantize the reference policy too
    rollout_activations: str = "recipe"  # "a16": the rollout leaves activations alone, whatever the recipe says
    tis_cap: float = 2.0  # no key: verl's algorithm.rollout_correction.rollout_is_threshold

    def __post_init__(self) -> None:
        try:
            parsed = Recipe.parse(self.recipe)
        except RecipeError as error:
            raise VerlConfigError(f"{SECTION}.recipe: {error}") from None
        if self.rollout_activations not in ROLLOUT_ACTIVATIONS:
            raise VerlConfigError(
                f"{SECTION}.rollout_activations='{self.rollout_activations}' is none of "
                f"{', '.join(ROLLOUT_ACTIVATIONS)}"
            )
        if self.total_rollouts is not None and self.total_rollouts < 1:
            raise VerlConfigError(f"{SECTION}.total_rollouts={self.total_rollouts} must be at least 1")
        if self.skip and not parsed.quantizes:
            raise VerlConfigError(f"{SECTION}.skip: recipe '{self.recipe}' quantizes nothing that could be skipped")

    @property
    def parsed(self) -> Recipe:
        return Recipe.parse(self.recipe)

    @property
    def rollout_quantizes(self) -> bool:
        """Whether the rollout engine has to quantize activations, as training does."""
        recipe = self.parsed
        return recipe.quantizes and recipe.activations != "a16" and self.rollout_activations == "recipe"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def digest(self, names: Iterable[str]) -> str:
        """A short hash of these keys and of the names that are quantized: alike on two ranks that do the same."""
        return hashlib.blake2b("\n".join([self.to_json(), *sorted(names)]).encode(), digest_size=4).hexdigest()

    @classmethod
    def from_environment(cls) -> VerlConfig:
        """What `prepare` sent. Raises VerlConfigError in a process that it did not reach."""
        text = os.environ.get(ENVIRONMENT)
        if text is None:
            raise VerlConfigError(
                f"{SECTION}: {ENVIRONMENT} is not set in this process; start the run by verl's main_ppo with "
                f"+{SECTION}.recipe=…, and let Ray's runtime_env reach every node"
            )
        values = json.loads(text)
        return parse(values, tis_cap=values.pop("tis_cap", 2.0))


_KEYS = tuple(f.name for f in dataclasses.fields(VerlConfig) if f.name != "tis_cap")
_KINDS: dict[str, tuple[type, str]] = {
    "recipe": (str, "text"),
    "seed": (int, "a whole number"),
    "total_rollouts": (int, "a whole number"),
    "reference": (bool, "true or false"),
    "rollout_activations": (str, "text"),
}


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def parse(section: Any, *, tis_cap: float = 2.0) -> VerlConfig:
    """The section's values as a VerlConfig; VerlConfigError names an unknown key, or a value of the wrong kind."""
    if not isinstance(section, Mapping):
        raise VerlConfigError(f"{SECTION}={section!r} is no section; write +{SECTION}.recipe=mxfp4+mbs+of+aqn")
    values = {str(key): value for key, value in section.items() if value is not None}
    for key, value in values.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise VerlConfigError(f"{SECTION}.{key} is no key{hint}; possible: {', '.join(_KEYS)}")
        if key == "skip":
            continue
        kind, words = _KINDS[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise VerlConfigError(f"{SECTION}.{key}={value!r} must be {words}")
    if "recipe" not in values:
        raise VerlConfigError(f"{SECTION}.recipe is missing; for example +{SECTION}.recipe=mxfp4+mbs+of+aqn")
    skip = values.get("skip", ())
    skip = [skip] if isinstance(skip, str) else skip
    if isinstance(skip, Mapping) or not all(isinstance(pattern, str) for pattern in skip):
        raise VerlConfigError(f"{SECTION}.skip={skip!r} must be a list of patterns")
    return VerlConfig(**{**values, "skip": tuple(skip)}, tis_cap=tis_cap)


def conflicts(ours: VerlConfig, config: Any) -> Iterator[str]:
    """Settings of verl's (a DictConfig) under which rollout and training would differ, one line each."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    rollout, recipe = config.actor_rollout_ref.rollout, ours.parsed
    here = "actor_rollout_ref."
    if actor.strategy not in STRATEGIES:
        yield f"{here}actor.strategy={actor.strategy}: possible are {', '.join(STRATEGIES)}"
        return
    engine = "megatron" if actor.strategy == "megatron" else "fsdp_config"
    if (actor.get(engine) or {}).get("qat", {}).get("enable", False):
        yield f"{here}actor.{engine}.qat.enable=True would quantize a second time; leave it off"
    for name, neutral in (("top_p", 1.0), ("top_k", -1), ("repetition_penalty", 1.0)):
        if rollout.get(name, neutral) != neutral:
            yield f"{here}rollout.{name}={rollout[name]} biases the importance weights; leave it at {neutral}"
        value = (rollout.get("val_kwargs") or {}).get(name, neutral)
        if rollout.name == ROLLOUT and value != neutral:
            yield f"{here}rollout.val_kwargs.{name}={value}: not applied by our rollout; leave it at {neutral}"
    if actor.strategy == "megatron":
        yield from _megatron_conflicts(ours, actor.megatron, model)
    if not recipe.quantizes and recipe.aqn is None:
        return
    if rollout.get("quantization") is not None:
        yield f"{here}rollout.quantization={rollout.quantization} would quantize the exported weights again; drop it"
    if rollout.checkpoint_engine.backend == "delta_sharded":
        yield f"{here}rollout.checkpoint_engine.backend=delta_sharded sends master weights; use naive or nccl"
    if ours.rollout_quantizes and rollout.name == "vllm":
        yield from _vllm_conflicts(ours, rollout)
    elif ours.rollout_quantizes and rollout.name != ROLLOUT:
        yield (
            f"{here}rollout.name={rollout.name} computes with 16-bit activations and recipe '{ours.recipe}' trains "
            f"with quantized ones; set +{SECTION}.rollout_activations=a16 to accept that, or add +w4a16 to the recipe"
        )
    if rollout.name == ROLLOUT and rollout.checkpoint_engine.backend != "naive":
        yield f"{here}rollout.name={ROLLOUT} needs rollout.checkpoint_engine.backend=naive"
    rank = max(model.get("lora_rank", 0), model.get("lora", {}).get("rank", 0))
    if rank > 0 and model.get("lora", {}).get("merge", False):
        yield f"{here}model.lora.merge=True: a merged weight is quantized otherwise than base and adapter; leave it off"
    if rank > 0 and rollout.name == ROLLOUT:
        yield f"{here}rollout.name={ROLLOUT} takes no LoRA adapters; use vllm"
    if rank > 0 and recipe.quantizes and "dummy" not in rollout.load_format:
        yield f"{here}rollout.load_format={rollout.load_format}: verl would leave a LoRA's base as stored; use dummy"
    if rank > 0 and recipe.aqn is not None:
        yield f"{SECTION}.recipe: verl sends a LoRA's base weights once, so +aqn's noise can't change; leave out +aqn"


def _megatron_conflicts(ours: VerlConfig, megatron: Any, model: Any) -> Iterator[str]:
    """What our Megatron engine can't do; integrations/megatron.py finds the rest in the model's layers."""
    here, recipe = "actor_rollout_ref.actor.megatron", ours.parsed
    if recipe.base == "nvfp4":
        yield f"{SECTION}.recipe: nvfp4 has one scale a matrix, and Megatron cuts and fuses matrices; use mxfp4"
    if recipe.quantize_grad:
        yield f"{SECTION}.recipe: quantize_grad blocks along outputs, which Megatron cuts and fuses; leave it out"
    for key, why in (
        ("vanilla_mbridge", "builds TransformerEngine's layers, which can't be quantized"),
        ("use_megatron_fsdp", "is not supported"),
    ):
        if megatron.get(key, False):
            yield f"{here}.{key}=True {why}; set it to False"
    if max(model.get("lora_rank", 0), model.get("lora", {}).get("rank", 0)) > 0:
        yield "actor_rollout_ref.model.lora: adapters are not supported with Megatron; use fsdp2"
    if importlib.util.find_spec("megatron") is None:
        yield "actor_rollout_ref.actor.strategy=megatron: megatron-core is not installed"


def vllm_settings(ours: VerlConfig, rollout: Any) -> dict[str, Any]:
    """vLLM's `quantization_config` for this run: the recipe, with what the launch script has put there itself."""
    overrides = (rollout.engine_kwargs.get("vllm") or {}).get("hf_overrides") or {}
    theirs = overrides.get("quantization_config") or {}
    return {**theirs, "quant_method": "mxrl", "recipe": ours.recipe, "skip": list(ours.skip)}


def _vllm_conflicts(ours: VerlConfig, rollout: Any) -> Iterator[str]:
    """What keeps vLLM from quantizing activations as training does; the plugin's own settings say what it serves."""
    from mxrl.integrations.vllm.settings import Settings, VllmPluginError

    here = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    kwargs = rollout.engine_kwargs.get("vllm") or {}
    worker = kwargs.get("worker_extension_cls") or EXTENSION
    if worker != EXTENSION:
        yield f"{here}.worker_extension_cls={worker} stands where mxrl's check of vLLM must; drop it"
    overrides = kwargs.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping):
        yield f"{here}.hf_overrides={overrides!r} must be a section, so that quantization_config can be added"
        return
    theirs = overrides.get("quantization_config") or {}
    if not isinstance(theirs, Mapping):
        yield f"{here}.hf_overrides.quantization_config={theirs!r}: drop it, mxrl writes it"
        return
    settings = vllm_settings(ours, rollout)
    for key, value in theirs.items():
        if value != settings[key] or key == "weights":
            yield f"{here}.hf_overrides.quantization_config: drop {key}={value}, mxrl writes it ('experts' is yours)"
            return
    try:
        Settings.from_config(settings)
    except VllmPluginError as error:
        yield f"vLLM's {error}; or set +{SECTION}.rollout_activations=a16 to leave vLLM's activations in 16 bits"


def notes(config: Any) -> Iterator[str]:
    """What works but is probably not meant, one line each."""
    mixed = (config.actor_rollout_ref.actor.get("fsdp_config") or {}).get("mixed_precision") or {}
    trains, draws = mixed.get("param_dtype", "bf16"), config.actor_rollout_ref.rollout.dtype
    if _DTYPES.get(trains, trains) != _DTYPES.get(draws, draws):
        yield f"actor_rollout_ref.rollout.dtype={draws}, but the actor computes in {trains}: a gap that isn't 4-bit's"
    correction = config.algorithm.get("rollout_correction") or {}
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        yield "actor_rollout_ref.rollout.calculate_log_probs=False: no TIS, no gap metrics"
    elif correction.get("rollout_is") is None:
        yield "algorithm.rollout_correction.rollout_is is not set: no TIS; the paper's is token, threshold 2.0"


def prepare(config: Any, stderr: Any = None) -> VerlConfig | None:
    """Check a run's configuration in the driver and send it to every process; None for a run without a section.

    config: the DictConfig that verl's main_ppo composed; `ray_kwargs.ray_init.runtime_env.env_vars` is added to.
    Ends the process (SystemExit with code 2, one line on stderr) where the run can't be as asked.
    """
    stderr = stderr or sys.stderr
    try:
        ours = _checked(config)
    except VerlConfigError as error:
        print(f"mxrl: {error}", file=stderr, flush=True)
        raise SystemExit(2) from None
    if ours is None:
        return None
    for note in notes(config):
        print(f"mxrl: note: {note}", file=stderr, flush=True)
    _send(config, ours)
    return ours


def _checked(config: Any) -> VerlConfig | None:
    from omegaconf import OmegaConf

    if SECTION not in config:
        near = difflib.get_close_matches(SECTION, [str(key) for key in config], n=1, cutoff=0.75)
        if near:
            raise VerlConfigError(f"section '{near[0]}' is not verl's; did you mean '{SECTION}'?")
        if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
            raise VerlConfigError(f"VERL_ENGINE_VENDOR={VENDOR}, but there is no +{SECTION}.recipe")
        if config.actor_rollout_ref.rollout.name == ROLLOUT:
            raise VerlConfigError(f"rollout.name={ROLLOUT} needs +{SECTION}.recipe; 'bf16' quantizes nothing")
        return None
    section = config[SECTION]
    if OmegaConf.is_config(section):
        section = OmegaConf.to_container(section, resolve=True)
    correction = config.algorithm.get("rollout_correction") or {}
    cap = correction.get("rollout_is_threshold", 2.0)
    # an upper bound alone; verl also takes "lower_upper" as text
    ours = parse(section, tis_cap=float(cap) if isinstance(cap, int | float) else float(str(cap).split("_")[-1]))
    for conflict in conflicts(ours, config):
        raise VerlConfigError(conflict)
    return ours


def _send(config: Any, ours: VerlConfig) -> None:
    """Into this process's environment, and that of every Ray process of the run; to vLLM in its own arguments."""
    from omegaconf import open_dict

    modules = [m for m in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if m]
    variables = {
        ENVIRONMENT: ours.to_json(),
        "VERL_ENGINE_VENDOR": VENDOR,
        # verl only logs (at debug level) that an entry point failed; a module that it is told to import must be there
        "VERL_USE_EXTERNAL_MODULES": ",".join(dict.fromkeys([*modules, PLUGIN])),
    }
    if "VERL_PLATFORM" in os.environ:
        variables["VERL_PLATFORM"] = os.environ["VERL_PLATFORM"]
    os.environ.update(variables)
    with open_dict(config):
        environment = config.ray_kwargs.ray_init.get("runtime_env") or {}
        theirs = environment.get("env_vars") or {}
        config.ray_kwargs.ray_init.runtime_env = {**environment, "env_vars": {**theirs, **variables}}
        rollout = config.actor_rollout_ref.rollout
        if rollout.name == "vllm" and ours.rollout_quantizes:
            kwargs = dict(rollout.engine_kwargs.get("vllm") or {})
            overrides = {**(kwargs.get("hf_overrides") or {}), "quantization_config": vllm_settings(ours, rollout)}
            rollout.engine_kwargs.vllm = {**kwargs, "hf_overrides": overrides, "worker_extension_cls": EXTENSION}
